"""TorchServe's gRPC services, called by gRPC's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from ingot import RunningServer
from ingot.server.torchserve import torchserve_inference_pb2 as inference_pb
from ingot.server.torchserve import torchserve_management_pb2 as management_pb
from tests.server.test_image_steps import files
from tests.server.torchserve.test_predictions import ROW, affine

INFERENCE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
MANAGEMENT = "/org.pytorch.serve.grpc.management.ManagementAPIsService/"


@pytest.fixture(scope="module")
def channel(torchserve: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(torchserve.torchserve_urls["gRPC inference"].removeprefix("grpc://")) as found:
        yield found


@pytest.fixture(scope="module")
def managed(torchserve: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(torchserve.torchserve_urls["gRPC management"].removeprefix("grpc://")) as found:
        yield found


def ask(channel: grpc.Channel, method: str, request: Any, kind: Any, *, stream: bool = False) -> Any:
    open_call = channel.unary_stream if stream else channel.unary_unary
    call = open_call(method, type(request).SerializeToString, kind.FromString)
    return call(request, timeout=60)


def predict(channel: grpc.Channel, model: str, **values: bytes) -> Any:
    request = inference_pb.PredictionsRequest(model_name=model, input=values)
    return json.loads(ask(channel, INFERENCE + "Predictions", request, inference_pb.PredictionResponse).prediction)


def managing(channel: grpc.Channel, method: str, **fields: Any) -> str:
    kinds = {"RegisterModel", "ScaleWorker", "UnregisterModel", "SetDefault", "DescribeModel", "ListModels"}
    assert method in kinds
    request = getattr(management_pb, f"{method}Request")(**fields)
    found: str = ask(channel, MANAGEMENT + method, request, management_pb.ManagementResponse).msg
    return found


def test_ping(channel: grpc.Channel) -> None:
    health = ask(channel, INFERENCE + "Ping", inference_pb.Empty(), inference_pb.TorchServeHealthResponse).health
    assert json.loads(health) == {"status": "Healthy"}


def test_predictions(torchserve: RunningServer, channel: grpc.Channel) -> None:
    assert predict(channel, "affine", data=b"[1, 2, 3]") == affine(torchserve, [ROW])[0]
    assert predict(channel, "affine", x=np.array(ROW, np.float32).tobytes()) == affine(torchserve, [ROW])[0]
    assert next(iter(predict(channel, "colour", data=files("blue")[0]))) == "blue"


def test_a_stream_of_one_answer(torchserve: RunningServer, channel: grpc.Channel) -> None:
    request = inference_pb.PredictionsRequest(model_name="affine", input={"data": b"[1, 2, 3]"})
    found = ask(channel, INFERENCE + "StreamPredictions", request, inference_pb.PredictionResponse, stream=True)
    assert [json.loads(each.prediction) for each in found] == [affine(torchserve, [ROW])[0]]


@pytest.mark.parametrize(
    ("model", "data", "code", "text"),
    [
        ("nope", b"[]", grpc.StatusCode.NOT_FOUND, "Model not found: nope"),
        ("affine", b"[1]", grpc.StatusCode.INVALID_ARGUMENT, "the model takes 3"),
    ],
)
def test_errors(channel: grpc.Channel, model: str, data: bytes, code: grpc.StatusCode, text: str) -> None:
    with pytest.raises(grpc.RpcError) as found:
        predict(channel, model, data=data)
    assert found.value.code() is code
    assert text in str(found.value.details())


def test_management(channel: grpc.Channel, managed: grpc.Channel) -> None:
    registered = managing(managed, "RegisterModel", url="net:1", initial_workers=1, synchronous=True)
    assert registered == 'Model "net" Version: 1 registered with 1 initial workers'
    assert [*predict(channel, "net", data=b"[1, 2, 3]")] == ["y", "z"]
    scaled = managing(managed, "ScaleWorker", model_name="net", min_worker=2, synchronous=True)
    assert scaled == "Workers scaled to 2 for model: net"
    assert len(json.loads(managing(managed, "DescribeModel", model_name="net"))[0]["workers"]) == 2
    assert "net" in {each["modelName"] for each in json.loads(managing(managed, "ListModels", limit=100))["models"]}
    chosen = managing(managed, "SetDefault", model_name="net", model_version="1")
    assert chosen == 'Default version successfully updated for model "net" to "1"'
    assert managing(managed, "UnregisterModel", model_name="net") == 'Model "net" unregistered'
    with pytest.raises(grpc.RpcError) as found:
        managing(managed, "DescribeModel", model_name="net")
    assert found.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_port_of_inference_does_not_manage(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as found:
        managing(channel, "ListModels")
    assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED
