from __future__ import annotations

import math
import os
import struct
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArgument, NotFound
from ingot.tensors import Array, DType
from ingot.tensors.arrays import check_shape, departure, from_bytes, load_npz, to_bytes, worst_error

FIXED = [dtype for dtype in DType if dtype is not DType.BYTES]
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Array:
    """Any array of any datatype: the elements are any bits that the type has, NaNs of all kinds included."""
    dtype, shape = draw(st.sampled_from(list(DType))), draw(SHAPES)
    count = math.prod(shape)
    if dtype is DType.BYTES:
        items = np.empty(count, dtype=object)
        items[:] = draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count))
        return items.reshape(shape)
    size = count * dtype.numpy.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is DType.BOOL:
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype.numpy).reshape(shape)


def same(left: Array, right: Array) -> bool:
    """Equal bit by bit, so that a NaN equals itself and 0.0 does not equal -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.tolist() == right.tolist() if left.dtype == object else left.tobytes() == right.tobytes()


@pytest.mark.matrix
@given(tensors())
def test_every_array_survives_the_wire(array: Array) -> None:
    assert same(from_bytes("x", DType.of(array), array.shape, to_bytes(array)), array)


@pytest.mark.matrix
@given(tensors(), st.data())
def test_data_that_is_cut_is_refused(array: Array, data: st.DataObject) -> None:
    raw = to_bytes(array)
    if raw:
        cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
        with pytest.raises(InvalidArgument, match="tensor 'x'"):
            from_bytes("x", DType.of(array), array.shape, cut)


@pytest.mark.matrix
@given(tensors(), st.binary(min_size=1, max_size=9))
def test_trailing_data_is_refused(array: Array, more: bytes) -> None:
    with pytest.raises(InvalidArgument, match="tensor 'x'"):
        from_bytes("x", DType.of(array), array.shape, to_bytes(array) + more)


@pytest.mark.matrix
@given(st.sampled_from(list(DType)), st.lists(st.integers(0, 1 << 39), max_size=32), st.binary(max_size=64))
def test_arbitrary_claims_are_answered_by_an_array_or_a_client_error(
    dtype: DType, shape: list[int], raw: bytes
) -> None:
    try:
        array = from_bytes("x", dtype, check_shape("x", shape), raw)
    except InvalidArgument:
        return
    assert array.shape == tuple(shape)


@pytest.mark.parametrize("dtype", FIXED)
def test_the_raw_form_is_little_endian_and_row_major(dtype: DType) -> None:
    ones = np.array([[0, 1], [1, 0]]).astype(dtype.numpy)
    width = dtype.numpy.itemsize
    raw = to_bytes(ones.T[::-1])  # neither contiguous nor in order
    assert raw == np.ascontiguousarray(ones.T[::-1]).tobytes()
    if dtype.is_integer:
        big = ones.astype(dtype.numpy.newbyteorder(">"))
        assert to_bytes(big) == b"".join(int(value).to_bytes(width, "little") for value in (0, 1, 1, 0))


def test_elements_of_bytes_carry_their_length() -> None:
    raw = b"\x02\x00\x00\x00ab" + b"\x00\x00\x00\x00" + b"\x02\x00\x00\x00\xc3\xa9"
    assert to_bytes(np.array([b"ab", b"", "\u00e9"], dtype=object)) == raw
    assert to_bytes(np.array(["ab", "", "\u00e9"])) == raw
    assert from_bytes("x", DType.BYTES, [3], raw).tolist() == [b"ab", b"", "\u00e9".encode()]


@pytest.mark.parametrize(
    ("shape", "raw", "message"),
    [
        ([1 << 30], b"\x00" * 8, "too few for 1073741824 BYTES elements"),
        ([2], b"\x05\x00\x00\x00hello", "ends before BYTES element 1 of 2"),
        ([1], b"\xff\xff\xff\xffhello", "element 0 of tensor 'x' runs past the end"),
        ([1], b"\x01\x00\x00\x00hello", "has 4 bytes after its 1 BYTES elements"),
        ([0], b"\x00", "has 1 bytes after its 0 BYTES elements"),
    ],
)
def test_lying_lengths_are_named(shape: list[int], raw: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_bytes("x", DType.BYTES, shape, raw)


def test_a_boolean_is_zero_or_one() -> None:
    with pytest.raises(InvalidArgument, match="BOOL but holds bytes other than 0 and 1"):
        from_bytes("x", DType.BOOL, [3], b"\x00\x01\x02")


def test_the_message_says_how_many_bytes_the_shape_needs() -> None:
    with pytest.raises(InvalidArgument, match=r"has 7 bytes of data, but FP32 \[1, 2\] takes 8"):
        from_bytes("x", DType.FP32, [1, 2], b"1234567")


@pytest.mark.parametrize(
    "shape", [None, 3, "33", {}, [1.0], ["1"], [True], [None], [-1], [1 << 40], [1] * 33, [0, 1 << 39, 1 << 39]]
)
def test_a_malformed_shape_is_refused(shape: object) -> None:
    with pytest.raises(InvalidArgument, match="tensor 'x'"):
        check_shape("x", shape)


def test_empty_dimensions_are_shapes() -> None:
    assert check_shape("x", []) == ()
    assert check_shape("x", [0, 3]) == (0, 3)


class TestDeparture:
    def test_it_is_a_share_of_the_largest_value(self) -> None:
        assert departure(np.array([100.0, 0.001]), np.array([100.0, 1.001])) == pytest.approx(0.01)

    def test_tiny_tensors_are_measured_against_a_floor(self) -> None:
        assert departure(np.array([1e-9]), np.array([3e-9])) == pytest.approx(2e-7)

    def test_equal_tensors_do_not_depart(self) -> None:
        array = np.array([np.nan, np.inf, -np.inf, 1.0])
        assert departure(array, array.copy()) == 0
        assert departure(np.empty((0, 3)), np.empty((0, 3))) == 0

    @pytest.mark.parametrize(
        ("expected", "actual"),
        [
            (np.zeros((2, 3)), np.zeros((3, 2))),
            (np.zeros(2), np.zeros(2, np.float32)),
            (np.array([np.nan, 1.0]), np.array([0.0, 1.0])),
            (np.array([0.0, 1.0]), np.array([np.nan, 1.0])),
            (np.array([1.0]), np.array([np.inf])),
            (np.array([np.inf]), np.array([-np.inf])),
            (np.array([1, 2]), np.array([1, 3])),
            (np.array([True]), np.array([False])),
            (np.array([b"a"], object), np.array([b"b"], object)),
        ],
    )
    def test_errors_beyond_rounding_are_infinite(self, expected: Array, actual: Array) -> None:
        assert departure(expected, actual) == math.inf

    def test_half_types_are_measured_in_full(self) -> None:
        expected = np.array([1.0, 2.0]).astype(DType.BF16.numpy)
        assert departure(expected, np.array([1.0, 2.25]).astype(DType.BF16.numpy)) == pytest.approx(0.125)
        largest = np.array([60000.0], np.float16)
        assert departure(largest, -largest) == pytest.approx(2)  # no overflow on the way

    def test_the_worst_output_is_named(self) -> None:
        expected = {"a": np.array([1.0]), "b": np.array([1.0])}
        assert worst_error(expected, {"a": np.array([1.1]), "b": np.array([1.5])}) == ("b", 0.5)


def npy(array: Array) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


NPY = npy(np.arange(3))


class TestNpz:
    def test_arrays_come_back_with_text_as_bytes(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.arange(3), words=np.array(["a", "\u00e9"]), raw=np.array([[b"q"]]))
        loaded = load_npz(tmp_path / "a.npz")
        assert loaded["x"].tolist() == [0, 1, 2]
        assert loaded["words"].tolist() == [b"a", "\u00e9".encode()]
        assert loaded["raw"].tolist() == [[b"q"]]
        assert DType.of(loaded["words"]) is DType.BYTES

    def test_a_missing_file_is_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"there is no file .*nope\.npz"):
            load_npz(tmp_path / "nope.npz")

    def test_one_array_without_a_name_gets_the_remedy(self, tmp_path: Path) -> None:
        np.save(tmp_path / "one.npy", np.arange(3))
        with pytest.raises(InvalidArgument, match=r"numpy\.savez"):
            load_npz(tmp_path / "one.npy")

    def test_python_objects_are_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))
        with pytest.raises(InvalidArgument, match=r"not an \.npz file of plain arrays"):
            load_npz(tmp_path / "a.npz")

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ((("x.npy", NPY), ("x.npy", NPY)), "it holds 'x' twice"),
            ((("x.npy", NPY), ("x", NPY)), "it holds 'x' twice"),
            ((("x.npy", NPY), ("notes.txt", b"of mine")), r"'notes\.txt' in it is not an \.npy"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_members_that_are_not_one_array_a_name(
        self, tmp_path: Path, members: tuple[tuple[str, bytes], ...], message: str
    ) -> None:
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
            for name, content in members:
                file.writestr(name, content)
        with pytest.raises(InvalidArgument, match=message):
            load_npz(tmp_path / "a.npz")

    def test_an_encrypted_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        np.savez(path, x=np.arange(3))
        raw = bytearray(path.read_bytes())
        for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            raw[raw.index(mark) + offset] |= 1  # the flag of encryption, in both headers
        path.write_bytes(raw)
        with pytest.raises(InvalidArgument, match="password"):
            load_npz(path)

    def test_a_pipe_is_refused_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.npz")
        with pytest.raises(InvalidArgument, match="it is not a regular file"):
            load_npz(tmp_path / "a.npz")

    @pytest.mark.parametrize("compressed", [False, True])
    def test_a_damaged_file_is_refused_wherever_it_is_damaged(self, tmp_path: Path, compressed: bool) -> None:
        path = tmp_path / "a.npz"
        (np.savez_compressed if compressed else np.savez)(path, x=np.arange(50.0))
        good = path.read_bytes()
        refused = 0
        for position in range(0, len(good), 7):
            path.write_bytes(good[:position] + bytes([good[position] ^ 0xFF]) + good[position + 1 :])
            try:
                load_npz(path)  # fields that the zip does not check, such as times, may change
            except InvalidArgument:
                refused += 1
        assert refused > len(good) / 7 / 2
        for length in range(0, len(good), 11):
            path.write_bytes(good[:length])
            with pytest.raises(InvalidArgument):
                load_npz(path)

    def test_a_file_that_claims_more_than_memory_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n"
        member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", member)
        with pytest.raises(InvalidArgument):
            load_npz(path)
