"""Rows from many items, grouped by their sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument
from ingot.quant.data.sources.items import Batch, check_item, name_arrays, sound_rows
from ingot.tensors import Array, Signature
from ingot.tensors.arrays import to_bytes

MAX_BYTES = 2 << 30
"""The largest number of bytes to read from a long source."""


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        items: pairs of an item's name in messages and the item: a mapping, an array or a tuple.
        where: a suffix for messages that names the source, such as " in data.npz".
        single: whether an item may be one row, without the batch dimension.
        bounded: whether the limit of rows applies to it.
        recorded: whether it is recorded traffic, in which rows with NaN or infinity are left out.
        classes: the names of the classes that labels count.
        notes: remarks on how it is read.
        raw: whether steps made it of raw inputs.
    """

    items: Iterator[tuple[str, Any]]
    where: str = ""
    single: bool = False
    bounded: bool = False
    recorded: bool = False
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    raw: bool = False


def pick(signature: Signature, batch: Batch, index: Array) -> Batch:
    """Return some rows of a batch. Inputs without a batch axis, and the case of a model without one, stay whole."""
    if len(index) == batch.rows and np.array_equal(index, np.arange(batch.rows)):
        return batch
    axes = signature.batch_axes(signature.inputs) if signature.batch is not None else {}
    return Batch(
        {name: array.take(index, axes[name]) if name in axes else array for name, array in batch.inputs.items()},
        {name: array[index] for name, array in batch.extras.items()},
        len(index),
    )


def collect(signature: Signature, source: Source, what: str, limit: int) -> tuple[list[Batch], tuple[str, ...]]:
    """Read a source, and join rows of equal sizes, in the order in which the sizes first appear.

    Returns:
        The groups, and notes on what was left out.

    Raises:
        InvalidArgument: there are no rows, items have different arrays, or one does not fit the model.
    """
    groups: dict[Hashable, list[Batch]] = {}
    rows, size, lost = 0, 0, 0
    extras: set[str] | None = None
    notes: tuple[str, ...] = ()
    for name, batch in _batches(signature, source):
        if source.bounded and (rows >= limit or size >= MAX_BYTES):
            bound = f"first {rows} rows" if rows >= limit else f"first {rows} rows ({size >> 20} MiB)"
            notes = (f"only the {bound} of the data were read",)
            break
        if extras is not None and (odd := extras ^ set(batch.extras)):
            raise InvalidArgument(f"{name} differs from those before it: only some of them have '{min(odd)}'")
        extras = set(batch.extras)
        if source.recorded:
            sound = sound_rows(signature, batch)
            lost += batch.rows - len(sound)
            if not len(sound):
                continue
            batch = pick(signature, batch, sound)
        if source.bounded and rows + batch.rows > limit:
            batch = pick(signature, batch, np.arange(limit - rows))
            notes = (f"only the first {limit} rows of the data were read",)
        rows += batch.rows
        size += sum(array.nbytes for array in (*batch.inputs.values(), *batch.extras.values()))
        key = len(groups) if signature.batch is None else _key(signature, batch)
        groups.setdefault(key, []).append(batch)
    left_out = f"{lost} rows that hold NaN or infinity were left out" if lost else ""
    if not rows:
        raise InvalidArgument(f"{what} is empty: it has no rows" + (f"; {left_out}" if lost else ""))
    notes += (left_out,) if lost else ()
    return [_join(signature, groups.pop(key)) for key in list(groups)], notes


def _batches(signature: Signature, source: Source) -> Iterator[tuple[str, Batch]]:
    for name, item in source.items:
        arrays = name_arrays(signature, item, name)
        for batch in check_item(signature, arrays, name, single=source.single, finite=not source.recorded):
            yield name, batch


def _key(signature: Signature, batch: Batch) -> Hashable:
    """Return the key of rows that can share a batch: their sizes, and the inputs that all rows share."""
    axes = signature.batch_axes(signature.inputs)
    shapes = tuple(
        (name, np.delete(array.shape, axes[name]).tobytes())
        if name in axes
        else (name, hashlib.sha256(to_bytes(array)).digest() + str(array.shape).encode())
        for name, array in batch.inputs.items()
    )
    return shapes, tuple((name, array.shape[1:]) for name, array in sorted(batch.extras.items()))


def _join(signature: Signature, parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    axes = signature.batch_axes(signature.inputs)

    def joined(name: str) -> Array:
        columns = [part.inputs[name] for part in parts]
        return np.concatenate(columns, axes[name]) if name in axes else columns[0]

    extras: Mapping[str, Array] = parts[0].extras
    return Batch(
        {name: joined(name) for name in parts[0].inputs},
        {name: np.concatenate([part.extras[name] for part in parts]) for name in extras},
        sum(part.rows for part in parts),
    )
