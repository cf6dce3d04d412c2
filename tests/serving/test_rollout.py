"""A running server changes what it serves: no request fails, and a candidate that is is unfit never answers."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.config import ServerConfig
from ingot.errors import IngotError, NotFound
from ingot.model_store import Store
from ingot.model_store.registry import Registry
from ingot.serving import Repository
from ingot.serving.deployment import stamp
from ingot.serving.rollout import Rollouts
from tests import onnx_models
from tests.model_store.signers import KEY, OTHER
from tests.server.outside import wait_until
from tests.server.test_lifecycle import running
from tests.serving.rolling import X, load, signed, times
from tests.support import RunIngot

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Versions 1, 2 and 3 multiply by that; prod is 1."""
    store = Store(tmp_path / "store")
    for version in (1, 2, 3):
        store.push(times(version), f"times:{version}")
    store.promote("times:1", "prod")
    return store


def test_a_promoted_version_takes_over_between_two_requests(store: Store) -> None:
    with ingot.serve("times:prod", store=store, **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            for version in (2, 3, 2, 1):
                store.promote(f"times:{version}", "prod")
                wait_until(lambda: all(c.seen[-1] == version or c.failure for c in clients))  # noqa: B023
        assert [client.seen for client in clients] == [[1, 2, 3, 2, 1]] * len(clients)


def test_first_loads_of_one_name_that_fail_at_once_leave_nothing(store: Store) -> None:
    store.push(times(4, golden=5), "times:4")
    repository = Repository(store)
    rollouts = Rollouts(repository, ServerConfig.of({"device": "cpu"}))

    async def load_twice() -> list[Any]:
        return await asyncio.gather(*(rollouts.load("third=times:4") for _ in range(2)), return_exceptions=True)

    outcomes = asyncio.run(load_twice())
    assert ["golden" in str(each) for each in outcomes] == [True, True]
    assert not repository.deployments
    assert b'model="third"' not in repository.metrics.render()


def test_a_candidate_that_does_not_reproduce_its_goldens_never_answers(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.push(times(4, golden=5), "times:4")
    with ingot.serve("times:prod", store=store, **FREE) as server, ingot.Client(server.http_url) as client:
        with load([server.http_url, server.grpc_url]) as clients:
            store.promote("times:4", "prod")
            wait_until(lambda: bool(server.status()[0]["update_failed"]))
        assert [each.seen for each in clients] == [[1]] * len(clients)
        [status] = server.status()
        assert status["state"] == "ready"
        assert status["digest"] == store.digest_of("times", "1")
        assert status["history"][-1]["to"] == store.digest_of("times", "4")
        assert "does not reproduce its golden outputs" in status["update_failed"]
        assert client.metadata("times")["properties"]["update_failed"] == status["update_failed"]
        assert "still answers: model 'times' does not reproduce" in caplog.text
        assert counted(server, "failed") == 1

        [again] = server.reload("times:prod")
        assert (again.result, counted(server, "failed")) == ("failed", 2)
        store.rollback("times:prod")
        wait_until(lambda: not server.status()[0]["update_failed"])
        assert "update_failed" not in client.metadata("times")["properties"]
        store.promote("times:2", "prod")
        wait_until(lambda: np.allclose(client.infer("times", {"x": X})["y"], 2 * X))
        assert counted(server, "ok") == 1


@pytest.mark.matrix
def test_a_candidate_whose_signature_is_not_trusted_is_refused(store: Store, tmp_path: Path) -> None:
    store = Store(tmp_path / "signed")
    store.push(signed(times(1), KEY), "times:1")
    store.push(signed(times(2), OTHER), "times:2")
    store.push(signed(times(3), KEY), "times:3")
    store.promote("times:1", "prod")
    (tmp_path / "team.pub").write_bytes(KEY.public.pem)
    policy = tmp_path / "trust.toml"
    policy.write_text('[[rule]]\nnames = "**"\nkeys = ["team.pub"]\n')
    with (
        ingot.serve("times:prod", store=store, trust=policy, watch="off", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        store.promote("times:2", "prod")
        [done] = server.reload()
        assert (done.result, done.after) == ("failed", store.digest_of("times", "2"))
        assert "whose key is not accepted" in done.reason
        assert np.allclose(client.infer("times", {"x": X})["y"], X)
        store.promote("times:3", "prod")
        [done] = server.reload()
        assert (done.result, done.reason) == ("ok", "")
        assert np.allclose(client.infer("times", {"x": X})["y"], 3 * X)


def counted(server: RunningServer, result: str) -> float:
    text = metrics(server)
    line = f'ingot_rollouts_total{{model="times",result="{result}",version="prod"}} '
    return sum(float(found.removeprefix(line)) for found in text.splitlines() if found.startswith(line))


@pytest.mark.matrix
def test_a_hangup_reloads_what_the_server_does_not_watch(store: Store, tmp_path: Path) -> None:
    with running("times:prod", "--store", str(store.root), "--watch", "off", home=tmp_path) as (process, addresses):
        with load([addresses["http"], addresses["grpc"]]) as clients:
            store.promote("times:2", "prod")
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: all(c.seen[-1] == 2 or c.failure for c in clients))
        assert [client.seen for client in clients] == [[1, 2]] * len(clients)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.matrix
def test_versions_side_by_side_are_addressed_and_change_alone(store: Store) -> None:
    with (
        ingot.serve("times:prod", "times:1", "times:3", store=store, **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):

        def factor(version: str) -> float:
            return float((client.infer("times", {"x": X}, version=version)["y"] / X)[0, 0])

        assert [factor(version) for version in ("", "latest", "3", "1", "prod")] == [3, 3, 3, 1, 1]
        with pytest.raises(NotFound):
            factor("2")
        store.promote("times:2", "prod")
        wait_until(lambda: factor("prod") == 2)
        assert [factor(version) for version in ("", "latest", "3", "1")] == [3, 3, 3, 1]
        # Tags of the store that mean a served archive.
        wait_until(lambda: server.status()[0]["aliases"] == ["2"])
        assert factor("2") == 2
        store.promote("times:3", "next")
        wait_until(lambda: server.status()[2]["aliases"] == ["next"])
        assert factor("next") == 3
        store.promote("times:1", "next")
        wait_until(lambda: server.status()[1]["aliases"] == ["next"])
        wait_until(lambda: factor("next") == 1)


@pytest.mark.matrix
def test_models_are_loaded_and_unloaded(store: Store) -> None:
    with (
        ingot.serve("times:1", store=store, **FREE) as server,
        ingot.Client(server.http_url) as http,
        ingot.Client(server.grpc_url) as grpc,
    ):
        call(server, server.rollouts.load("times:2", {"max_batch": 8}))
        for client in (http, grpc):
            assert np.allclose(client.infer("times", {"x": X})["y"], 2 * X)
        assert config_of(server, "times", "2")["max_batch_size"] == 8
        call(server, server.rollouts.unload("times:2"))
        for client in (http, grpc):
            assert np.allclose(client.infer("times", {"x": X})["y"], X)
            with pytest.raises(NotFound):
                client.infer("times", {"x": X}, version="2")
        assert [(each["version"], each["state"]) for each in server.status()] == [("1", "ready"), ("2", "unloaded")]
        assert 'version="2"' not in re.sub(
            r"^ingot_(?!model_ready|in_flight|queued).*$", "", metrics(server), flags=re.M
        )
        with pytest.raises(NotFound, match="unloaded"):
            server.reload("times:2")
        call(server, server.rollouts.load("times:2"))
        assert np.allclose(http.infer("times", {"x": X})["y"], 2 * X)
        call(server, server.rollouts.unload("times"))
        assert not http.ready()


@pytest.mark.matrix
def test_what_cannot_be_loaded_is_refused_with_the_reason(store: Store) -> None:
    store.push(times(4, golden=5), "times:4")
    with ingot.serve("times:1", store=store, **FREE) as server:
        for source, parameters, reason in (
            ("nowhere:1", None, "nowhere"),
            ("times:1", {"max_bach": 2}, "did you mean 'max_batch'"),
            ("times:1", {"max_batch": 0}, "max_batch"),
            ("times:1", {"isolate": "perhaps"}, "isolate"),
            ("times:4", None, "golden outputs"),
        ):
            with pytest.raises(IngotError, match=reason):
                call(server, server.rollouts.load(source, parameters))
        # A version that was never loaded is not kept: clients could add names without limit.
        assert [(each["version"], each["state"]) for each in server.status()] == [("1", "ready")]
        with ingot.Client(server.http_url) as client:
            assert client.ready()


def test_a_file_that_was_replaced_is_loaded_at_a_reload(tmp_path: Path) -> None:
    archive, onnx = tmp_path / "times.ingot", onnx_models.affine(tmp_path)
    times(1).save(archive)
    with ingot.serve(archive, onnx, **FREE) as server, ingot.Client(server.http_url) as client:
        assert [done.result for done in server.reload()] == ["unchanged", "unchanged"]
        other = tmp_path / "other.ingot"
        times(2).save(other)
        other.replace(archive)
        [done] = server.reload("times")
        assert (done.result, done.after) == ("ok", times(2).digest)
        assert np.allclose(client.infer("times", {"x": X})["y"], 2 * X)
        archive.unlink()
        [done] = server.reload("times")
        assert (done.result, "times.ingot" in done.reason) == ("failed", True)
        assert np.allclose(client.infer("times", {"x": X})["y"], 2 * X)


def test_a_file_saved_in_place_with_the_same_size_has_another_short_identity(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("a = 1")
    before = stamp(tmp_path / "m.py")
    os.utime(tmp_path / "m.py", ns=(0, (tmp_path / "m.py").stat().st_mtime_ns + 1))
    assert stamp(tmp_path / "m.py")[:19] != before[:19]  # as the reload's report shows it
    assert stamp(tmp_path / "none.py") == ""


@pytest.mark.matrix
def test_the_earlier_model_is_freed(store: Store) -> None:
    with ingot.serve("times:prod", store=store, watch="off", **FREE) as server:
        held = server.rollouts.repository.held
        with load([server.http_url, server.grpc_url], each=1):
            past = []
            for number in range(6):
                past.append(weakref.ref(held[0]))
                store.promote(f"times:{2 + number % 2}", "prod")
                assert [done.result for done in server.reload()] == ["ok"]
                wait_until(lambda: len(held) == 1)
        with ingot.Client(server.http_url) as http, ingot.Client(server.grpc_url) as grpc:
            for client in (http, grpc):
                client.infer("times", {"x": X}, version="prod")
        gc.collect()
        assert [each() for each in past] == [None] * len(past)


@pytest.mark.matrix
def test_an_alias_of_a_registry_is_followed(registry: str, tmp_path: Path) -> None:
    place = Registry(registry)
    for version in (1, 2):
        place.push(times(version), f"team/times:{version}")
    place.promote("team/times:1", "prod")
    address = f"{registry}/team/times:prod"
    with ingot.serve(address, store=Store(tmp_path / "store"), watch="100ms", **FREE) as server:
        with load([server.http_url, server.grpc_url], each=1) as clients:
            place.promote("team/times:2", "prod")
            wait_until(lambda: all(c.seen[-1] == 2 or c.failure for c in clients))
        assert [client.seen for client in clients] == [[1, 2]] * len(clients)


def call(server: RunningServer, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(60)


def metrics(server: RunningServer) -> str:
    return httpx.get(f"{server.http_url}/metrics", trust_env=False).text


def config_of(server: RunningServer, name: str, version: str) -> Any:
    return httpx.get(f"{server.http_url}/v2/models/{name}/versions/{version}/config", trust_env=False).json()


@pytest.mark.matrix
def test_a_reload_applies_the_configuration_file(store: Store, tmp_path: Path, run_ingot: RunIngot) -> None:
    file, socket = tmp_path / "ingot.toml", str(tmp_path / "ctl.sock")

    def write(*models: str, server: str = "") -> None:
        file.write_text("\n".join([f"[server]\n{server}", *(f"[[model]]\nsource = {model}" for model in models)]))

    write('"times:1"', '"times:2"')
    with (
        ingot.serve(store=store, config=file, management=socket, **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        write('"times:1"\nmax_batch = 4', '"times:3"', '"nowhere:1"', server="max_queue = 7\nmax_body_mb = 5")
        reloaded = run_ingot("server", "reload", "--server", socket)
        assert reloaded.returncode == 1
        states = {each["version"]: each["state"] for each in server.status()}
        assert states == {"1": "ready", "2": "unloaded", "3": "ready"}
        assert np.allclose(client.infer("times", {"x": X})["y"], 3 * X)
        assert config_of(server, "times", "1")["max_batch_size"] == 4
        assert "restart: max_body_mb" in reloaded.stdout
        assert "nowhere:1 cannot be loaded" in reloaded.stdout
        number = server.status()[0]["number"]
        server.reload()
        assert server.status()[0]["number"] == number
        file.write_text("[server]\nmax_bach = 3\n")
        with pytest.raises(IngotError, match="max_batch"):
            server.reload()
        assert np.allclose(client.infer("times", {"x": X})["y"], 3 * X)
