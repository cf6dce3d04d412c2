"""Requests decoded by a remembered plan must mean the same as parsed from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArgument
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.requests import InferRequest
from ingot.server.grpc import protobuf_memo
from ingot.server.http.json_memo import Decoder
from ingot.tensors import DType

Decode = Callable[[bytes], tuple[InferRequest, Any]]


def text_decoder() -> Decode:
    """Return the decoder of one server's JSON bodies."""
    decoder = Decoder()
    return lambda body: decoder.decode("m", "", body, None)


def raw_decoder(header_length: int) -> Decode:
    """Return the decoder of one server's raw bodies after a JSON header of ``size`` bytes."""
    decoder = Decoder()
    return lambda body: decoder.decode("m", "", body, header_length)


def message_decoder() -> Decode:
    """Return the decoder of one server's messages."""
    codec = protobuf_memo.Codec(lambda name, version: None)

    def decode(data: bytes) -> tuple[InferRequest, Any]:
        found = codec.decode(data)
        return found() if callable(found) else found

    return decode


def meaning(decode: Decode, body: bytes) -> Any:
    """Return a body's meaning: its tensors' types, shapes and bytes and all else, or the error's text."""
    try:
        request, layout = decode(body)
    except InvalidArgument as error:
        return str(error)
    tensors = {
        name: (array.dtype, array.shape, array.tolist() if array.dtype == object else array.tobytes())
        for name, array in request.inputs.items()
    }
    template = request.template
    named = (template.model, template.version, template.outputs, dict(template.parameters))
    return tensors, request.id, named, layout


def check_alike(decoder: Callable[[], Decode], first: bytes, *then: bytes) -> None:
    """Check that bodies mean the same to a decoder that has seen the first as to a new one."""
    knowing = decoder()
    for _ in range(3):
        meaning(knowing, first)
    for body in (first, *then):
        assert meaning(knowing, body) == meaning(decoder(), body)


def body(data: Any, datatype: str = "FP32", shape: tuple[int, ...] = (1, 3), **more: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}], **more}).encode()


VALUES = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.just([1]), st.just({})
)
PLAIN = {dtype: 1.5 if dtype in ("FP16", "FP32", "FP64") else 1 for dtype in (item.value for item in DType)}


@pytest.mark.matrix
@given(datatype=st.sampled_from([*PLAIN]), data=st.lists(VALUES, min_size=2, max_size=4), nested=st.booleans())
def test_any_values_mean_the_same_after_a_body_of_their_form(datatype: str, data: list[Any], nested: bool) -> None:
    plain = [PLAIN[datatype]] * 3
    check_alike(text_decoder, body([plain] if nested else plain, datatype), body([data] if nested else data, datatype))


@pytest.mark.matrix
@given(st.binary(max_size=12), st.binary(max_size=12))
def test_any_bytes_in_the_place_of_values_mean_the_same(before: bytes, after: bytes) -> None:
    plain = body([1.5, 2, 3])
    head, tail = plain.split(b"1.5, 2, 3")
    check_alike(text_decoder, plain, head + before + b"1.5, 2, 3" + after + tail, head + before + tail)


@pytest.mark.parametrize(
    "first",
    [
        b'{"inputs": [{"name": "\\"data\\": [7]", "datatype": "FP32", "shape": [1], "data": [8]}]}',
        b'{"inputs": [{"data": [1], "name": "x", "datatype": "FP32", "shape": [1], "data": [7]}]}',
        b'{"inputs": [], "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}]}',
        b'{"id": "\\"data\\":[7]", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}]}',
        b'{"parameters": {"data": [7]}, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}]}',
        b'{"inputs": [{"name": "x", "parameters": {"data": [7]}, "datatype": "FP32", "shape": [1], "data": [7]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [[7], [8]]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "data": [7], "shape": [1]}]}',
        b'{"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [7]}], "outputs": [{"name": "y"}]}',
    ],
)
def test_only_the_values_are_parsed_again(first: bytes) -> None:
    """The same bytes may stand in a name, or be said twice."""
    values = (b"9", b"true", b"1, 2", b"]", b"9.5", b"-0.0")
    check_alike(text_decoder, first, *(first.replace(old, new) for old in (b"7", b"8") for new in values))


@pytest.mark.parametrize("depth", [500, 950, 1000, 1010, 1023])
def test_deep_json_means_the_same_each_time(depth: int) -> None:
    check_alike(text_decoder, body([1, 2, 3])[:-1] + b', "extra": ' + b"[" * depth + b"]" * depth + b"}")


def test_a_body_that_needs_much_more_memory_than_its_bytes_is_not_remembered() -> None:
    many = {f"p{number}": number for number in range(65)}
    some: list[dict[str, Any]] = [{"trace": [[]] * 100}, {"trace": {"a": 1}}, {**many}]
    for parameters in some:
        decoder = Decoder()
        found = [decoder.decode("m", "", body([1, 2, 3], parameters=parameters), None) for _ in range(4)]
        assert len({id(request.template) for request, _ in found}) == 4
    messages = message_decoder()
    asked = message(("x", 3), request_id="", model="m", **many)
    assert messages(asked)[0].template is not messages(asked)[0].template


def test_values_of_known_requests_arrive() -> None:
    decoder = Decoder()
    templates = []
    for data in ([1.5, 2, 3], [4, 5, 6e-3], [-1, 0.1, 1e30], [7, 8, 9]):
        request, _ = decoder.decode("m", "2", body(data), None)
        assert request.inputs["x"].tolist() == [np.array(data, np.float32).tolist()]
        templates.append(request.template)
    assert templates[1] is templates[2] is templates[3]
    again, _ = decoder.decode("other", "", body([1, 2, 3]), None)
    assert (again.template.model, templates[3].model, templates[3].version) == ("other", "m", "2")


TEXT = b'"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}]'
RAW = b'"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]'


def headed_decoder() -> Decode:
    """Return the decoder of one server's bodies of four raw bytes after JSON."""
    decoder = Decoder()
    return lambda body: decoder.decode("m", "", body, len(body) - 4)


@pytest.mark.matrix
@pytest.mark.parametrize(("decoder", "rest", "raw"), [(text_decoder, TEXT, b""), (headed_decoder, RAW, b"abcd")])
@given(
    first=st.sampled_from(["", "a", "request-7"]),
    then=st.one_of(st.text(max_size=4), st.sampled_from(['","id":"c', '"', "\\", "\ud800", "\x00", 7, None, [1]])),
    place=st.sampled_from(["before", "behind", "twice"]),
    compact=st.booleans(),
    escaped=st.booleans(),
)
def test_requests_with_any_id_mean_the_same(
    decoder: Callable[[], Decode],
    rest: bytes,
    raw: bytes,
    first: str,
    then: Any,
    place: str,
    compact: bool,
    escaped: bool,
) -> None:
    """Wherever it stands, however it is written, and after requests with another one or none."""
    comma, colon = (",", ":") if compact else (", ", ": ")

    def put(identifier: Any) -> bytes:
        value = json.dumps(identifier, ensure_ascii=escaped)
        member = f'"id"{colon}{value}'.encode(errors="surrogatepass")
        members = {"before": (member, rest), "behind": (rest, member), "twice": (b'"id":"a"', rest, member)}
        return b"{" + comma.encode().join(members[place]) + b"}" + raw

    none = b"{" + rest + b"}" + raw
    no_object = b'{"id":"a",' + none
    for known in (put(first), none):
        check_alike(decoder, known, put(then), put("z"), none, no_object)


def test_requests_that_differ_in_their_id_are_known() -> None:
    for decode, rest, raw in ((text_decoder(), TEXT, b""), (headed_decoder(), RAW, b"abcd")):
        found = [decode(b'{"id":"%d",%b}%b' % (number, rest, raw))[0] for number in range(4)]
        assert [request.id for request in found] == ["0", "1", "2", "3"]
        assert found[1].template is found[2].template is found[3].template


@pytest.mark.matrix
def test_requests_that_never_come_again_drive_out_none_that_do() -> None:
    decoder = Decoder()

    def template(**more: Any) -> Any:
        return decoder.decode("m", "", body([1, 2, 3], **more), None)[0].template

    known = [template() for _ in range(3)][-1]
    for number in range(2000):
        template(id=str(number))  # after the inputs, where it is not searched for
        template(parameters={"trace": number})
    assert template() is known


@pytest.mark.matrix
@given(st.binary(max_size=8), st.integers(-8, 8))
def test_raw_data_of_another_length_means_the_same(more: bytes, less: int) -> None:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    header = json.dumps({"inputs": [item]}).encode()
    plain = header + bytes(range(8))
    check_alike(lambda: raw_decoder(len(header)), plain, plain + more, plain[:less], header + more)


def test_a_header_that_is_longer_than_the_body_is_refused_though_it_is_known() -> None:
    decode = raw_decoder(999)
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="999"):
            decode(b'{"inputs":[]}')


def message(*tensors: tuple[str, int], request_id: str = "", model: str = "m", **parameters: int) -> bytes:
    asked = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, value in parameters.items():
        asked.parameters[name].int64_param = value
    for name, size in tensors:
        asked.inputs.add(name=name, datatype="FP32", shape=[1, size])
        asked.raw_input_contents.append(np.arange(size, dtype=np.float32).tobytes())
    return asked.SerializeToString()


FIELDS = st.sampled_from(
    [
        pb.ModelInferRequest(model_name="mmmmmm").SerializeToString(),
        pb.ModelInferRequest(model_version="222222").SerializeToString(),
        pb.ModelInferRequest(id="abcdef").SerializeToString(),
        pb.ModelInferRequest(raw_input_contents=[b"sixsix"]).SerializeToString(),
        pb.ModelInferRequest(
            outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="four")]
        ).SerializeToString(),
        b"",
        b"\xff\xff",
    ]
)


@pytest.mark.matrix
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), FIELDS, FIELDS, st.sampled_from(["", "a", "request-7"]))
def test_messages_mean_the_same_with_fields_before_and_behind(
    sizes: list[int], before: bytes, behind: bytes, request_id: str
) -> None:
    """Messages of several lengths that begin alike are known; fields may come in any order, and twice."""
    knowing = message_decoder()
    for size in (1, 2, 3, 4, 5, 6):
        for _ in range(3):
            meaning(knowing, message(("x", size)))
            meaning(knowing, message(("x", size), ("y", 2)))
    asked = message(*zip("xyz", sizes, strict=False), request_id=request_id)
    for body in (asked, before + asked, asked + behind, before + asked + behind, asked[: len(asked) // 2]):
        assert meaning(knowing, body) == meaning(message_decoder(), body)
