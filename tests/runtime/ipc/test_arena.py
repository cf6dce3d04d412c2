from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.engines.ipc.arena import Incoming, Outgoing, create

PAGE = mmap.PAGESIZE


@pytest.fixture
def handle() -> Iterator[int]:
    opened = create(8 * PAGE)
    yield opened
    os.close(opened)


@pytest.mark.matrix
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=40))
def test_blocks_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    opened = create(8 * PAGE)
    outgoing = Outgoing(opened)
    os.close(opened)
    taken: dict[int, int] = {}
    for free, size in steps:
        if free and taken:
            start = sorted(taken)[size % len(taken)]
            del taken[start]
            outgoing.free(start)
        elif (start_ := outgoing.take(size)) is not None:
            assert len(outgoing.block(start_)) >= size
            assert all(start_ + size <= other or start_ >= other + taken[other] for other in taken)
            taken[start_] = len(outgoing.block(start_))
        else:
            assert sum(taken.values()) + size > 3 * PAGE  # less than half is free in one piece at the worst
    for start in taken:
        outgoing.free(start)
    assert outgoing.take(8 * PAGE) == 0


def test_a_full_arena_returns_nothing(handle: int) -> None:
    outgoing = Outgoing(handle)
    assert outgoing.take(8 * PAGE) == 0
    assert outgoing.take(1) is None
    outgoing.free(0)
    assert outgoing.take(8 * PAGE + 1) is None


@pytest.mark.matrix
def test_a_block_is_read_where_it_was_written_and_released_with_the_last_look_at_it(handle: int) -> None:
    released: list[int] = []
    outgoing, incoming = Outgoing(handle), Incoming(handle, released.append)
    first, second = outgoing.take(PAGE), outgoing.take(PAGE)
    assert first == 0
    assert second == PAGE
    outgoing.block(second)[:8] = np.frombuffer(np.arange(2, dtype=np.float32).tobytes(), np.uint8)
    block = incoming.block(second, 8)
    values = block.view(np.float32).reshape(2, 1)
    row = values[1:]
    del block, values
    gc.collect()
    assert released == []
    assert row.tolist() == [[1.0]]
    with pytest.raises(ValueError, match="read-only"):
        row[:] = 3
    del row
    gc.collect()
    assert released == [second]
