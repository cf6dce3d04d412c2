"""Inputs as another server's configuration declares them, which has sizes but no names for those that vary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ingot.tensors import Dim, DType, TensorSpec

BATCH = "batch"


@dataclass(frozen=True)
class Declared:
    """One input: its sizes without the batch, None where they vary; ``batched`` if a batch dimension stands before."""

    name: str
    dtype: DType
    sizes: tuple[int | None, ...]
    batched: bool


def specs(declared: Iterable[Declared], known: Iterable[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """Return descriptions of the inputs.

    Args:
        declared: the inputs.
        known: what the model's file says of them, if it does: dimensions that vary are called as they are there, so
            that two inputs still share one. Otherwise each has a name of its own.
    """
    by_name = {spec.name: spec for spec in known}
    return tuple(_spec(item, by_name.get(item.name)) for item in declared)


def _spec(item: Declared, known: TensorSpec | None) -> TensorSpec:
    first: list[Dim] = [BATCH] if item.batched else []
    rank = len(first) + len(item.sizes)
    names: Sequence[Dim | None] = known.shape if known is not None and len(known.shape) == rank else [None] * rank
    rest = (_dim(item.name, axis, size, names[axis]) for axis, size in enumerate(item.sizes, len(first)))
    return TensorSpec(item.name, item.dtype, (*first, *rest))


def _dim(tensor: str, axis: int, size: int | None, known: Dim | None) -> Dim:
    if size is not None:
        return size
    return known if known is not None else f"{re.sub(r'[^A-Za-z0-9_]', '_', tensor)}_{axis}"
