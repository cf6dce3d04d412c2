from __future__ import annotations

import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import CLASSES, Code, DeadlineExceeded
from ingot.runtime.engines.ipc import records
from ingot.runtime.engines.ipc.arena import Incoming, Outgoing, create
from ingot.runtime.engines.ipc.records import HEADER, Splitter, TensorLayout
from ingot.runtime.engines.isolation.link import Kind, Link
from ingot.tensors import Array, DType
from tests.server.samples import sample


@pytest.mark.matrix
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


def test_a_layout_survives_its_encoding() -> None:
    layout = TensorLayout.of_arrays(ARRAYS)
    assert TensorLayout.decode(layout.encode()) == layout


def test_tensors_of_all_kinds_survive_a_connection() -> None:
    arena = create(1 << 20)
    left, right = socket.socketpair()
    with left, right:
        arrived = Incoming(arena, list[int]().append)
        sender, receiver = Link(left, Outgoing(arena), arrived), Link(right, Outgoing(arena), arrived)
        os.close(arena)
        sent = {**ARRAYS, "large": np.arange(1 << 15, dtype=np.float64)}
        for _ in range(2):  # the layout is sent once
            sender.send_tensors(Kind.RUN, b"", sent)
            kind, body = receiver.receive()
            got = receiver.tensors(body)
            assert kind == Kind.RUN
            assert list(got) == list(sent)
            for name, array in sent.items():
                np.testing.assert_array_equal(got[name], array)
                assert got[name].dtype == array.dtype


@pytest.mark.parametrize("code", Code)
def test_errors_keep_their_code_and_text(code: Code) -> None:
    error = records.decode_error(memoryview(records.encode_error(CLASSES[code]("it's 5 \u00b5s late"))))
    assert type(error) is CLASSES[code]
    assert error.code is code
    assert str(error) == "it's 5 \u00b5s late"


def test_a_class_stands_for_its_code() -> None:
    assert {kind.code for kind in CLASSES.values()} == set(Code)
    assert CLASSES[Code.DEADLINE_EXCEEDED] is DeadlineExceeded
