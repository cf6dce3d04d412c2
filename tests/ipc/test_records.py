from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import CLASSES, Code, DeadlineExceeded
from ingot.ipc import records
from ingot.ipc.records import HEADER, Splitter, TensorLayout
from ingot.tensors import Array, DType
from tests.server.samples import sample


@given(st.lists(st.tuples(st.integers(0, 15), st.binary(max_size=40)), max_size=20), st.data())
def test_records_round_trip_wherever_the_stream_is_cut(sent: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(HEADER.pack(len(body), kind) + body for kind, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter = Splitter(1 << 20)
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += [(kind, bytes(body)) for kind, body in splitter.feed(stream[start:end])]
    assert got == sent


ARRAYS: dict[str, Array] = {dtype.value: sample(dtype) for dtype in DType}
ARRAYS["nothing"] = np.empty((2, 0, 3), np.float32)
ARRAYS["scalar"] = np.array(7, np.int16)
ARRAYS["columns"] = np.arange(12, dtype=np.float64).reshape(3, 4).T


def test_tensors_of_all_kinds_survive_the_stream() -> None:
    layout = TensorLayout.loads(TensorLayout.of_arrays(ARRAYS).dumps())
    got = layout.read(memoryview(b"".join(layout.dump(ARRAYS))))
    assert list(got) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype
    assert layout.size == -1


def test_tensors_of_fixed_size_survive_a_block() -> None:
    plain = {name: array for name, array in ARRAYS.items() if array.dtype != object}
    layout = TensorLayout.of_arrays(plain)
    block = np.zeros(layout.size + 100, np.uint8)
    layout.write(plain, block)
    got = layout.map(block)
    for name, array in plain.items():
        np.testing.assert_array_equal(got[name], array)
        assert np.shares_memory(got[name], block) or not array.size


@pytest.mark.parametrize("code", Code)
def test_errors_keep_their_code_and_text(code: Code) -> None:
    error = records.load_error(memoryview(records.dump_error(CLASSES[code]("it's 5 \u00b5s late"))))
    assert type(error) is CLASSES[code]
    assert error.code is code
    assert str(error) == "it's 5 \u00b5s late"


def test_a_class_stands_for_its_code() -> None:
    assert {kind.code for kind in CLASSES.values()} == set(Code)
    assert CLASSES[Code.DEADLINE_EXCEEDED] is DeadlineExceeded
