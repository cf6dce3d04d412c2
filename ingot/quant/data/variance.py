"""Whether data varies: ranges and accuracy that are measured on equal rows say nothing about other inputs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ingot.errors import InvalidArgument
from ingot.quant.data.samples import Samples
from ingot.tensors import Array, DType


def check(samples: Samples) -> tuple[str, ...]:
    """Return notes on inputs that are equal in all rows, and on channels that hold one value only.

    Raises:
        InvalidArgument: there are several rows, and all are equal.
    """
    if samples.rows < 2:
        return ()
    signature = samples.signature
    axes = signature.batch_axes(signature.inputs) if signature.batch is not None else {}
    names = [spec.name for spec in signature.inputs if signature.batch is None or spec.name in axes]
    parts = {
        name: [
            np.moveaxis(batch.inputs[name], axes[name], 0) if name in axes else batch.inputs[name][None]
            for batch in samples.batches()
        ]
        for name in names
    }
    equal = [name for name in names if equal_rows(parts[name])]
    if names and len(equal) == len(names):
        raise InvalidArgument(
            f"all {samples.rows} rows of the {samples.purpose}{samples.where} are equal: accuracy that is measured on "
            "them does not hold for other inputs; pass real ones, or no data, so that inputs are generated"
        )
    notes = [
        f"input '{name}' is the same in all {samples.rows} rows of the {samples.purpose}: the result holds for this "
        "value only"
        for name in equal
    ]
    for name in names:
        if name not in equal and (dead := _dead_channels(parts[name])):
            notes.append(
                f"{dead} of the {_channels(parts[name][0])} channels of input '{name}' hold one value only in the "
                f"{samples.purpose}: the result holds for this value only"
            )
    return tuple(notes)


def equal_rows(parts: Iterable[Array]) -> bool:
    """Return whether all rows of arrays [rows, ...] are equal."""
    parts = list(parts)
    first = parts[0][:1]
    return all(part.shape[1:] == first.shape[1:] and bool((part == first).all()) for part in parts)


def _axis(array: Array) -> int:
    """Return the axis of an array [rows, ...] that has its channels: the second of images, the last of others."""
    return 1 if array.ndim > 3 else -1


def _channels(array: Array) -> int:
    return array.shape[_axis(array)] if array.ndim > 1 and DType.of(array).is_float else 1


def _dead_channels(parts: list[Array]) -> int:
    """Return how many of several channels of numbers hold one value only."""
    sizes = {_channels(part) for part in parts}
    if len(sizes) > 1 or sizes <= {0, 1}:
        return 0
    columns = [np.moveaxis(part, _axis(part), 0).reshape(part.shape[_axis(part)], -1) for part in parts if part.size]
    low = np.minimum.reduce([column.min(1) for column in columns])
    high = np.maximum.reduce([column.max(1) for column in columns])
    return int((low == high).sum())
