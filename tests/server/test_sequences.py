"""Requests of a sequence share a state that the server keeps."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument, TooLarge, Unavailable
from tests import onnx_models
from tests.server.access.served import make_key
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.support import matrix

STATES = "total=total_next,past=past_next"
ONE = np.ones((1, 3), np.float32)


def serve(folder: Path, **settings: Any) -> RunningServer:
    model = str(onnx_models.running_sum(folder))
    return ingot.serve(model, http_port=0, grpc_port=0, **{"states": STATES, **settings})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(tmp_path_factory.mktemp("models")) as running:
        yield running


def ask(
    client: ingot.Client, name: str | int, x: np.ndarray[Any, Any] = ONE, model: str = "running_sum", **flags: bool
) -> float:
    """Send one request of a sequence; return the sum that its state holds."""
    parameters = {"sequence_id": name, **{f"sequence_{flag}": value for flag, value in flags.items()}}
    answer = client.infer(model, {"x": x}, parameters=parameters)
    assert sorted(answer) == ["n", "y"]
    np.testing.assert_array_equal(answer["y"], answer["n"])
    return float(answer["y"][0, 0])


@pytest.mark.matrix
def test_each_sequence_has_its_own_state(server: RunningServer) -> None:
    def run(number: int) -> list[float]:
        with ingot.Client(server.grpc_url if number % 2 else server.http_url) as client:
            x = np.full((1 + number % 3, 3), number, np.float32)
            return [ask(client, 1000 + number, x, start=step == 0, end=step == 9) for step in range(10)]

    with ThreadPoolExecutor(16) as pool:
        for number, sums in enumerate(pool.map(run, range(16))):
            assert sums == [number * (step + 1) for step in range(10)]


def test_triton_clients_send_sequences(server: RunningServer) -> None:
    made = (
        (tritonclient.http, server.http_url.removeprefix("http://")),
        (tritonclient.grpc, server.grpc_url.removeprefix("grpc://")),
    )
    for number, (module, address) in enumerate(made, 1):
        with module.InferenceServerClient(address) as client:
            tensor = module.InferInput("x", [1, 3], "FP32")
            tensor.set_data_from_numpy(ONE)
            flags = [(True, False), (False, False), (False, True)]
            answers = [
                client.infer("running_sum", [tensor], sequence_id=number, sequence_start=start, sequence_end=end)
                for start, end in flags
            ]
            assert [float(answer.as_numpy("y")[0, 0]) for answer in answers] == [1, 2, 3]
            assert {tensor["name"] for tensor in _metadata(client)["inputs"]} == {"x"}


def _metadata(client: Any) -> Any:
    if isinstance(client, tritonclient.grpc.InferenceServerClient):
        return client.get_model_metadata("running_sum", as_json=True)
    return client.get_model_metadata("running_sum")


def test_requests_of_a_sequence_run_in_the_order_in_which_they_arrive(server: RunningServer) -> None:
    answers: queue.Queue[float] = queue.Queue()
    tensor = tritonclient.grpc.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(ONE)
    with tritonclient.grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.put(-1 if error else float(result.as_numpy("y")[0, 0])))
        for step in range(50):
            client.async_stream_infer(
                "running_sum", [tensor], sequence_id="stream", sequence_start=step == 0, sequence_end=step == 49
            )
        assert [answers.get(timeout=60) for _ in range(50)] == list(range(1, 51))


@pytest.mark.parametrize("protocol", matrix("http", "grpc"))
def test_wrong_requests_name_the_remedy_and_leave_the_state(server: RunningServer, protocol: str) -> None:
    with ingot.Client(server.http_url if protocol == "http" else server.grpc_url) as client:
        with pytest.raises(InvalidArgument, match="sequence_id"):
            client.infer("running_sum", {"x": ONE})
        with pytest.raises(InvalidArgument, match="must be a whole number or a text"):
            client.infer("running_sum", {"x": ONE}, parameters={"sequence_id": 1.5})
        with pytest.raises(InvalidArgument, match="sequence_start"):
            ask(client, "never begun")
        assert ask(client, protocol, start=True) == 1
        with pytest.raises(InvalidArgument, match="unknown input 'total'; the model takes 'x'"):
            client.infer("running_sum", {"x": ONE, "total": ONE}, parameters={"sequence_id": protocol})
        with pytest.raises(InvalidArgument, match=r"dimension 'batch' of the request is 2.* began with 1"):
            ask(client, protocol, np.ones((2, 3), np.float32))
        with pytest.raises(InvalidArgument, match="FP32"):
            client.infer("running_sum", {"x": ONE.astype(int)}, parameters={"sequence_id": protocol})
        assert ask(client, protocol) == 2
        assert ask(client, protocol, start=True) == 1  # from the beginning again
        assert ask(client, protocol, end=True) == 2
        with pytest.raises(InvalidArgument, match="sequence_start"):
            ask(client, protocol)


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


def cancelled(url: str) -> float:
    return metric(url, 'ingot_requests_total{code="cancelled"')


@pytest.mark.matrix
def test_states_are_limited_and_expire(folder: Path) -> None:
    settings: dict[str, Any] = {"max_sequences": 2, "max_state_mb": 1, "sequence_timeout": "2s"}
    with serve(folder, **settings) as server, ingot.Client(server.http_url) as client:
        large = np.ones((30_000, 3), np.float32)
        assert ask(client, "large", large, start=True) == 1
        with pytest.raises(TooLarge, match="--max-state-mb"):
            ask(client, "large", large)
        assert ask(client, "small", start=True) == 1
        with pytest.raises(Unavailable, match="--max-sequences"):
            ask(client, "third", start=True)
        assert metric(server.http_url, "ingot_sequences{") == 2
        wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)
        assert metric(server.http_url, "ingot_sequence_state_bytes{") == 0
        assert metric(server.http_url, "ingot_sequences_ended_total{") == 2
        with pytest.raises(InvalidArgument, match="after 2s without a request"):
            ask(client, "small")
        assert ask(client, "third", start=True) == 1


@pytest.mark.matrix
def test_a_request_given_up_by_its_client_leaves_the_sequence(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(gate.path, monkeypatch.setattr)
    model = str(onnx_models.running_sum(folder).rename(folder / "held.onnx"))
    settings: dict[str, Any] = {"states": STATES, "isolate": "none"}
    with (
        ingot.serve(model, http_port=0, grpc_port=0, **settings) as server,
        ingot.Client(server.http_url) as client,
    ):
        assert ask(client, 1, model="held", start=True) == 1
        body = {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}],
            "parameters": {"sequence_id": 1},
        }
        with gate.closed():
            for _ in range(2):  # one that runs, and one that waits for it
                with pytest.raises(httpx.TimeoutException):
                    httpx.post(f"{server.http_url}/v2/models/held/infer", json=body, timeout=1, trust_env=False)
            wait_until(lambda: cancelled(server.http_url) == 2)
        assert ask(client, 1, model="held") == 2


def test_keys_cannot_reach_each_others_sequences(folder: Path) -> None:
    auth = folder / "keys.toml"
    keys = [make_key(auth, "infer") for _ in range(2)]
    with serve(folder, auth=auth) as server:
        first, second = (ingot.Client(server.http_url, key=key) for key in keys)
        with first, second:
            assert ask(first, "shared name", start=True) == 1
            with pytest.raises(InvalidArgument, match="sequence_start"):
                ask(second, "shared name")
            assert ask(second, "shared name", start=True) == 1
            assert ask(first, "shared name") == 2


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ("total=sum", "has no output 'sum' for the state 'total=sum'; it has y, n, total_next, past_next"),
        ("h=total_next", "has no input 'h'"),
        ("total=past_next", "they differ"),
        ("total=total_next,past=total_next", "twice"),
        ("total", "pairs of an input and an output"),
    ],
)
def test_states_that_the_model_does_not_have_are_named(folder: Path, states: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message), serve(folder, states=states):
        pass


@pytest.mark.matrix
def test_open_sequences_stay_with_the_model_that_was_replaced(tmp_path: Path) -> None:
    with serve(tmp_path) as server, ingot.Client(server.grpc_url) as client:
        held = server.rollouts.repository.held
        assert [ask(client, 1, start=True), ask(client, 2, start=True)] == [1, 1]
        for count in (2, 3):
            (tmp_path / "running_sum.onnx").touch()
            assert [done.result for done in server.reload()] == ["ok"]
            assert ask(client, 1) == count
        assert ask(client, 2, start=True) == 1
        assert ask(client, 3, start=True) == 1
        wait_until(lambda: len(held) == 2)  # the second kept none
        assert ask(client, 1, end=True) == 4
        wait_until(lambda: len(held) == 1)
        assert [ask(client, 2), ask(client, 3)] == [2, 2]
        text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
        assert 'ingot_sequences{model="running_sum",version="1"} 2.0' in text
