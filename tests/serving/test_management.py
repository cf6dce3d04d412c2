"""Models of a running server are loaded and unloaded over its management listener."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import ingot
from benchmarks.serving.processes import free_ports
from ingot import RunningServer
from ingot.cli.completion import served
from ingot.cli.serving.serve import print_addresses
from ingot.errors import InvalidArgument, NotFound, Unavailable
from ingot.model_store import Store
from ingot.runtime import Model, Settings
from ingot.runtime.metrics import Metrics
from ingot.serving import Repository, control
from ingot.serving.deployment import Deployment
from tests import onnx_models
from tests.server.access.served import make_key
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.server.test_lifecycle import refuses
from tests.serving.rolling import X, load, times
from tests.support import RunIngot, refused, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sockets, whose paths may have some 100 characters."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path / "ingot"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    for version in (1, 2):
        store.push(times(version), f"times:{version}")
    store.push(times(3, golden=4), "times:3")
    store.promote("times:1", "prod")
    return store


def factor(server: RunningServer, name: str = "times", version: str = "") -> float:
    with ingot.Client(server.http_url) as client:
        return float((client.infer(name, {"x": X}, version=version)["y"] / X)[0, 0])


def test_what_serve_prints_leads_to_the_page(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with ingot.serve("times:1", store=store, watch="off", **FREE) as server:
        print_addresses(server._server)
        printed = capsys.readouterr().out
    assert "watch off" in printed
    assert f"\npage  {server.http_url}/ui\n" in printed  # a browser does not open the socket of management


@pytest.mark.matrix
def test_the_commands_of_a_server_load_reload_and_unload(store: Store, run_ingot: RunIngot, tmp_path: Path) -> None:
    with ingot.serve("times:prod", store=store, watch="off", **FREE) as server:
        [found] = json.loads(succeeded(run_ingot("server", "status", "--json")))
        assert (found["name"], found["version"], found["state"]) == ("times", "prod", "ready")
        store.promote("times:2", "prod")
        assert factor(server) == 1
        assert "-> " in succeeded(run_ingot("server", "reload"))
        assert factor(server) == 2
        assert "unchanged" in succeeded(run_ingot("server", "reload", "times"))

        onnx_models.affine(tmp_path)
        succeeded(run_ingot("server", "load", "other", "affine.onnx", "--set", "instances=2", cwd=tmp_path))
        assert sorted(server.models) == ["other", "times"]
        with ingot.Client(server.http_url) as client:
            assert client.infer("other", {"x": np.zeros((1, 3), np.float32)})["y"].tolist() == [[1, 1, 1]]
        succeeded(run_ingot("server", "unload", "other"))
        with ingot.Client(server.grpc_url) as client, pytest.raises(NotFound):
            client.infer("other", {"x": np.zeros((1, 3), np.float32)})
        assert "other:1  unloaded" in succeeded(run_ingot("server", "status"))
        succeeded(run_ingot("server", "load", "other"))
        assert sorted(server.models) == ["other", "times"]


@pytest.mark.matrix
def test_a_change_that_fails_names_the_reason_and_the_old_model_answers(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:prod", store=store, watch="off", **FREE) as server:
        store.promote("times:3", "prod")  # whose golden does not hold
        result = run_ingot("server", "reload")
        assert result.returncode == 1
        assert "failed: " in result.stdout
        assert "golden" in result.stdout
        assert "golden" in succeeded(run_ingot("server", "status"))
        assert factor(server) == 1
        for arguments, text in (
            (("load", "absent", "absent:1"), "absent"),
            (("load", "third", "times:3"), "does not reproduce its golden"),
            (("shadow", "times", "times:3"), "does not reproduce its golden"),
            (("load", "times", "--set", "instances=0"), "instances"),
            (("load", "times", "--set", "instance=2"), "did you mean 'instances'"),
            (("load", "times", "--set", "allow_code=1"), "a setting of ingot serve"),
            (("load", "times", "--set", "x"), "NAME=VALUE"),
            (("unload", "absent"), "absent"),
            (("reload", "absent"), "absent"),
        ):
            result = run_ingot("server", *arguments)
            assert (result.returncode, text in result.stderr) == (1, True), result.stderr
        assert factor(server) == 1
        # A name whose first load failed leaves nothing behind: clients could choose any number of names.
        assert "third" not in succeeded(run_ingot("server", "status"))
        assert 'model="third"' not in httpx.get(f"{server.http_url}/metrics", trust_env=False).text


@pytest.mark.matrix
def test_versions_keep_their_settings_if_one_of_them_cannot_be_loaded_with_others(
    store: Store, run_ingot: RunIngot
) -> None:
    with ingot.serve("times:2", "times:prod", store=store, watch="off", **FREE) as server:
        store.promote("times:3", "prod")  # whose golden does not hold
        assert "golden" in refused(run_ingot("server", "load", "times", "--set", "instances=2"))
        url = f"{server.http_url}/v2/models/times/versions"
        for version in ("2", "prod"):
            assert httpx.get(f"{url}/{version}/config").json()["instance_group"][0]["count"] == 1
        assert [factor(server, version=version) for version in ("2", "prod")] == [2, 1]
        context: Any = SimpleNamespace(params={})
        assert served(context, "t") == ["times"]
        assert sorted(served(context, "times:")) == ["times:2", "times:prod"]
        succeeded(run_ingot("server", "unload", "times:2"))
        refused(run_ingot("server", "load", "times", "--set", "instances=2"))
        with pytest.raises(NotFound, match="this server has: prod"):  # it stays unloaded
            factor(server, version="2")


@pytest.mark.one_case
@pytest.mark.parametrize("case", ["changed meanwhile", "cannot be restored"])
def test_a_version_keeps_what_another_change_set_and_what_cannot_be_undone(
    case: str, store: Store, run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = Repository.renewed

    def disturbed(self: Repository, deployment: Deployment, settings: Settings | None) -> Model:
        if deployment.tag == "prod" and case == "changed meanwhile":
            other = self.deployments["times", "2"]
            assert other.settings is not None
            other.settings = replace(other.settings, instances=3)
        if deployment.tag == "2" and settings is None:
            raise Unavailable("no memory is left")
        return renewed(self, deployment, settings)

    monkeypatch.setattr(Repository, "renewed", disturbed)
    with ingot.serve("times:2", "times:prod", store=store, watch="off", **FREE) as server:
        store.promote("times:3", "prod")  # whose golden does not hold
        shown = refused(run_ingot("server", "load", "times", "--set", "instances=2"))
        assert "golden" in shown
        assert ("times version 2 keeps the new settings" in shown) == (case == "cannot be restored")
        assert ("no memory is left" in shown) == (case == "cannot be restored")
        kept = server._server.repository.deployments["times", "2"].settings
        assert kept is not None
        assert kept.instances == (3 if case == "changed meanwhile" else 2)
        assert factor(server, version="2") == 2


@pytest.mark.matrix
def test_requests_in_flight_are_answered_while_a_model_is_loaded_and_unloaded(
    store: Store, run_ingot: RunIngot
) -> None:
    with ingot.serve("times:prod", store=store, watch="off", **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            for _ in range(3):
                succeeded(run_ingot("server", "load", "second", "times:2"))
                assert factor(server, "second") == 2
                succeeded(run_ingot("server", "unload", "second"))
        assert [(client.seen, client.failure) for client in clients] == [([1], None)] * len(clients)


@pytest.mark.matrix
def test_only_the_user_can_open_the_socket_and_it_goes_with_the_server(
    runtime: Path, store: Store, run_ingot: RunIngot
) -> None:
    result = run_ingot("server", "status")
    assert "no server of this user runs" in result.stderr
    with ingot.serve("times:1", store=store, **FREE):
        [path] = runtime.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        with ingot.serve("times:2", store=store, **FREE):
            result = run_ingot("server", "status")
            assert "several servers run" in result.stderr
            assert str(path) in result.stderr
            assert "times:1" in succeeded(run_ingot("server", "status", "--server", path))
    assert list(runtime.iterdir()) == []
    with socket.socket(socket.AF_UNIX) as stale:  # as of a server that was killed
        stale.bind(str(runtime / "1-8000.sock"))
    assert "no server of this user runs" in run_ingot("server", "status").stderr
    with ingot.serve("times:1", store=store, management="off", **FREE):
        assert list(runtime.iterdir()) == []


def test_a_folder_that_others_can_open_is_not_used(runtime: Path, store: Store, tmp_path: Path) -> None:
    runtime.mkdir(mode=0o755)
    os.chmod(runtime, 0o755)  # noqa: PTH101
    with ingot.serve("times:1", store=store, **FREE) as server:  # which is logged
        assert list(runtime.iterdir()) == []
        assert factor(server) == 1
    taken = tmp_path / "taken.sock"
    taken.write_text("a file")
    with pytest.raises(InvalidArgument, match=r"taken\.sock for management: it is taken"):
        ingot.serve("times:1", store=store, management=str(taken), **FREE)
    assert taken.read_text() == "a file"


@contextmanager
def over_network(store: Store, folder: Path) -> Iterator[tuple[RunningServer, str, str, dict[str, str]]]:
    """A server with management on ports: their addresses, and the header of a key that may manage."""
    auth = folder / "keys.toml"
    headers = {"authorization": f"Bearer {make_key(auth, 'manage', 'infer')}"}
    ports = free_ports(2)
    places = [f"127.0.0.1:{port}" for port in ports]
    settings: dict[str, Any] = {"management": places[0], "management_grpc": places[1], "auth": auth, **FREE}
    with ingot.serve("times:prod", store=store, **settings) as server:
        yield server, places[0], places[1], headers


def state_of_times(client: Any, headers: dict[str, str]) -> str:
    index = client.get_model_repository_index(headers=headers)
    if isinstance(index, list):  # over HTTP
        return str(index[0]["state"])
    return str(index.models[0].state)


@pytest.mark.matrix
def test_a_request_over_it_is_answered_while_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    with Gate(tmp_path) as gate:
        hold(gate.path, monkeypatch.setattr)
        server = ingot.serve(str(onnx_models.affine(tmp_path, "held")), **FREE)
        [place] = runtime.iterdir()
        transport = httpx.HTTPTransport(uds=str(place))
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
        with (
            ThreadPoolExecutor() as threads,
            httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http,
        ):
            gate.shut()
            asking = threads.submit(http.post, "/v2/models/held/infer", json=body)
            wait_until(gate.waited_at)
            closing = threads.submit(server.close)
            wait_until(lambda: refuses(server.http_url))
            gate.open()
            assert asking.result(60).json()["outputs"][0]["data"] == [3, 5, 7]
            closing.result(60)


@pytest.mark.matrix
def test_the_help_of_the_metric_names_every_action() -> None:
    actions = {*re.findall(r'_counting_failures\("(\w+)"', inspect.getsource(control))}
    (family,) = Metrics().management.collect()
    assert len(actions) == 5
    assert all(f"`{action}`" in family.documentation for action in actions)


def test_triton_clients_control_the_repository(store: Store, tmp_path: Path) -> None:
    with over_network(store, tmp_path) as (_, http_place, grpc_place, headers):
        for module, place in ((tritonclient.http, http_place), (tritonclient.grpc, grpc_place)):
            with module.InferenceServerClient(place) as client:
                assert state_of_times(client, headers) == "READY"
                config = json.dumps({"max_batch_size": 8, "instance_group": [{"count": 2}]})
                client.load_model("times", headers=headers, config=config)
                assert client.is_model_ready("times", headers=headers)
                client.unload_model("times", headers=headers, unload_dependents=True)
                assert state_of_times(client, headers) == "UNLOADED"
                client.load_model("times", headers=headers)
                assert state_of_times(client, headers) == "READY"
                with pytest.raises(InferenceServerException, match="failed to load 'absent', failed to poll"):
                    client.load_model("absent", headers=headers)
                with pytest.raises(InferenceServerException, match="copy an archive"):
                    client.load_model("times", headers=headers, config="{}", files={"file:1/model.onnx": b"x"})
                with pytest.raises(InferenceServerException, match="'ensemble_scheduling', which this server does not"):
                    client.load_model("times", headers=headers, config='{"ensemble_scheduling": {}}')


@pytest.mark.matrix
def test_keys_without_the_right_and_files_are_refused_over_the_network(
    store: Store, tmp_path: Path, run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx_models.affine(tmp_path)
    with over_network(store, tmp_path) as (server, place, grpc_place, headers):
        infer = {"authorization": f"Bearer {make_key(tmp_path / 'keys.toml', 'infer')}"}
        url = f"http://{place}/v2/repository"

        def post(path: str, body: Any, headers: dict[str, str]) -> tuple[int, str]:
            answer = httpx.post(f"{url}{path}", json=body, headers=headers, trust_env=False, timeout=60)
            return answer.status_code, answer.text

        assert post("/index", {}, {})[0] == 401
        status = [post("/index", {}, infer)[0], post("/models/times/unload", {}, infer)[0]]
        assert set(status) <= {401, 403}  # 401 until the new key is read
        for source in (str(tmp_path / "affine.onnx"), "oci://127.0.0.1:1/x:1", "s3://bucket/x.ingot"):
            status_code, text = post("/models/new/load", {"parameters": {"source": source}}, headers)
            assert (status_code, "over the network only models of the store" in text) == (403, True), text
        status_code, text = post("/models/times/load", {"parameters": {"labels": "/etc/hostname"}}, headers)
        assert (status_code, "'labels' is a file" in text) == (403, True), text
        for config in ("[" * 100_000, '{"instance_group": 2}', '{"instance_group": [2]}'):
            assert post("/models/times/load", {"parameters": {"config": config}}, headers)[0] == 400
        monkeypatch.chdir(tmp_path)
        Path("absent:1").touch()  # whether it exists is not for clients to know
        for path, body in (
            ("/models/new/load", {"parameters": {"source": "absent:1"}}),
            ("/models/times/load", {"parameters": {"version": "9"}}),
            ("/models/times/canary", {"source": "absent:1"}),
        ):
            status_code, text = post(path, body, headers)
            assert (status_code, "the store has no" in text, str(tmp_path) in text) == (404, True, False), text
            assert "file of that name" not in text
        nested = json.loads("[" * 900 + "]" * 900)
        for path, body in (
            ("/models/times/canary", {"weight": nested}),
            ("/models/times/canary", {"shadow": nested}),
            ("/models/times/canary", {"source": nested}),
            ("/models/times/canary", {"version": nested}),
            ("/models/times/load", {"parameters": {"version": nested}}),
            ("/models/times/load", {"parameters": {"max_batch": nested}}),
            ("/models/times/unload", {"parameters": {"unload_dependents": nested}}),
            ("/index", {"ready": nested}),
        ):
            status_code, text = post(path, body, headers)
            assert (status_code, "[[[[" in text) == (400, True), text
        assert post("/models/new/load", {"parameters": {"source": "times:2"}}, headers)[0] == 200
        # Another version of what is followed, detached from the alias.
        assert not server.status()[0]["detached"]
        assert post("/models/times/load", {"parameters": {"version": "2"}}, headers)[0] == 200
        shown = server.status()[0]
        assert (shown["digest"], shown["detached"]) == (store.digest_of("times", "2"), True)
        with (
            tritonclient.grpc.InferenceServerClient(grpc_place) as client,
            pytest.raises(InferenceServerException, match="authorization"),
        ):
            client.get_model_repository_index()
        with tritonclient.grpc.InferenceServerClient(grpc_place) as client:
            for name in (str(tmp_path / "affine.onnx"), f"new={tmp_path / 'affine.onnx'}", "oci://127.0.0.1:1/x:1"):
                with pytest.raises(InferenceServerException, match="over the network only models of the store"):
                    client.load_model(name, headers=headers)
        # The ports for inference name the place instead.
        for path in ("/index", "/models/times/load", "/models/times/unload"):
            answer = httpx.post(f"{server.http_url}/v2/repository{path}", headers=headers, json={}, trust_env=False)
            assert (answer.status_code, "management listener" in answer.text) == (501, True)
        with (
            tritonclient.grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client,
            pytest.raises(InferenceServerException, match="management listener"),
        ):
            client.get_model_repository_index(headers=headers)
        (tmp_path / "key.txt").write_text(headers["authorization"].removeprefix("Bearer "))
        where = ("--server", server.http_url, "--key-file", str(tmp_path / "key.txt"))
        assert "on the server's management listener" in run_ingot("server", "status", *where).stderr
        assert "finds a socket without --server" in run_ingot("server", "status", *where).stderr
        where = ("--server", place, "--key-file", str(tmp_path / "key.txt"))
        assert "times:2" in succeeded(run_ingot("server", "status", *where))
        assert "from --key-file or INGOT_API_KEY" in refused(run_ingot("server", "status", *where[:2]))
        asked = ("times", "--input", "x=[[1, 2, 3]]")
        for address in (server.http_url, server.grpc_url):
            assert "from --key-file or INGOT_API_KEY" in refused(run_ingot("infer", address, *asked))
            assert "from --key-file or INGOT_API_KEY" in refused(run_ingot("bench", address, "times"))
        assert "write http://127.0.0.1:18000" in refused(run_ingot("server", "status", "--server", "18000"))
        metrics = httpx.get(f"http://{place}/metrics", headers=headers, trust_env=False).text
        assert 'ingot_management_total{action="load",result="ok"} 2.0' in metrics
        assert 'ingot_management_total{action="load",result="permission_denied"} 7.0' in metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"management": "127.0.0.1:8003"}, "without --auth"),
        ({"management_grpc": "127.0.0.1:8003"}, "without --auth"),
        ({"management": "8003", "insecure": True}, "write HOST:PORT"),
        ({"management": "http://127.0.0.1:8003", "insecure": True}, "write HOST:PORT"),
        ({"management": "/absent/folder/ctl.sock"}, "cannot listen on /absent/folder/ctl.sock"),
    ],
)
def test_addresses_that_cannot_be_used_are_named(store: Store, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ingot.serve("times:1", store=store, **settings, **FREE)
