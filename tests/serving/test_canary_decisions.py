"""A candidate gets a share of the traffic, is compared with what answers, and takes over or is rolled back."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument, Unavailable
from ingot.model_store import Archive, Store
from ingot.runtime.settings.canary import Plan
from ingot.serving.canary_decisions import changed
from ingot.serving.comparison import Side, at_least, error_of
from tests import onnx_models
from tests.server.outside import wait_until
from tests.serving.rolling import X, archive, load, times
from tests.support import RunIngot, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
POLICY: dict[str, Any] = {"canary": "0,20,50", "canary_every": "0s", "canary_drift": 1, "canary_compare": 50}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Version 1, which is prod, multiplies by 1; version 2 is as good, and version 3 is wrong."""
    store = Store(tmp_path / "store")
    for version, factor in ((1, 1.0), (2, 1.0005), (3, 1.1)):
        store.push(times(factor), f"times:{version}")
    store.promote("times:1", "prod")
    return store


def lookup() -> Archive:
    """Return an archive of y = x whose table has only the numbers below 8: it fails for larger ones."""
    nodes = [
        helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["y"]),
    ]
    return archive(nodes, [numpy_helper.from_array(np.arange(8, dtype=np.float32), "table")])


def canary(server: RunningServer) -> dict[str, Any]:
    found = server.status()[0]["canary"]
    assert isinstance(found, dict)
    return found


def answered(server: RunningServer, **headers: str) -> float:
    """Return the factor of the model that answers a request with some headers."""
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": X.ravel().tolist()}]}
    answer = httpx.post(f"{server.http_url}/v2/models/times/infer", json=body, headers=headers, trust_env=False).json()
    return round(float(answer["outputs"][0]["data"][0]), 4)


@pytest.mark.matrix
def test_a_wrong_candidate_is_rolled_back_by_drift(
    store: Store, caplog: pytest.LogCaptureFixture, run_ingot: RunIngot
) -> None:
    caplog.set_level("INFO", "ingot.changes")
    with ingot.serve("times:prod", store=store, **POLICY, **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            store.promote("times:3", "prod")
            wait_until(lambda: bool(server.status()[0]["update_failed"]))
            wait_until(lambda: all(client.seen[-1] == 1 or client.failure for client in clients))
        [status] = server.status()
        assert status["digest"] == store.digest_of("times", "1")
        assert "was rolled back as a shadow" in status["update_failed"]
        assert "answers differ by more than 0.01, the worst by 0.1; 1 % are allowed" in status["update_failed"]
        assert status["canary"]["state"] == "rolled back"
        assert status["canary"]["answers"]["agreement"] == 0
        assert "was rolled back as a shadow" in caplog.text
        levels = {record.levelname for record in caplog.records if record.name == "ingot.changes"}
        assert levels == {"INFO", "WARNING"}  # begun, and rolled back
        metrics = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
        assert 'ingot_rollouts_total{model="times",result="failed",version="prod"} 1.0' in metrics
        assert 'ingot_canary_comparisons_total{model="times",result="agreed"' in metrics
        # The alias means what answers again, so a restart does not serve the candidate.
        assert store.digest_of("times", "prod") == status["digest"]
        command = re.search(r"to try it once more: ingot store promote (\S+) prod", status["update_failed"])
        assert command is not None
        assert command[0] in caplog.text
        listed, history = (
            succeeded(run_ingot("store", name, "times", "--store", store.root)) for name in ("list", "history")
        )
        assert re.search(r"times:prod  \S+  = 1  \(\S+ was rolled back as a shadow", listed)
        assert re.search(r"rollback  times:prod  \S+ .*\(\S+ was rolled back as a shadow", history)
        store.promote(command[1], "prod")
        wait_until(lambda: len(server.status()[0]["history"]) == 3)
        assert server.status()[0]["history"][-1]["result"] == "canary"


@pytest.mark.matrix
def test_a_good_candidate_takes_over_step_by_step(store: Store) -> None:
    with ingot.serve("times:prod", store=store, **POLICY, **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            store.promote("times:2", "prod")
            wait_until(lambda: server.status()[0]["digest"] == store.digest_of("times", "2"))
            wait_until(lambda: all(client.seen[-1] != 1 or client.failure for client in clients))
        [status] = server.status()
        assert [event["result"] for event in status["history"]] == ["canary", "ok"]
        assert status["canary"]["state"] == "passed"
        assert status["canary"]["answers"]["agreement"] == 1
        assert status["canary"]["answers"]["worst_error"] == pytest.approx(5e-4, rel=1e-2)
        assert status["canary"]["requests"]["candidate"]["answered"] >= 100
        assert status["update_failed"] == ""


@pytest.mark.matrix
def test_a_candidate_of_an_alias_that_is_stopped_stays_so(
    store: Store, run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the next look at the store begins its canary again, and a restart serves it."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise Unavailable("the disk is full")

    caplog.set_level("INFO", "ingot.changes")
    with ingot.serve("times:prod", store=store, canary="0,50", canary_every="1h", **FREE) as server:
        store.promote("times:3", "prod")
        wait_until(lambda: server.status()[0]["canary"] is not None)
        assert "serves the candidate at once" in succeeded(run_ingot("server", "canary", "times"))
        said = succeeded(run_ingot("server", "canary", "times", "--stop"))
        assert "was stopped by an operator; 'times:prod' means " in said
        assert "serves the candidate" not in said
        [status] = server.status()
        assert store.digest_of("times", "prod") == status["digest"]
        assert (status["update_failed"], status["history"][-1]["result"]) == ("", "stopped")
        store.promote("times:1", "seen")
        wait_until(lambda: "seen" in server.status()[0]["aliases"])
        assert canary(server)["state"] == "stopped"

        store.promote("times:3", "prod")
        wait_until(lambda: canary(server)["state"] == "running")
        monkeypatch.setattr(Store, "rollback", full)
        said = succeeded(run_ingot("server", "canary", "times", "--stop"))
        assert "the alias could not be moved back, so a restart may serve it: the disk is full" in said
        [deployment] = server.rollouts.repository.deployments.values()
        looked = asyncio.run_coroutine_threadsafe(server.rollouts.renew(deployment, watched=True), server.loop)
        assert looked.result().result == "unchanged"
        assert canary(server)["state"] == "stopped"

        metrics = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
        assert 'ingot_rollouts_total{model="times",result="stopped",version="prod"} 2.0' in metrics
        assert 'ingot_rollouts_total{model="times",result="failed"' not in metrics
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert "is tried with 0 % of the requests; a restart of the server serves it at once" in caplog.text


@pytest.mark.matrix
def test_a_file_that_still_has_a_wrong_candidate_is_named(tmp_path: Path, run_ingot: RunIngot) -> None:
    path = tmp_path / "times.ingot"
    times(1.0).save(path)
    with ingot.serve(str(path), **POLICY, **FREE) as server:
        with load([server.http_url], version=""):
            times(1.1).save(path)
            assert run_ingot("server", "reload").returncode == 0
            wait_until(lambda: bool(server.status()[0]["update_failed"]))
        assert "; a restart serves it, as the model's source still has it" in server.status()[0]["update_failed"]
        assert run_ingot("server", "reload").returncode == 0
        path.unlink()
        said = succeeded(run_ingot("server", "canary", "times", "--stop"))
        assert "was stopped by an operator; the source of the model cannot be read: " in said
        assert "restart" not in said


@pytest.mark.matrix
def test_a_canary_by_hand(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:prod", store=store, **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            shown = succeeded(run_ingot("server", "canary", "times", "times:3", "--weight", "50", "--compare", "20"))
            assert shown.startswith("times  canary 50 %  sha256:")
            wait_until(lambda: all(len(client.seen) > 4 or client.failure for client in clients))
            wait_until(lambda: canary(server)["answers"]["compared"] > 0)
            store.promote("times:3", "prod")  # which the server does not begin again, as its canary runs
            shown = succeeded(run_ingot("server", "canary", "times"))
            assert "compared, 0.00% agree, worst error 0.1" in shown
            assert "gets 50 % of the requests" in succeeded(run_ingot("server", "status"))
            assert "'times:prod' means" in succeeded(run_ingot("server", "canary", "times", "--stop"))
            wait_until(lambda: all(client.seen[-1] == 1 or client.failure for client in clients))
            succeeded(run_ingot("server", "canary", "times:prod", "times:3", "--weight", "1"))
            succeeded(run_ingot("server", "canary", "times", "--weight", "100"))
            wait_until(lambda: all(client.seen[-1] > 1 or client.failure for client in clients))
        assert server.status()[0]["source"] == "times=times:3"
        assert canary(server)["state"] == "passed"


@pytest.mark.matrix
def test_a_candidate_that_took_over_is_loaded_again_as_the_served_version(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:1", store=store, **FREE) as server:
        succeeded(run_ingot("server", "canary", "times", "times:2", "--weight", "100"))
        succeeded(run_ingot("server", "load", "times", "--set", "max_batch=8"))
        with ingot.Client(server.http_url) as client:
            assert client.infer("times", {"x": X}, version="1")["y"][0, 0] == np.float32(1.0005)
            assert client.metadata("times")["versions"] == ["1"]
        succeeded(run_ingot("server", "unload", "times"))
        assert [each["state"] for each in server.status()] == ["unloaded"]


@pytest.mark.matrix
def test_a_shadow_reports_drift_and_answers_nobody(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:prod", store=store, **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            succeeded(run_ingot("server", "shadow", "times", "times:3", "--compare", "50"))
            wait_until(lambda: canary(server)["answers"]["compared"] > 20)
            found = json.loads(succeeded(run_ingot("server", "shadow", "times", "--json")))
        assert [client.seen for client in clients] == [[1]] * len(clients)
        assert found["answers"]["agreement"] == 0
        assert found["answers"]["worst_error"] == pytest.approx(0.1, rel=1e-3)
        assert found["latency"]["p50_ratio"] > 0
        assert found["weight"] == 0
        succeeded(run_ingot("server", "unload", "times"))
        assert canary(server)["state"] == "stopped"


@pytest.mark.matrix
def test_a_candidate_may_have_a_table_of_another_size(run_ingot: RunIngot, tmp_path: Path) -> None:
    """The ranges of its indices, which follow from the graph, differ then."""
    for name, size in (("old", 8), ("new", 12)):
        (tmp_path / name).mkdir()
        onnx_models.lookup(tmp_path / name, size)
    with ingot.serve(f"ids={tmp_path}/old/lookup.onnx", **FREE) as server, ingot.Client(server.http_url) as client:
        succeeded(run_ingot("server", "canary", "ids", f"{tmp_path}/new/lookup.onnx", "--weight", "50"))
        for _ in range(8):
            assert client.infer("ids", {"ids": np.array([[7]])})["y"].tolist() == [[[14, 15]]]
        assert canary(server)["requests"]["candidate"]["answered"] > 0


@pytest.mark.matrix
def test_what_cannot_be_tried(store: Store, run_ingot: RunIngot, tmp_path: Path) -> None:
    def refused(*args: str) -> str:
        result = run_ingot("server", *args)
        assert result.returncode == 1
        return result.stderr

    onnx_models.affine(tmp_path)
    with ingot.serve("times:prod", store=store, **FREE) as server:
        assert "no candidate is tried for model 'times'" in refused("canary", "times")
        assert "no candidate is tried" in refused("canary", "times", "--stop")
        assert "no candidate is tried" in refused("canary", "times", "--weight", "5")
        assert "there is no model 'tims'" in refused("shadow", "tims", "times:2")
        assert "has no 'times:9'" in refused("canary", "times", "times:9")
        assert "other inputs or outputs" in refused("canary", "times", str(tmp_path / "affine.onnx"))
        assert "'weight' is 101.0; it must be a percentage" in refused("canary", "times", "times:2", "--weight", "101")
        assert "percentages: 5,25,50" in refused("canary", "times", "times:2", "--steps", "5;10")
        succeeded(run_ingot("server", "shadow", "times", "times:2"))
        assert "stop its canary first" in refused("canary", "times", "times:3")
        store.promote("times:3", "prod")  # which takes the place of what is tried
        wait_until(lambda: server.status()[0]["digest"] == store.digest_of("times", "3"))
        assert canary(server)["state"] == "stopped"
        assert answered(server) == 1.1


@pytest.mark.matrix
def test_a_client_stays_with_its_version(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:prod", store=store, sticky_header="X-User", **FREE) as server:
        succeeded(run_ingot("server", "canary", "times", "times:3", "--weight", "50", "--sticky"))
        seen = {user: {answered(server, **{"x-user": user}) for _ in range(8)} for user in map(str, range(20))}
        assert all(len(versions) == 1 for versions in seen.values())
        assert {version for versions in seen.values() for version in versions} == {1, 1.1}
        with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel:
            from ingot.protocol import open_inference_pb2 as pb

            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                pb.ModelInferRequest.SerializeToString,
                pb.ModelInferResponse.FromString,
            )
            request = pb.ModelInferRequest(
                model_name="times",
                inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])],
                raw_input_contents=[X.tobytes()],
            )
            for user, [version] in seen.items():
                outputs = call(request, metadata=(("x-user", user),), timeout=30).raw_output_contents
                assert np.allclose(np.frombuffer(outputs[0], np.float32), version * X)


@pytest.mark.matrix
def test_a_candidate_that_fails_costs_no_answer(
    store: Store, caplog: pytest.LogCaptureFixture, run_ingot: RunIngot
) -> None:
    store.push(lookup(), "times:4")
    with ingot.serve("times:prod", store=store, **FREE) as server:
        with load([server.http_url, server.grpc_url]) as clients:
            # Its table has an answer for each of the first requests only.
            succeeded(run_ingot("server", "canary", "times", "times:4", "--weight", "50", "--errors", "1"))
            wait_until(lambda: canary(server)["state"] != "running")
        assert [client.seen for client in clients] == [[1]] * len(clients)
        assert canary(server)["requests"]["candidate"]["failed"] > 5
        assert "requests; 1 % are allowed" in canary(server)["reason"]
        [status] = server.status()
        assert "was rolled back at 50 %" in status["update_failed"]
        digest = status["canary"]["digest"]
        shown = [text for text in caplog.messages if "the canary of" in text]
        assert [text.count(digest) for text in shown] == [1]
        assert "was rolled back at 50 %" in shown[0]


def test_errors_of_answers() -> None:
    def error(reference: Any, found: Any) -> float:
        return error_of({"y": np.array(reference)}, {"y": np.array(found)})

    assert error([1.0, -4.0], [1.0, -4.0]) == 0
    assert error([1.0, -4.0], [1.2, -4.0]) == pytest.approx(0.05)
    assert error([0.0], [0.5]) == 0.5
    assert error([1.0, math.nan, math.inf], [1.0, math.nan, math.inf]) == 0
    assert error([1.0, math.nan], [1.0, 2.0]) == math.inf
    assert error([1.0, 2.0], [1.0, math.inf]) == math.inf
    assert error([[1.0]], [1.0]) == math.inf
    assert error([1, 2], [1, 3]) == math.inf
    assert error(["a"], ["a"]) == 0


def test_a_share_is_certain_only_after_some_requests() -> None:
    assert at_least(0, 10) == 0
    assert at_least(1, 10) == pytest.approx(1.79, abs=0.01)  # Wilson's interval
    assert at_least(10, 10) == pytest.approx(72.2, abs=0.1)
    assert Side().total == 0


def test_values_of_a_plan() -> None:
    plan = changed(Plan(), {"steps": "5,25", "every": "2m", "drift": 1, "sticky": True})
    assert plan == Plan(steps=(5.0, 25.0), every=120.0, drift=1.0, sticky=True)
    with pytest.raises(InvalidArgument, match="'weigt' is not known; did you mean 'weight'"):
        changed(Plan(), {"weigt": 5})
    with pytest.raises(InvalidArgument, match="drift is 200: it must be a number, at least 0 and at most 100"):
        changed(Plan(), {"drift": 200})
