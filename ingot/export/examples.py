"""Example inputs: given by the user or generated from a signature, at any sizes of its named dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ingot import tensors
from ingot.errors import ExportError
from ingot.tensors import Array, DType, Range, Signature, TensorSpec

# Sizes that are tried for named dimensions: distinct, so that two dimensions are never equal by accident.
_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)


class Examples:
    """A source of valid inputs for a signature.

    Args:
        inputs: the model's inputs.
        ranges: bounds of their named dimensions.
        given: the user's own arrays, which are then repeated or cut along named dimensions instead of generated.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], ranges: Mapping[str, Range], given: Mapping[str, Array] | None = None
    ):
        self._inputs = inputs
        self._signature = Signature(tuple(inputs), (), ranges=ranges)
        self._given = given
        if given is not None:
            tensors.check_inputs(self._signature, given)

    @property
    def default_sizes(self) -> dict[str, int]:
        """One size for each named dimension: distinct, and 2 or more where the range allows."""
        candidates = itertools.cycle(_SIZES)
        return {symbol: _clamp(self._signature.range(symbol), next(candidates)) for symbol in self._signature.symbols}

    def cases(self) -> Iterator[dict[str, int]]:
        """Yield sizes to prove equality at: the default, then each dimension at its least, at 2 and at 9."""
        default = self.default_sizes
        seen = [default]
        yield default
        for symbol in default:
            bounds = self._signature.range(symbol)
            for size in (bounds.low, 2, 9):
                sizes = {**default, symbol: _clamp(bounds, size)}
                if sizes not in seen:
                    seen.append(sizes)
                    yield sizes

    def make(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
        """Return inputs at the given sizes. Generated integers are 0 or 1, which are valid indices almost anywhere."""
        rng = np.random.default_rng(seed)
        try:
            return {spec.name: self._make(spec, sizes, rng) for spec in self._inputs}
        except MemoryError:
            shown = ", ".join(str(spec) for spec in self._inputs)
            raise ExportError(f"example inputs for {shown} do not fit in memory") from None

    def _make(self, spec: TensorSpec, sizes: Mapping[str, int], rng: np.random.Generator) -> Array:
        shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
        if self._given is not None:
            return _resized(self._given[spec.name], shape, rng)
        if spec.dtype is DType.BYTES:
            words = np.array([b"an", b"example", b"of", b"text"], dtype=object)
            return np.asarray(words[rng.integers(0, len(words), shape)], dtype=object)
        if spec.dtype.is_float:
            return np.asarray(rng.standard_normal(shape)).astype(spec.dtype.numpy)
        numbers = np.asarray(rng.integers(0, 2, shape)).astype(spec.dtype.numpy)
        if shape:
            numbers[..., :1] = 1  # an attention mask of nothing but zeros has no meaning that two engines share
        return numbers


def _resized(array: Array, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Cut or repeat an array. Repeated numbers are varied by a tenth: equal rows would prove nothing of each other."""
    grown = any(size > have for size, have in zip(shape, array.shape, strict=True))
    for axis, size in enumerate(shape):
        array = array.take(np.arange(size), axis, mode="wrap")
    if grown and DType.of(array).is_float:
        array = (array * (1 + 0.1 * rng.standard_normal(array.shape))).astype(array.dtype)
    return array


def _clamp(bounds: Range, size: int) -> int:
    size = max(size, bounds.low)
    return size if bounds.high is None else min(size, bounds.high)


def infer_specs(names: Sequence[str], arrays: Mapping[str, Array], batch: str) -> tuple[TensorSpec, ...]:
    """Describe arrays whose first dimension is the batch and whose others are fixed.

    Raises:
        ExportError: the arrays have different first dimensions, so that it cannot be a batch.
    """
    firsts = {arrays[name].shape[0] if arrays[name].ndim else None for name in names}
    if len(firsts) != 1 or None in firsts:
        shapes = ", ".join(f"{name} {list(arrays[name].shape)}" for name in names)
        raise ExportError(
            f"the example inputs have different first dimensions ({shapes}), so none can be the batch; "
            "say what each dimension is, such as inputs=['x:float32[batch,3]', 'scale:float32[1]']"
        )
    return tuple(TensorSpec(name, DType.of(arrays[name]), (batch, *arrays[name].shape[1:])) for name in names)
