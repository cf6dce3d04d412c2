from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArchive
from ingot.model_store import Golden
from ingot.model_store.format.goldens import decode, encode
from ingot.tensors import Array, DType


def sample(dtype: DType) -> Array:
    if dtype is DType.BYTES:
        return np.array([[b"", b"a\x00b"], ["\u00e9".encode(), b"x" * 300]], dtype=object)
    return np.arange(4).reshape(2, 2).astype(dtype.numpy)


def test_every_datatype_round_trips() -> None:
    every = {f"of/{dtype.value}": sample(dtype) for dtype in DType}  # a name may contain a slash
    cases = [Golden(every, {"y": np.array(3.0)}), Golden({"x": np.empty((0, 3), np.float32)}, every)]
    for wanted, found in zip(cases, decode(encode(cases)), strict=True):
        for left, right in ((wanted.inputs, found.inputs), (wanted.outputs, found.outputs)):
            assert left.keys() == right.keys()
            for name in left:
                assert left[name].dtype == right[name].dtype
                assert left[name].shape == right[name].shape
                assert left[name].tolist() == right[name].tolist()


def test_cases_keep_their_order() -> None:
    cases = [Golden({"x": np.array([index])}, {}) for index in range(12)]
    assert [int(case.inputs["x"][0]) for case in decode(encode(cases))] == list(range(12))


def test_other_programs_can_read_the_file() -> None:
    """The form is safetensors: header length, a header padded to 8 bytes, offsets that leave no gap."""
    raw = encode([Golden({"x": np.array([1, 2], np.int16)}, {"words": np.array([b"ab"], dtype=object)})])
    (length,) = struct.unpack_from("<Q", raw)
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header["0/in/x"] == {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}
    assert header["0/out/words"] == {"dtype": "U8", "shape": [6], "data_offsets": [4, 10]}
    assert header["__metadata__"] == {"0/out/words": "[1]"}
    assert raw[8 + length :] == b"\x01\x00\x02\x00" + b"\x02\x00\x00\x00ab"


def file(header: object, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(**changed: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 60) + b"{}",
        file([]),
        file(3),
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 300_000) + b"[" * 300_000,
        file({"0/in/x": entry()}, b"123"),
        file({"0/in/x": entry(data_offsets=[4, 0])}, b"1234"),
        file({"0/in/x": entry(data_offsets=[0])}, b"1234"),
        file({"0/in/x": entry(data_offsets="04")}, b"1234"),
        file({"0/in/x": entry(dtype="F8")}, b"1234"),
        file({"0/in/x": entry(dtype=[])}, b"1234"),
        file({"0/in/x": entry(shape=[-1])}, b"1234"),
        file({"0/in/x": entry(shape=[1.0])}, b"1234"),
        file({"0/in/x": entry(shape="1")}, b"1234"),
        file({"0/in/x": entry(shape=[0, 10**30], data_offsets=[0, 0])}),
        file({"0/in/x": entry(shape=[0, 1 << 39, 1 << 39], data_offsets=[0, 0])}),
        file({"0/in/x": "text"}),
        file({"0/in": entry()}, b"1234"),
        file({"0/beside/x": entry()}, b"1234"),
        file({"first/in/x": entry()}, b"1234"),
        file({"__metadata__": None, "0/in/x": entry()}, b"1234"),
        file({"__metadata__": {"0/in/x": "["}, "0/in/x": entry()}, b"1234"),
        file({"__metadata__": {"0/in/x": "[1000000]"}, "0/in/x": entry(dtype="U8")}, b"1234"),
    ],
)
def test_a_malformed_file_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArchive, match="goldens"):
        decode(raw)


GOOD = encode([Golden({"x": np.ones((2, 3), np.float32)}, {"y": np.array([b"ab", b""], dtype=object)})])


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_never_crashes_the_reader(position: int, byte: int) -> None:
    try:
        decode(GOOD[:position] + bytes([byte]) + GOOD[position + 1 :])
    except InvalidArchive:
        return


@given(st.integers(0, len(GOOD) - 1))
def test_a_cut_file_is_refused(length: int) -> None:
    with pytest.raises(InvalidArchive):
        decode(GOOD[:length])
