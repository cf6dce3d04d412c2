"""Values that a model rejects and tensors without elements, over both protocols; and repeated faults in the log."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

import ingot
from ingot import RunningServer
from ingot.errors import TooLarge
from ingot.faults import RateLimitFilter
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array, DType, arrays
from tests import onnx_models
from tests.runtime.fake_engines import FunctionEngine
from tests.server.outside import INFER

EMPTY: dict[str, dict[str, Array]] = {
    "identity-fp32": {"x": np.zeros((0, 2), np.float32)},
    "identity-bytes": {"x": np.zeros((0, 2), object)},
    "pair": {"a": np.zeros((1, 0), np.float32), "b": np.zeros((1, 0), np.float32)},
    "unbatched": {"x": np.zeros(0, np.float32)},
}
REJECTED: dict[str, tuple[str, dict[str, Array], str]] = {
    "a divisor of zero": ("quotient", {"x": np.ones((1, 2), np.int64), "d": np.zeros((1, 2), np.int64)}, "by zero"),
    "a shape of another size": (
        "reshaped",
        {"x": np.ones(4, np.float32), "shape": np.array([3, 3])},
        "cannot be reshaped",
    ),
    "an index out of range": ("embedding", {"ids": np.array([[11]])}, "out of data bounds"),
}


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_url.partition("://")[2]) as opened:
        yield opened


def over_http(server: RunningServer, model: str, inputs: Mapping[str, Array], *, binary: bool) -> httpx.Response:
    tensors: list[dict[str, Any]] = []
    for name, array in inputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": DType.of(array).value, "shape": array.shape}
        size = {"parameters": {"binary_data_size": len(arrays.to_bytes(array))}}
        tensors.append(tensor | (size if binary else {"data": array.reshape(-1).tolist()}))
    header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": binary}}).encode()
    body = header + b"".join(map(arrays.to_bytes, inputs.values())) if binary else header
    url = f"{server.http_url}/v2/models/{model}/infer"
    headers = {"Inference-Header-Content-Length": str(len(header))} if binary else {}
    return httpx.post(url, content=body, headers=headers, trust_env=False, timeout=60)


def over_grpc(channel: grpc.Channel, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    ask: Any = channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
    answer: pb.ModelInferResponse = ask(request, timeout=60)
    return answer


def message(
    model: str, inputs: Mapping[str, Array], *, raw: bool = True, contents: bool = False
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        tensor = request.inputs.add(name=name, datatype=DType.of(array).value, shape=array.shape)
        if contents:
            tensor.contents.SetInParent()
        if raw:
            request.raw_input_contents.append(arrays.to_bytes(array))
    return request


@pytest.mark.parametrize("model", EMPTY)
def test_tensors_without_elements(server: RunningServer, channel: grpc.Channel, model: str) -> None:
    inputs = EMPTY[model]
    shape = list(next(iter(inputs.values())).shape)
    for binary in (False, True):
        answer = over_http(server, model, inputs, binary=binary)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["shape"] == shape
    for raw in (True, False):
        reply = over_grpc(channel, message(model, inputs, raw=raw))
        assert list(reply.outputs[0].shape) == shape


@pytest.mark.parametrize("shape", [(65_537, 0), (0, 1 << 30), (1 << 34, 0)])
def test_tensors_without_elements_have_few_rows(
    server: RunningServer, channel: grpc.Channel, shape: tuple[int, ...]
) -> None:
    """Otherwise a few bytes could ask for billions of batches."""
    answer = over_http(server, "embedding", {"ids": np.empty(shape, np.int64)}, binary=False)
    assert (answer.status_code, "has no elements" in answer.text) == (400, True), answer.text
    with pytest.raises(grpc.RpcError, match="has no elements"):
        over_grpc(channel, message("embedding", {"ids": np.empty(shape, np.int64)}))


def test_a_request_without_rows_is_not_joined_with_others(server: RunningServer, channel: grpc.Channel) -> None:
    ask: Any = channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
    sent = [np.full((number % 3, 3), number, np.float32) for number in range(60)]
    calls = [ask.future(message("affine", {"x": x}), timeout=60) for x in sent]
    for x, call in zip(sent, calls, strict=True):
        assert proto_codec.decode_response(call.result())["y"].tolist() == (2 * x + 1).tolist()


def test_empty_typed_contents_with_raw_data(channel: grpc.Channel) -> None:
    x = np.array([[1, 2, 3]], np.float32)
    reply = over_grpc(channel, message("affine", {"x": x}, contents=True))
    assert proto_codec.decode_response(reply)["y"].tolist() == [[3, 5, 7]]


@pytest.mark.parametrize("case", REJECTED)
def test_values_that_the_engine_rejects(
    server: RunningServer, channel: grpc.Channel, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs, says = REJECTED[case]
    answer = over_http(server, model, inputs, binary=False)
    assert answer.status_code == 400, answer.text
    with pytest.raises(grpc.RpcError) as caught:
        over_grpc(channel, message(model, inputs))
    failed: Any = caught.value
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    for text in (answer.json()["error"], failed.details()):
        assert "the model rejects this input" in text
        assert says in text
        assert not any(inside in text for inside in (".cc", ".h:", "::", "onnxruntime/", "Status Message"))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_beyond_the_engines_memory_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Expand", ["x", "shape"], ["y"])]
    inputs = [("x", TensorProto.FLOAT, ("n", 1)), ("shape", TensorProto.INT64, (2,))]
    path = onnx_models.save(tmp_path / "m.onnx", nodes, inputs, [("y", TensorProto.FLOAT, ("p", "q"))])
    engine = load_engine(EngineSpec(path))
    with pytest.raises(TooLarge, match="the model needs more memory for this input than there is: Expand"):
        engine.run({"x": np.ones((1, 1), np.float32), "shape": np.array([1 << 31, 1 << 20])})


@pytest.mark.matrix
def test_faults_that_repeat_are_logged_a_few_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if loaded:
            raise RuntimeError("what an engine may say of its insides")
        return {"y": inputs["x"]}

    loaded: list[bool] = []
    engine = FunctionEngine(fail)
    monkeypatch.setattr("ingot.runtime.loading.load_spec.load_engine", lambda *_: engine)
    x = {"x": np.ones((1, 2), np.float32)}
    source = f"m={onnx_models.identity(folder, DType.FP32)}"
    with ingot.serve(source, http_port=0, grpc_port=0) as running:
        loaded.append(True)
        with grpc.insecure_channel(running.grpc_url.partition("://")[2]) as channel:
            for _ in range(15):
                answer = over_http(running, "m", x, binary=True)
                assert (answer.status_code, "insides" in answer.text) == (500, False)
                with pytest.raises(grpc.RpcError, match="the server's log has the cause"):
                    over_grpc(channel, message("m", x))
        metrics = httpx.get(f"{running.http_url}/metrics", trust_env=False).text
    for protocol in ("http", "grpc"):
        assert re.search(rf'^ingot_errors_total{{(?=.*"{protocol}")(?=.*"internal").*}} 15.0$', metrics, re.MULTILINE)
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert 0 < len(logged) <= 3 * 5 * 2  # three kinds, five of each in ten seconds, and a second period may begin


def test_the_log_says_how_many_errors_were_left_out() -> None:
    now = 0.0
    limited = RateLimitFilter(lambda: now)

    def passes(text: str, level: int = logging.ERROR) -> str | None:
        record = logging.LogRecord("ingot", level, "", 0, "%s", (text,), None)
        return record.getMessage() if limited.filter(record) else None

    told = [passes(f"request {number} failed") for number in range(100)]
    assert [text for text in told if text] == [f"request {number} failed" for number in range(5)]
    assert passes("another kind") == "another kind"
    assert passes("request 7 failed", logging.INFO) == "request 7 failed"
    now = 10.0
    assert passes("request 100 failed") == "request 100 failed (95 more like this were not logged)"
    assert passes("request 101 failed") == "request 101 failed"


def test_threads_that_fail_alike_share_one_count() -> None:
    class Slow(dict[str, tuple[float, int]]):
        """Lets other threads run between reading the count and changing it."""

        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            time.sleep(0.001)
            return found

    limited = RateLimitFilter(lambda: 0.0)
    limited._seen = Slow()
    records = [logging.LogRecord("ingot", logging.ERROR, "", 0, "failed", (), None) for _ in range(16)]
    with ThreadPoolExecutor(len(records)) as pool:
        assert sum(map(bool, pool.map(limited.filter, records))) == 5
