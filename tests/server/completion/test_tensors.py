"""Prompts as tensors: Triton's generate, streams of gRPC, plain inference, and the command line."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from tests.runtime.generation import decoders
from tests.server.completion import written
from tests.server.test_observation import Lines
from tests.server.torchserve.conftest import PORTS
from tests.support import RunIngot, succeeded

PROMPT = "hello there"
PATH = f"/v2/models/{written.NAME}"
CURL = ("curl", "-sN", "--noproxy", "*")


def texts(prompt: str = PROMPT) -> np.ndarray[Any, Any]:
    return np.array([prompt.encode()], object)


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", f"{PATH}/generate_stream", json=body) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]


@pytest.mark.parametrize(("name", "output"), [("text_input", "text_output"), ("text", "text")])
def test_triton_generates_and_streams(http: httpx.Client, name: str, output: str) -> None:
    expected = written.text(PROMPT, 12)
    answer = http.post(f"{PATH}/generate", json={name: PROMPT, "max_tokens": 12})
    assert answer.json() == {"model_name": written.NAME, "model_version": "1", output: expected}
    events = streamed(http, **{name: PROMPT, "parameters": {"max_tokens": 12, "stream": True}})
    assert "".join(event[output] for event in events) == expected
    assert len(events) > 1
    whole = http.post(f"{PATH}/generate", json={name: PROMPT, "max_tokens": 12, "exclude_input_in_output": False})
    assert whole.json()[output] == PROMPT + expected


def test_parameters_choose_tokens(http: httpx.Client) -> None:
    def ask(**parameters: Any) -> str:
        answer = http.post(f"{PATH}/generate", json={"text_input": PROMPT, "parameters": parameters})
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["text_output"]
        return found

    whole = written.text(PROMPT, 16)
    assert ask() == whole
    assert ask(stop=whole[4:6]) == whole[: whole.index(whole[4:6])]
    assert ask(temperature=5.0, seed=1) == ask(temperature=5.0, seed=1) != whole
    assert ask(temperature=5.0, top_k=1, max_tokens=3) == whole[:3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_input": PROMPT, "beam_width": 4}, "'parameters.beam_width' is not a field"),
        ({"text_input": PROMPT, "temperature": -1}, "'parameters.temperature' is -1"),
        ({"text_input": PROMPT, "stream": True}, "use generate_stream or ModelStreamInfer"),
        ({"text_input": [PROMPT, PROMPT]}, "of one element"),
        ({"text_input": PROMPT, "text": PROMPT}, "has one input"),
        ({"text_input": ""}, "'text_input' is empty"),
        ({"text_input": 5}, "text_input"),
        ({}, "prompt"),
    ],
)
def test_wrong_requests_are_refused(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = http.post(f"{PATH}/generate", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_tritons_clients_get_whole_texts(server: RunningServer) -> None:
    for module, url in ((tritonclient.http, server.http_url), (tritonclient.grpc, server.grpc_url)):
        client: Any = module.InferenceServerClient(url.partition("//")[2])
        given = module.InferInput("text_input", [1], "BYTES")
        given.set_data_from_numpy(texts())
        found = client.infer(written.NAME, [given], parameters={"max_tokens": 9}).as_numpy("text_output")
        assert found.tolist() == [written.text(PROMPT, 9).encode()]
        client.close()


def test_tritons_stream_gets_the_pieces(server: RunningServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_url.partition("//")[2]) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        given = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
        given.set_data_from_numpy(texts())
        client.async_stream_infer(written.NAME, [given], parameters={"max_tokens": 9})
        pieces, last = [], False
        while not last:
            result = answers.get(timeout=30)
            pieces.append(result.as_numpy("text_output")[0].decode())
            last = result.get_response().parameters["triton_final_response"].bool_param
    assert "".join(pieces) == written.text(PROMPT, 9)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_our_client_gets_whole_texts_and_pieces(server: RunningServer, protocol: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with ingot.Client(url) as client:
        metadata = client.metadata(written.NAME)
        assert [spec["name"] for spec in (*metadata["inputs"], *metadata["outputs"])] == ["text", "text"]
        assert metadata["properties"]["task"] == "text-generation"
        whole = client.infer(written.NAME, {"text": texts()}, parameters={"max_tokens": 9})
        assert whole["text"].tolist() == [written.text(PROMPT, 9).encode()]
        pieces = [*client.stream(written.NAME, {"text": texts()}, parameters={"max_tokens": 9})]
        assert b"".join(piece["text"][0] for piece in pieces).decode() == written.text(PROMPT, 9)
        with pytest.raises(InvalidArgument, match=r"'parameters\.colour' is not a field"):
            client.infer(written.NAME, {"text": texts()}, parameters={"colour": 1})
        tokens = client.infer("ids", {"prompt": np.array(written.ids(PROMPT))})["tokens"]
        assert tokens.tolist() == decoders.greedy(written.ids(PROMPT), len(tokens))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_command_line_prints_the_text(run_ingot: RunIngot, server: RunningServer, protocol: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    given = ("infer", url, written.NAME, "--input", f"text={PROMPT}", "--parameter", "max_tokens=9")
    expected = written.text(PROMPT, 9)
    assert succeeded(run_ingot(*given)) == f"{expected}\n"
    assert json.loads(succeeded(run_ingot(*given, "--json")))["outputs"]["text"] == [expected]


def test_curl_gets_a_text_and_a_stream(server: RunningServer) -> None:
    body = {"model": written.NAME, "prompt": PROMPT, "max_tokens": 5}
    command = [*CURL, f"{server.http_url}/v1/completions", "-d"]
    whole = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True).stdout
    assert json.loads(whole)["choices"][0]["text"] == written.text(PROMPT, 5)
    events = subprocess.run([*command, json.dumps(body | {"stream": True})], capture_output=True, text=True, check=True)
    assert events.stdout.endswith("data: [DONE]\n\n")


def test_the_access_log_names_the_model_that_wrote(tmp_path: Path) -> None:
    handler, logger = Lines(), logging.getLogger("ingot.access")
    logger.addHandler(handler)
    name, common = written.NAME, {"max_tokens": 4}
    stream = {"text_input": PROMPT, **common}
    with ingot.serve(str(written.archive(tmp_path)), http_port=0, grpc_port=0, isolate="none", access_log="all") as own:
        with httpx.Client(base_url=own.http_url, trust_env=False, timeout=60) as http:
            http.post("/v1/completions", json={"model": name, "prompt": PROMPT, "n": 3, **common}).raise_for_status()
            assert streamed(http, **stream)
            http.post(f"{PATH}/generate", json=stream).raise_for_status()
            assert http.post("/v1/completions", json={"model": name, "prompt": [10_000]}).status_code == 400
        with tritonclient.grpc.InferenceServerClient(own.grpc_url.partition("//")[2]) as client:
            given, answers = tritonclient.grpc.InferInput("text", [1], "BYTES"), queue.Queue[Any]()
            given.set_data_from_numpy(texts())
            client.start_stream(lambda result, error: answers.put(error))
            client.async_stream_infer(name, [given], parameters=common)
            client.stop_stream()
    logger.removeHandler(handler)
    found = [(line.get("model"), line.get("version"), line.get("rows")) for _, line in handler.lines]
    assert found == [(name, "1", 3), (name, "1", 1), (name, "1", 1), (None, None, None), (name, "1", 1)]
    assert not any("queue_ms" in line for _, line in handler.lines)


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 2), ("temperature", 1.0), ("anything", 1)])
def test_a_request_for_tokens_refuses_parameters_that_it_would_ignore(
    http: httpx.Client, name: str, value: float
) -> None:
    ids = written.ids(PROMPT)
    tensor = {"name": "prompt", "shape": [len(ids)], "datatype": "INT64", "data": ids}
    body = {"inputs": [tensor], "parameters": {"timeout": 60_000_000}}
    assert http.post(f"{PATH}/infer", json=body).status_code == 200
    body["parameters"] = {name: value}
    answer = http.post(f"{PATH}/infer", json=body)
    assert answer.status_code == 400
    assert f"parameter '{name}' is for prompts as text" in answer.json()["error"]


def test_other_apis_name_the_one_that_writes_text(http: httpx.Client, tmp_path: Path) -> None:
    embedded = http.post("/v1/embeddings", json={"model": written.NAME, "input": "hello"})
    assert embedded.status_code == 400
    assert embedded.json()["error"]["message"].endswith("which writes text; ask /v1/completions")
    options: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "torchserve": True, "torchserve_ports": PORTS}
    with ingot.serve(str(written.archive(tmp_path)), slots=1, **options) as server:
        url = f"{server.torchserve_urls['inference']}/predictions/{written.NAME}"
        answer = httpx.post(url, data={"data": "hello"}, trust_env=False)
    assert answer.status_code == 400
    assert "writes text; ask /v1/completions" in answer.json()["message"]
