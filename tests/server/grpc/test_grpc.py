from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ingot import RunningServer
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.requests import MAX_PARAMETERS
from ingot.server.plane.operations import METHODS
from ingot.tensors import DType, arrays
from tests.server.samples import sample
from tests.support import matrix

TYPED = [dtype for dtype in DType if dtype not in (DType.FP16, DType.BF16)]


@pytest.fixture(scope="module", params=matrix("server", "grpcio_server"))
def channel(request: pytest.FixtureRequest) -> Iterator[grpc.Channel]:
    """A channel to each of the two servers, which share one contract."""
    server: RunningServer = request.getfixturevalue(request.param)
    with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as opened:
        yield opened


def call(channel: grpc.Channel, method: str, request: Any, answer: Any) -> Any:
    stub = channel.unary_unary(
        f"/{proto_codec.SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return stub(request, timeout=30)


def infer(channel: grpc.Channel, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer: pb.ModelInferResponse = call(channel, "ModelInfer", request, pb.ModelInferResponse)
    return answer


def affine(*values: float, **changes: Any) -> pb.ModelInferRequest:
    fields: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 3], **changes}
    request = pb.ModelInferRequest(model_name="affine", id="mine")
    request.inputs.add(**fields).contents.fp32_contents.extend(values or (1, 2, 3))
    return request


def refused(channel: grpc.Channel, request: pb.ModelInferRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        infer(channel, request)
    # After any error, the next client is answered.
    assert np.frombuffer(infer(channel, affine()).raw_output_contents[0], np.float32).tolist() == [3, 5, 7]
    return caught.value


@pytest.mark.matrix
def test_an_unknown_model_is_named_before_a_tensor_that_cannot_be_read(channel: grpc.Channel) -> None:
    for name, version in (("nope", ""), ("affine", "99")):
        request = affine(datatype="FP33")
        request.model_name, request.model_version = name, version
        assert refused(channel, request).code() is grpc.StatusCode.NOT_FOUND
    assert refused(channel, affine(datatype="FP33")).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_and_metadata(channel: grpc.Channel) -> None:
    assert call(channel, "ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse).live
    assert call(channel, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready
    assert call(channel, "ModelReady", pb.ModelReadyRequest(name="affine"), pb.ModelReadyResponse).ready
    assert not call(channel, "ModelReady", pb.ModelReadyRequest(name="unknown"), pb.ModelReadyResponse).ready
    assert call(channel, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse).name == "ingot"
    metadata = call(channel, "ModelMetadata", pb.ModelMetadataRequest(name="affine"), pb.ModelMetadataResponse)
    assert [(item.name, item.datatype, list(item.shape)) for item in metadata.outputs] == [
        ("y", "FP32", [-1, 3]),
        ("z", "FP32", [-1, 3]),
    ]


def test_the_standard_health_service(channel: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", proto_codec.SERVICE):
        status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
        assert status == health_pb2.HealthCheckResponse.SERVING


def test_the_health_service_reports_at_once_and_keeps_watching(channel: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for service, status in [("", "SERVING"), ("nobody's", "SERVICE_UNKNOWN")]:
        watching = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert next(watching).status == health_pb2.HealthCheckResponse.ServingStatus.Value(status)
        assert watching.is_active()
        watching.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody's"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services_and_their_messages(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) >= {proto_codec.SERVICE, "grpc.health.v1.Health"}
    file = database.FindFileContainingSymbol(proto_codec.SERVICE)
    assert "ModelInferRequest" in [message.name for message in file.message_type]
    assert database.FindFileContainingSymbol("grpc.health.v1.Health").package == "grpc.health.v1"


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_every_datatype_raw(channel: grpc.Channel, dtype: DType) -> None:
    request = pb.ModelInferRequest(model_name=f"identity-{dtype.value.lower()}")
    request.inputs.add(name="x", datatype=dtype.value, shape=[3, 2])
    request.raw_input_contents.append(arrays.to_bytes(sample(dtype)))
    answer = infer(channel, request)
    assert answer.outputs[0].datatype == dtype.value
    assert list(answer.raw_output_contents) == list(request.raw_input_contents)


@pytest.mark.one_case
@pytest.mark.parametrize("rows", [3, 20_000])
@pytest.mark.parametrize("dtype", TYPED, ids=lambda dtype: dtype.value)
def test_every_datatype_typed_is_answered_raw_or_as_asked(channel: grpc.Channel, dtype: DType, rows: int) -> None:
    array = np.resize(sample(dtype), (rows, 2))
    request = pb.ModelInferRequest(model_name=f"identity-{dtype.value.lower()}")
    tensor = request.inputs.add(name="x", datatype=dtype.value, shape=[rows, 2])
    field = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"}.get(
        dtype.value, ("u" if dtype.value.startswith("U") else "") + f"int{'64' if '64' in dtype.value else ''}_contents"
    )
    getattr(tensor.contents, field).extend(array.reshape(-1).tolist())
    answer = infer(channel, request)
    assert [*answer.raw_output_contents] == [arrays.to_bytes(array)]
    assert not answer.outputs[0].HasField("contents")
    request.parameters["binary_data_output"].bool_param = False
    answer = infer(channel, request)
    assert not answer.raw_output_contents
    assert list(getattr(answer.outputs[0].contents, field)) == array.reshape(-1).tolist()


def test_outputs_are_selected_and_the_id_is_returned(channel: grpc.Channel) -> None:
    request = affine()
    request.outputs.add(name="z")
    answer = infer(channel, request)
    assert (answer.id, answer.model_name, answer.model_version) == ("mine", "affine", "1")
    assert [output.name for output in answer.outputs] == ["z"]


BAD: list[tuple[str, pb.ModelInferRequest, str]] = [
    ("missing input", pb.ModelInferRequest(model_name="affine"), "'x' is missing"),
    ("unknown input", affine(name="w"), "unknown input 'w'"),
    ("wrong datatype", affine(datatype="FP64"), "fp64_contents"),
    ("unknown datatype", affine(datatype="FLOAT"), "'FLOAT'"),
    ("wrong rank", affine(shape=[3]), "1 dimensions"),
    ("wrong fixed dimension", affine(1, 2, 3, 4, shape=[1, 4]), "dimension 1"),
    ("too few values", affine(1, 2), "2 values"),
    ("negative shape", affine(shape=[-1, 3]), "-1"),
    ("huge shape", affine(shape=[2**62, 3]), "not a size"),
    ("FP16 typed", affine(datatype="FP16"), "send it raw"),
]


@pytest.mark.parametrize(("request_", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_requests(channel: grpc.Channel, request_: pb.ModelInferRequest, says: str) -> None:
    error = refused(channel, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in str(error.details())


def test_duplicate_inputs(channel: grpc.Channel) -> None:
    twice = affine()
    twice.inputs.append(twice.inputs[0])
    assert "twice" in str(refused(channel, twice).details())


def test_raw_contents_that_do_not_match(channel: grpc.Channel) -> None:
    mixed = affine()
    mixed.raw_input_contents.append(bytes(12))
    assert "contents field must not be specified when using raw_input_contents for 'x' for model 'affine'" in str(
        refused(channel, mixed).details()
    )
    short = pb.ModelInferRequest(model_name="affine")
    short.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    short.raw_input_contents.append(bytes(11))
    assert "11 bytes" in str(refused(channel, short).details())
    short.raw_input_contents.append(bytes(12))
    assert "2 raw_input_contents" in str(refused(channel, short).details())


def test_a_number_outside_its_datatype(channel: grpc.Channel) -> None:
    request = pb.ModelInferRequest(model_name="identity-int8")
    request.inputs.add(name="x", datatype="INT8", shape=[1, 2]).contents.int_contents.extend([1, 128])
    assert "out of its range" in str(refused(channel, request).details())


def test_statuses(channel: grpc.Channel) -> None:
    assert refused(channel, pb.ModelInferRequest(model_name="nope")).code() is grpc.StatusCode.NOT_FOUND
    shared = affine()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    shared.inputs[0].parameters["shared_memory_byte_size"].int64_param = 12
    assert refused(channel, shared).code() is grpc.StatusCode.UNIMPLEMENTED
    outside = pb.ModelInferRequest(model_name="embedding")
    outside.inputs.add(name="ids", datatype="INT64", shape=[1, 1]).contents.int64_contents.append(10)
    assert refused(channel, outside).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_over_the_limit(channel: grpc.Channel) -> None:
    request = pb.ModelInferRequest(model_name="affine", raw_input_contents=[bytes(5 << 20)])
    assert refused(channel, request).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("encoding", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_messages_other_than_inference_are_small(channel: grpc.Channel, encoding: grpc.Compression) -> None:
    """They are converted in the event loop, where a large one would delay all other requests."""
    unknown = b"\xf2\x7f\x80\x80\x40" + bytes(1 << 20)  # a field that no message has
    for name, operation in METHODS.items():
        if operation.handler is not None:
            stub: Any = channel.unary_unary(
                f"/{proto_codec.SERVICE}/{name}", request_serializer=None, response_deserializer=None
            )
            with pytest.raises(grpc.RpcError) as caught:
                stub(unknown, timeout=30, compression=encoding)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, name
            assert "over the limit of 1 MiB, which --max-body-mb raises for inference" in str(caught.value.details())
    assert infer(channel, affine()).outputs


def test_messages_of_other_services_are_small(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel:
        request = health_pb2.HealthCheckRequest(service="x" * (1 << 20))
        health: Any = health_pb2_grpc.HealthStub(channel)
        asks: tuple[Callable[[], Any], ...] = (lambda: health.Check(request), lambda: next(health.Watch(request)))
        for ask in asks:
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_too_many_parameters_are_refused_before_they_are_read(channel: grpc.Channel) -> None:
    of_request, of_tensors = affine(), affine()
    for index in range(MAX_PARAMETERS + 1):
        of_request.parameters[f"p{index}"].bool_param = True
    output = of_tensors.outputs.add(name="y")
    for index in range(MAX_PARAMETERS // 2 + 1):
        of_tensors.inputs[0].parameters[f"p{index}"].bool_param = True
        output.parameters[f"p{index}"].bool_param = True
    for request in (of_request, of_tensors):
        error = refused(channel, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"at most {MAX_PARAMETERS} are accepted" in str(error.details())
    settings = pb.LogSettingsRequest()
    for index in range(MAX_PARAMETERS + 1):
        settings.settings[f"p{index}"].bool_param = True
    with pytest.raises(grpc.RpcError, match=f"at most {MAX_PARAMETERS} are accepted"):
        call(channel, "LogSettings", settings, pb.LogSettingsResponse)


def test_a_message_that_is_not_protobuf(channel: grpc.Channel) -> None:
    stub: Any = channel.unary_unary(
        f"/{proto_codec.SERVICE}/ModelInfer", request_serializer=None, response_deserializer=None
    )
    with pytest.raises(grpc.RpcError) as caught:
        stub(b"\xff\xff\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "protobuf" in str(caught.value.details())
    assert infer(channel, affine()).outputs


def test_a_stream_is_answered_in_order_and_its_errors_are_in_band(channel: grpc.Channel) -> None:
    stub: Any = channel.stream_stream(
        f"/{proto_codec.SERVICE}/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    requests = [affine(index, 0, 0) for index in range(200)]
    for index, request in enumerate(requests):
        request.id = str(index)
    requests[7].model_name = "nope"
    answers = list(stub(iter(requests), timeout=30))
    assert [answer.infer_response.id for answer in answers] == [str(index) for index in range(200)]
    assert "nope" in answers[7].error_message
    right = (answer.infer_response.raw_output_contents[0] for answer in answers if answer is not answers[7])
    found = [np.frombuffer(raw, np.float32)[0] for raw in right]
    assert found == [2 * index + 1 for index in range(200) if index != 7]


def test_messages_of_several_mib_both_ways(channel: grpc.Channel) -> None:
    request = pb.ModelInferRequest(model_name="identity-bytes")
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
    request.raw_input_contents.append(2 * ((1 << 20).to_bytes(4, "little") + b"0123456789abcdef" * (1 << 16)))
    calls = [
        channel.unary_unary(
            f"/{proto_codec.SERVICE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        ).future(request, timeout=60)
        for _ in range(8)
    ]
    assert all(call.result().raw_output_contents[0] == request.raw_input_contents[0] for call in calls)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(channel: grpc.Channel, compression: grpc.Compression) -> None:
    stub: Any = channel.unary_unary(
        f"/{proto_codec.SERVICE}/ModelInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelInferResponse.FromString,
    )
    request = pb.ModelInferRequest(model_name="identity-bytes")
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
    request.raw_input_contents.append(2 * ((100_000).to_bytes(4, "little") + b"x" * 100_000))
    answer = stub(request, timeout=30, compression=compression)
    assert answer.raw_output_contents[0] == request.raw_input_contents[0]
    request.raw_input_contents[0] = b"x" * (5 << 20)
    with pytest.raises(grpc.RpcError) as caught:
        stub(request, timeout=30, compression=compression)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_unknown_method(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "ModelTrain", pb.ServerLiveRequest(), pb.ServerLiveResponse)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
