"""A model may answer a request several times, each time from its last answer."""

from __future__ import annotations

import json
import queue
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument, Unsupported
from ingot.server.http import generate
from tests import onnx_models
from tests.server.outside import wait_until
from tests.server.test_sequences import metric

UNTIL_FIVE = [1, 3, 6, 10, 15]


def serve(folder: Path, **settings: Any) -> RunningServer:
    model = str(onnx_models.stepper(folder))
    given = {"states": "total=total_next", "repeat": "n=n_next", "repeat_until": "done", **settings}
    return ingot.serve(model, http_port=0, grpc_port=0, **given)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(tmp_path_factory.mktemp("models")) as running:
        yield running


@contextmanager
def stream(server: RunningServer) -> Iterator[tuple[InferenceServerClient, queue.Queue[Any]]]:
    """A stream, and its answers or errors."""
    answers: queue.Queue[Any] = queue.Queue()
    with InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        yield client, answers


def ask(client: InferenceServerClient, begin: int = 0, **options: Any) -> None:
    tensor = InferInput("n", [1, 1], "INT64")
    tensor.set_data_from_numpy(np.array([[begin]]))
    client.async_stream_infer("stepper", [tensor], **options)


def received(answers: queue.Queue[Any]) -> list[tuple[int | None, bool]]:
    """Return the values and flags of the answers until the last one of a request."""
    found: list[tuple[int | None, bool]] = []
    while not (found and found[-1][1]):
        answer = answers.get(timeout=60)
        if isinstance(answer, InferenceServerException):
            raise answer
        assert isinstance(answer, InferResult)
        y, response = answer.as_numpy("y"), answer.get_response()
        found.append((None if y is None else int(y[0, 0]), response.parameters["triton_final_response"].bool_param))
    return found


@pytest.mark.matrix
def test_each_answer_is_sent_until_the_output_says_that_it_is_the_last(server: RunningServer) -> None:
    with stream(server) as (client, answers):
        for _ in range(2):  # without the first one's state
            ask(client)
            assert received(answers) == [(value, value == 15) for value in UNTIL_FIVE]
        assert client.get_model_config("stepper", as_json=True)["config"]["model_transaction_policy"]["decoupled"]
    wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)


def test_the_last_answer_is_empty_where_the_client_asks_for_that(server: RunningServer) -> None:
    with stream(server) as (client, answers):
        ask(client, enable_empty_final_response=True)
        assert received(answers) == [*((value, False) for value in UNTIL_FIVE), (None, True)]


def test_the_client_limits_the_answers_and_continues_its_sequence(server: RunningServer) -> None:
    with stream(server) as (client, answers):
        ask(client, sequence_id=7, sequence_start=True, parameters={"max_steps": 2})
        assert received(answers) == [(1, False), (3, True)]
        ask(client, 2, sequence_id=7, sequence_end=True)
        assert [value for value, _ in received(answers)] == [6, 10, 15]
        ask(client, sequence_id=7)
        with pytest.raises(InferenceServerException, match="sequence_start"):
            received(answers)
        ask(client, parameters={"max_steps": 257})
        with pytest.raises(InferenceServerException, match="from 1 to 256"):
            received(answers)
        ask(client, timeout=1)
        with pytest.raises(InferenceServerException, match=r"time|within|deadline"):
            received(answers)


def test_many_requests_at_once_each_get_their_own_answers(server: RunningServer) -> None:
    def run(begin: int) -> list[int | None]:
        with stream(server) as (client, answers):
            ask(client, -begin)
            return [value for value, _ in received(answers)]

    with ThreadPoolExecutor(8) as pool:
        for begin, found in enumerate(pool.map(run, range(8))):
            steps = range(1 - begin, 6)
            assert found == [sum(steps[: count + 1]) for count in range(len(steps))]


@pytest.mark.matrix
def test_a_client_that_leaves_ends_its_request(folder: Path) -> None:
    with serve(folder, repeat_until=None, max_steps=10**9) as server:
        with stream(server) as (client, answers):
            ask(client)
            for _ in range(3):
                assert isinstance(answers.get(timeout=60), InferResult)
            assert metric(server.http_url, "ingot_sequences{") == 1
            client.stop_stream(cancel_requests=True)
        wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_one_answer_cannot_be_asked_for(server: RunningServer, protocol: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with ingot.Client(url) as client, pytest.raises(Unsupported, match="decoupled transaction policy"):
        client.infer("stepper", {"n": np.array([[0]])})


def events(response: httpx.Response) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]


def test_answers_are_server_sent_events_over_http(server: RunningServer) -> None:
    with httpx.Client(base_url=f"{server.http_url}/v2/models/stepper", trust_env=False, timeout=60) as http:
        for _ in range(2):  # on one connection
            with http.stream("POST", "/generate_stream", json={"n": 0, "id": "a"}) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                found = events(response)
            assert [event["y"] for event in found] == UNTIL_FIVE
            assert found[-1] == {
                **{"id": "a", "model_name": "stepper", "model_version": "1"},
                **{"y": 15, "n_next": 5, "done": True},
            }
        with http.stream("POST", "/versions/1/generate_stream", json={"n": [[0], [1]], "max_steps": 2}) as response:
            assert [event["y"] for event in events(response)] == [[1, 2], [3, 5]]
        assert http.post("/generate", json={"n": 4, "parameters": {"max_steps": 1}}).json()["y"] == 5
        refused = [
            (http.post("/generate", json={"n": 0}), 501, "generate_stream"),
            (http.post("/generate_stream", json={"m": [0]}), 400, "'m' is not an input of model 'stepper'"),
            (http.post("/generate_stream", json={}), 400, "'n'"),
            (http.post("/generate_stream", json={"n": 0, "max_steps": 0}), 400, "from 1 to 256"),
            (http.post("/generate_stream", json=[]), 400, "object"),
            (http.post("/generate_stream", json={"n": 0, "sequence_id": 3}), 400, "sequence_start"),
            (httpx.post(f"{server.http_url}/v2/models/no/generate", json={}, trust_env=False), 404, "no"),
        ]
        for response, status, text in refused:
            assert (response.status_code, text in response.json()["error"]) == (status, True), response.text


@pytest.mark.matrix
def test_an_event_stream_that_fails_or_is_left_ends(folder: Path) -> None:
    with serve(folder, repeat_until=None, max_steps=10**9) as server:
        url = f"{server.http_url}/v2/models/stepper/generate_stream"
        with httpx.stream("POST", url, json={"n": 0, "timeout": 2_000_000}, trust_env=False) as response:
            *found, last = events(response)
            assert found
            assert re.search("time|within|deadline", last["error"])
        with httpx.stream("POST", url, json={"n": 0}, trust_env=False) as response:
            next(response.iter_lines())
        wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)
        # HTTP/1.0 has no chunks, so the end of the answer is that of the connection. Its client does not read it all.
        address = httpx.URL(server.http_url)
        with socket.create_connection((address.host, address.port), timeout=60) as connection:
            body = b'{"n": 0}'
            head = b"POST /v2/models/stepper/generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)
            received = connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            assert b"chunked" not in received
        wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)


def test_models_that_answer_once_have_the_extension_too(server_of_affine: str) -> None:
    url = f"{server_of_affine}/v2/models/affine"
    body = {"x": [1, 2, 3]}
    answer = {"model_name": "affine", "model_version": "1", "y": [3, 5, 7], "z": [-1, -2, -3]}
    assert httpx.post(f"{url}/generate", json=body, trust_env=False).json() == answer
    with httpx.stream("POST", f"{url}/generate_stream", json=body, trust_env=False) as response:
        assert events(response) == [answer]


@pytest.mark.matrix
def test_large_texts_are_converted_in_a_thread(server_of_affine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would delay all other requests."""
    threads: dict[str, list[str]] = {"decode": [], "_encode": []}

    def noted(name: str, real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads[name].append(threading.current_thread().name.partition("_")[0])
            return real(*arguments)

        return call

    for name in threads:
        monkeypatch.setattr(generate, name, noted(name, getattr(generate, name)))
    url = f"{server_of_affine}/v2/models/affine"
    body = {"x": [[1, 2, 3]] * 10_000}
    answer = httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=60).json()
    with httpx.stream("POST", f"{url}/generate_stream", json=body, trust_env=False, timeout=60) as response:
        assert events(response) == [answer]
    assert answer["y"] == [3, 5, 7] * 10_000
    assert threads == {name: ["ingot-bodies"] * 2 for name in threads}


def test_texts_with_too_many_values_are_refused(server_of_affine: str) -> None:
    url = f"{server_of_affine}/v2/models/affine/generate"
    values = httpx.post(url, content=b'{"x": [%b1]}' % (b"1," * (1 << 20)), trust_env=False, timeout=60)
    assert (values.status_code, "over 1,048,576 values" in values.json()["error"]) == (413, True)
    parameters = httpx.post(url, json={f"p{index}": 1 for index in range(5000)}, trust_env=False, timeout=60)
    assert (parameters.status_code, "has 5000 parameters; at most 4096" in parameters.json()["error"]) == (400, True)


@pytest.fixture(scope="module")
def server_of_affine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = onnx_models.affine(tmp_path_factory.mktemp("models"))
    with ingot.serve(str(model), http_port=0, grpc_port=0) as running:
        yield running.http_url


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeat": "m=n_next"}, "the model has the inputs n and the outputs y, n_next, done"),
        ({"repeat": "n=done"}, "they differ"),
        ({"repeat_until": "y"}, "is not a BOOL output of the model; there are: done"),
    ],
)
def test_names_that_the_model_does_not_have(folder: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message), serve(folder, **settings):
        pass
