"""The values of a pipeline's request: arrays with a row for each item of a level, and how levels relate.

The outermost level has the rows of the request. A node with ``each`` makes an inner one: some items for each row of an
outer one, in the order of these rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ingot.errors import TooLarge
from ingot.report import units
from ingot.steps.ragged import filled
from ingot.tensors import Array

# Of a value that is repeated or padded for the items of a request; the event loop does both.
_MOST_BYTES = 256 << 20


class Level:
    """The items of a level.

    Attributes:
        size: the number of items.
        outer: the level whose rows they belong to; None for the rows of the request.
        rows: the row of each item, int[size]; empty for the rows of the request.
        counts: the items of each row; empty likewise.
    """

    __slots__ = ("counts", "outer", "rows", "size")

    def __init__(self, size: int, outer: Level | None = None, counts: Array | None = None):
        self.size = size
        self.outer = outer
        self.counts = np.empty(0, np.intp) if counts is None else counts
        self.rows = self.counts if counts is None else np.repeat(np.arange(len(counts)), counts)

    @classmethod
    def of_counts(cls, outer: Level, counts: Array) -> Level:
        """Return the level of so many items for each row of another."""
        return cls(int(counts.sum()), outer, counts)

    @property
    def columns(self) -> Array:
        """The place of each item among those of its row, int[size]."""
        first = np.cumsum(self.counts) - self.counts
        places: Array = np.arange(self.size) - np.repeat(first, self.counts)
        return places


class Value(NamedTuple):
    """A value: an array, and for which items its node ran; None for all. Other items have padding."""

    array: Array
    ran: Array | None = None

    def at(self, index: Array) -> Value:
        """Return the value with the rows of an index.

        Raises:
            TooLarge: its rows are repeated too often.
        """
        rest = self.array.shape[1:]
        _check_size(f"a value that {len(index)} items read", (len(index), *rest), self.array.itemsize)
        return Value(self.array[index], None if self.ran is None else self.ran[index])


def spread(value: Value, outer: Level, inner: Level) -> Value:
    """Return a value of a level for each item of the same or an inner one."""
    if inner is outer or inner.outer is None:
        return value
    return spread(value, outer, inner.outer).at(inner.rows)


def gathered(value: Value, level: Level) -> Array:
    """Return a value of any level as columns of the request's rows: [rows, longest, ...] for an inner level.

    Raises:
        TooLarge: one row has so many items that the padding of the others takes too much memory.
    """
    array = value.array
    while level.outer is not None:
        longest = int(level.counts.max(initial=0))
        shape = (len(level.counts), longest, *array.shape[1:])
        _check_size(f"an output of {shape[0]} rows with up to {longest} items", shape, array.itemsize)
        found = filled(shape, array.dtype)
        found[level.rows, level.columns] = array
        array, level = found, level.outer
    return array


def first_of(alternatives: Sequence[Value]) -> Value:
    """Return of each item the first value whose node ran."""
    array, ran = alternatives[0]
    for other in alternatives[1:]:
        if ran is None:
            break
        mine, theirs = _same_size([array, other.array])
        place = ran.reshape(-1, *[1] * (mine.ndim - 1))
        array = np.where(place, mine, theirs)
        ran = None if other.ran is None else ran | other.ran
    return Value(array, ran)


def stacked(parts: Sequence[Array]) -> Array:
    """Return arrays with rows as one, padded to the same size of each row.

    Raises:
        TooLarge: there is too much padding.
    """
    return parts[0] if len(parts) == 1 else np.concatenate(_same_size(parts))


def scattered(array: Array, index: Array, size: int) -> Array:
    """Return rows at the places of an index among ``size`` rows, of which the others are padding.

    Raises:
        TooLarge: there is too much padding.
    """
    shape = (size, *array.shape[1:])
    _check_size(f"an output for {size} items", shape, array.itemsize)
    found = filled(shape, array.dtype)
    found[index] = array
    return found


def _same_size(parts: Sequence[Array]) -> list[Array]:
    largest = tuple(np.max([part.shape[1:] for part in parts], axis=0).astype(int).tolist())
    rows = sum(map(len, parts))
    _check_size(f"an output for {rows} items", (rows, *largest), parts[0].itemsize)
    return [part if part.shape[1:] == largest else _extended(part, largest) for part in parts]


def _extended(part: Array, largest: tuple[int, ...]) -> Array:
    found = filled((len(part), *largest), part.dtype)
    found[(slice(None), *map(slice, part.shape[1:]))] = part
    return found


def _check_size(what: str, shape: Sequence[int], itemsize: int) -> None:
    if (nbytes := math.prod(shape) * itemsize) > _MOST_BYTES:
        raise TooLarge(
            f"{what} has {units.size(nbytes)}, over the limit of {units.size(_MOST_BYTES)}; send fewer rows or items"
        )
