"""Remedies for a model that does not run on generated inputs, found by trying other declarations of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ingot.errors import InvalidArgument
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples
from ingot.export.proof.indices import failure
from ingot.export.proof.sizes import stepped
from ingot.tensors import DType, Range, TensorSpec
from ingot.tensors.values import ValueRange

_DTYPES = (DType.FP32, DType.INT64, DType.FP16, DType.BF16, DType.FP64, DType.BOOL)
_NUMBERS = 12
# The most declarations for which other sizes are tried, of those on which the model fails with another error.
_FARTHER = 4
# Values that nearly every model with a range accepts, such as divisors, and how often they are drawn to try them.
_VALUES = {True: ValueRange(1, 9), False: ValueRange(0.1, 0.9)}
_SEEDS = 3
# Errors of the model's code, which no other size of an input removes.
_IN_CODE = ("AttributeError:", "ImportError:", "ModuleNotFoundError:", "NameError:", "TypeError:", "UnboundLocalError:")


def remedy(runner: Runner, examples: Examples) -> str:
    """Return a remedy for a model that does not run at the examples' default sizes; '' if its code is at fault."""
    sizes = examples.default_sizes
    reason = failure(runner, examples, sizes) or ""
    if ranged := by_values(runner, examples):
        return ranged
    farther: list[Examples] = []
    for inputs in _declarations(examples, reason):
        changed = Examples(inputs, examples.ranges)
        found = failure(runner, changed, changed.default_sizes)
        if found is None:
            return _advice(examples, changed)
        same = all(new.dtype is old.dtype for new, old in zip(inputs, examples.inputs, strict=True))
        if same and _without_numbers(found) != _without_numbers(reason):
            farther.append(changed)
    for changed in farther[:_FARTHER]:
        if (fitting := stepped(runner, changed)) is not None:
            return _advice(examples, fitting)
    if reason.startswith(_IN_CODE):
        return ""
    if not sizes:
        return "the values were generated: pass real ones with --example"
    dim = list(sizes)[-1]
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"the sizes {shown} and the values were generated: declare the sizes that the model accepts, as a range "
        f"({dim}=2..), a range in steps ({dim}=..512:32) or a number, or pass real inputs with --example"
    )


def by_values(runner: Runner, examples: Examples) -> str:
    """Return a range of values with which a model runs at the examples' default sizes, as a remedy, or ''."""
    for changed in _ranges(examples):
        if all(failure(runner, changed, changed.default_sizes, seed) is None for seed in range(_SEEDS)):
            return _advice(examples, changed)
    return ""


def as_int64(examples: Examples) -> str:
    """Return how to declare 32-bit inputs that the engine does not accept as indices."""
    found = [replace(spec, dtype=DType.INT64) for spec in examples.inputs if spec.dtype is DType.INT32]
    options = " ".join(f"--input '{written(spec, examples.ranges)}'" for spec in found)
    return f"; declare inputs that are indices as int64: {options}" if found else ""


def _advice(examples: Examples, fitting: Examples) -> str:
    shown = ", ".join(written(spec, fitting.ranges) for spec in fitting.inputs if spec not in examples.inputs)
    return f"it runs with {shown}: declare it that way"


def written(spec: TensorSpec, ranges: Mapping[str, Range]) -> str:
    """Return an input as the user declares it, with the ranges of its dimensions."""
    dims = [f"{dim}={ranges[dim]}" if ranges.get(dim, Range()) != Range() else dim for dim in map(str, spec.shape)]
    values = "" if spec.values is None else f"={spec.values}"
    return f"{str(replace(spec, shape=(), values=None)).removesuffix(']')}{','.join(dims)}]{values}"


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "", reason)


def _ranges(examples: Examples) -> Iterator[Examples]:
    """Yield examples with a range of values for one number that has none, and for all of a kind."""
    free = [spec for spec in examples.inputs if spec.values is None and (spec.dtype.is_integer or spec.dtype.is_float)]
    kinds = [[spec for spec in free if spec.dtype.is_integer is whole] for whole in (True, False)]
    for chosen in (*([spec] for spec in free), *(kind for kind in kinds if len(kind) > 1)):
        ranged = {spec.name: replace(spec, values=_VALUES[spec.dtype.is_integer]) for spec in chosen}
        yield Examples([ranged.get(spec.name, spec) for spec in examples.inputs], examples.ranges)


def _declarations(examples: Examples, reason: str) -> Iterator[tuple[TensorSpec, ...]]:
    """Yield other declarations: another datatype, two dimensions as one, a number from the message as a size."""
    inputs = examples.inputs
    for spec, dtype in itertools.product(inputs, _DTYPES):
        if dtype is not spec.dtype:
            yield tuple(_as(item, dtype) if item is spec else item for item in inputs)
    numbers = [number for number in dict.fromkeys(map(int, re.findall(r"\d+", reason))) if 0 < number <= 1 << 16]
    for spec, number in itertools.product(inputs, numbers[:_NUMBERS]):
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) and dim != number:
                shape = (*spec.shape[:axis], number, *spec.shape[axis + 1 :])
                yield tuple(replace(item, shape=shape) if item is spec else item for item in inputs)
    for one, other in itertools.combinations(examples.ranges, 2):
        if examples.ranges[one] == examples.ranges[other]:
            yield _renamed(inputs, {other: one})
    for dim, number in itertools.product(examples.ranges, numbers[:_NUMBERS]):
        if number in examples.ranges[dim]:
            yield _renamed(inputs, {dim: number})


def _as(spec: TensorSpec, dtype: DType) -> TensorSpec:
    """Return a spec with another datatype, and without its range of values if the datatype cannot hold it."""
    try:
        return replace(spec, dtype=dtype)
    except InvalidArgument:
        return replace(spec, dtype=dtype, values=None)


def _renamed(inputs: tuple[TensorSpec, ...], names: Mapping[str, int | str]) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, shape=tuple(names.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape))
        for spec in inputs
    )
