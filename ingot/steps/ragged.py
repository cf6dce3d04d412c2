"""Answers of which each item has its own number, as arrays: columns that are padded by one rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ingot.tensors import Array

T = TypeVar("T")

# Values behind an item's last answer by the kind of the type: 0 would be a valid place, or a valid id.
_FILL: Mapping[str, object] = {"O": b"", "f": 0, "i": -1}


def filled(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array of padding: empty BYTES, 0 in floats, -1 in integers, and 0 in all others."""
    return np.full(shape, _FILL.get(dtype.base.kind, 0), dtype)


def padded(rows: Sequence[Sequence[Any] | Array], dtype: DTypeLike) -> Array:
    """Return rows of different lengths as one array, [n, longest].

    Rows are filled up with empty BYTES, 0 in floats, and -1 in integers.

    Args:
        rows: the elements of each item.
        dtype: of an element. One with a shape, such as ``np.dtype((np.float32, 4))``, makes [n, longest, 4].
    """
    dtype = np.dtype(dtype)
    found = filled((len(rows), max(map(len, rows), default=0)), dtype)
    for index, row in enumerate(rows):
        if len(row):
            found[index, : len(row)] = row
    return found


def columns(
    rows: Sequence[Sequence[T]], parts: Mapping[str, tuple[Callable[[T], Any], DTypeLike]], count: str = "count"
) -> dict[str, Array]:
    """Return the parts of the answers to each item, padded as :func:`padded` does, and their number as int32[n].

    Args:
        rows: the answers to each item.
        parts: how each array gets its element of an answer, and of which type, by the array's name.
        count: the name of the numbers.
    """
    found = {name: padded([[*map(get, row)] for row in rows], dtype) for name, (get, dtype) in parts.items()}
    return {**found, count: counts(rows)}


def counts(rows: Sequence[Sequence[Any] | Array]) -> Array:
    """Return the number of each item's answers, int32[n]."""
    return np.array([*map(len, rows)], np.int32)
