"""Bodies that are recognized by one like them: they must mean what the parser alone says that they mean."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArgument
from ingot.server.http import codec, plans
from ingot.tensors import DType


def decoded(body: bytes) -> Any:
    """Return what a body means: its tensor's type, shape and bytes, or the error's text."""
    try:
        request, layout = codec.decode_request("m", "", body, None)
    except InvalidArgument as error:
        return str(error)
    tensors = {name: (array.dtype, array.shape, array.tobytes()) for name, array in request.inputs.items()}
    template = request.template
    return tensors, request.id, template.outputs, dict(template.parameters), layout


def forget() -> None:
    plans._raws.clear()
    plans._texts.clear()


def check_alike(first: bytes, *then: bytes) -> None:
    """Check that bodies mean after the first what they mean alone."""
    for body in then:
        forget()
        alone = decoded(body)
        forget()
        decoded(first)
        assert decoded(body) == alone


def body(data: Any, datatype: str = "FP32", shape: tuple[int, ...] = (1, 3), **more: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}], **more}).encode()


VALUES = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.just([1]), st.just({})
)
PLAIN = {dtype: 1.5 if dtype in ("FP16", "FP32", "FP64") else 1 for dtype in (item.value for item in DType)}


@given(datatype=st.sampled_from([*PLAIN]), data=st.lists(VALUES, min_size=2, max_size=4), nested=st.booleans())
def test_any_values_mean_the_same_after_a_body_of_their_form(datatype: str, data: list[Any], nested: bool) -> None:
    plain = [PLAIN[datatype]] * 3
    check_alike(body([plain] if nested else plain, datatype), body([data] if nested else data, datatype))


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_any_bytes_in_the_place_of_values_mean_the_same(before: bytes, after: bytes) -> None:
    plain = body([1.5, 2, 3])
    head, tail = plain.split(b"1.5, 2, 3")
    check_alike(plain, head + before + b"1.5, 2, 3" + after + tail, head + before + tail)


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
def test_only_the_values_themselves_are_read_anew(first: bytes) -> None:
    """The same bytes may stand in a name, or be said twice."""
    others = [
        first.replace(old, new) for old in (b"7", b"8") for new in (b"9", b"true", b"1, 2", b"]", b"9.5", b"-0.0")
    ]
    check_alike(first, first, *others)


def test_values_of_known_requests_arrive() -> None:
    forget()
    for data in ([1.5, 2, 3], [4, 5, 6e-3], [-1, 0.1, 1e30]):
        request, _ = codec.decode_request("m", "2", body(data), None)
        assert request.inputs["x"].tolist() == [np.array(data, np.float32).tolist()]
        assert (request.template.model, request.template.version) == ("m", "2")
    assert len(plans._texts) == 1
    again, _ = codec.decode_request("other", "", body([1, 2, 3]), None)
    assert again.template.model == "other"


def test_ids_and_long_lists_are_not_remembered() -> None:
    forget()
    for number in range(5):
        codec.decode_request("m", "", body([1, 2, 3], id=str(number)), None)
    codec.decode_request("m", "", body([0] * 20_000, shape=(1, 20_000)), None)
    assert not plans._texts
