"""Tensors of many texts: the right answers over both protocols, while the event loop stays free for other requests."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient.utils import serialize_byte_tensor

import ingot
from ingot import RunningServer
from ingot.protocol import json_data, proto_codec
from ingot.protocol import open_inference_pb2 as pb
from ingot.tensors import arrays
from tests import onnx_models
from tests.server.outside import INFER
from tests.support import matrix

LENGTH = "Inference-Header-Content-Length"
COUNT = 40_000
"""More texts than the event loop converts."""


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    kind = TensorProto.STRING
    shape = ("batch", "n")
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    model = onnx_models.save(folder / "words.onnx", nodes, [("x", kind, shape)], [("y", kind, shape)])
    settings: dict[str, Any] = {"shared_memory": "ingot-test-*", "grpc_server": request.param}
    with ingot.serve(str(model), http_port=0, grpc_port=0, **settings) as running:
        yield running


@pytest.fixture
def converting(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The threads of the server that convert texts. Clients in the test's thread run the same functions."""
    names: set[str] = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                names.add(threading.current_thread().name.partition("_")[0])
            return function(*args, **kwargs)

        return run

    for module, name in (
        (arrays, "_unpack_bytes"),
        (arrays, "_prefixed"),
        (json_data, "_dump_texts"),
        (proto_codec, "_typed"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    return names


def texts(count: int) -> np.ndarray[Any, Any]:
    found = np.empty((1, count), object)
    found[0, :] = [b"%d" % number * (number % 4) for number in range(count)]
    return found


def test_few_large_texts_are_converted_in_a_thread(server: RunningServer, converting: set[str]) -> None:
    sent = ["äß€\U0001f600\n" * 500_000, "", 'short "'] * 2
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, len(sent)], "data": sent}
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
        answer = client.post("/v2/models/words/infer", json={"inputs": [tensor]})
        assert answer.json()["outputs"][0]["data"] == sent
        raw = serialize_byte_tensor(np.array([["a" * 3_000_000 + "ä"]], object)).item()[:-2] + b"\xc3a"
        incomplete = tensor | {"shape": [1, 1], "parameters": {"binary_data_size": len(raw)}}
        del incomplete["data"]
        head = json.dumps({"inputs": [incomplete]}).encode()
        refused = client.post("/v2/models/words/infer", content=head + raw, headers={LENGTH: str(len(head))})
        assert refused.status_code == 400
        assert "not UTF-8" in refused.json()["error"]
    assert converting == {"ingot-bodies"}


@pytest.mark.parametrize(("count", "thread"), [(10, "ingot-server"), (COUNT, "ingot-bodies")])
@pytest.mark.parametrize("client", ["http", "json", "grpc"])
def test_many_texts_are_converted_in_a_thread(
    server: RunningServer, converting: set[str], client: str, count: int, thread: str
) -> None:
    sent = texts(count)
    url = server.grpc_url if client == "grpc" else server.http_url
    with ingot.Client(url) as connection:
        answer = connection.infer("words", {"x": sent}, binary=client != "json")
    assert answer["y"].tolist() == sent.tolist()
    assert converting - {"MainThread"} <= {thread}


@pytest.mark.parametrize("raw", [True, False])
def test_many_texts_over_grpc_with_and_without_raw_contents(
    server: RunningServer, converting: set[str], raw: bool
) -> None:
    sent = texts(COUNT)
    message = pb.ModelInferRequest(model_name="words")
    message.parameters["binary_data_output"].bool_param = raw
    tensor = message.inputs.add(name="x", datatype="BYTES", shape=[1, COUNT])
    if raw:
        message.raw_input_contents.append(arrays.to_bytes(sent))
    else:
        tensor.contents.bytes_contents.extend(sent.reshape(-1).tolist())
    with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel:
        ask: Any = channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
        answer = ask(message)
    assert proto_codec.decode_response(answer)["y"].tolist() == sent.tolist()
    assert converting == {"ingot-bodies"}


def test_a_datatype_that_is_written_with_escapes_is_found(server: RunningServer, converting: set[str]) -> None:
    raw = arrays.to_bytes(texts(COUNT))
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, COUNT], "parameters": {"binary_data_size": len(raw)}}
    header = json.dumps({"inputs": [tensor]}).replace("BYTES", "\\u0042YTES").encode()
    url = f"{server.http_url}/v2/models/words/infer"
    answer = httpx.post(url, content=header + raw, headers={LENGTH: str(len(header))}, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    assert converting == {"ingot-bodies"}


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
def test_many_texts_in_shared_memory(server: RunningServer, converting: set[str], module: Any) -> None:
    """The request itself has a few bytes."""
    sent = texts(COUNT)
    raw = serialize_byte_tensor(sent).item()
    memory = Path(f"/dev/shm/ingot-test-{uuid.uuid4().hex}")
    memory.write_bytes(raw)
    address = server.grpc_url if module is triton_grpc else server.http_url
    try:
        with module.InferenceServerClient(address.partition("://")[2]) as client:
            client.register_system_shared_memory("words", f"/{memory.name}", len(raw))
            shared = module.InferInput("x", [1, COUNT], "BYTES")
            shared.set_shared_memory("words", len(raw))
            answer = client.infer("words", [shared])
            client.unregister_system_shared_memory("words")
    finally:
        memory.unlink()
    assert answer.as_numpy("y").tolist() == sent.tolist()
    assert converting == {"ingot-bodies"}


def test_one_text_without_a_header_needs_an_input_of_one_element(server: RunningServer) -> None:
    """As Triton's own tests expect it."""
    url = f"{server.http_url}/v2/models/words/infer"
    answer = httpx.post(url, content=b"427", headers={LENGTH: "0"}, trust_env=False)
    says = "For BYTE datatype raw input 'x', the model must have input shape [1]; it has [batch, n]"
    assert (answer.status_code, says in answer.json()["error"]) == (400, True)


def test_texts_in_json_beyond_the_limit_are_refused_with_the_remedy(server: RunningServer) -> None:
    count = 1_200_000
    body = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,%d],"data":[%b""]}]}' % (count, b'"",' * (count - 1))
    answer = httpx.post(f"{server.http_url}/v2/models/words/infer", content=body, trust_env=False, timeout=60)
    assert answer.status_code == 413
    assert "over 1,048,576 values" in answer.json()["error"]
    assert "binary_data_size" in answer.json()["error"]
