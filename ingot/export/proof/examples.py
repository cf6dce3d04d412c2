"""Example inputs, from the user or generated from a signature, at any sizes of the named dimensions."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot import tensors
from ingot.errors import ExportError
from ingot.tensors import Array, DType, Range, Signature, TensorSpec
from ingot.tensors.values import ValueRange

# The most FLOPs of one call for cases that are not needed to show that a dimension is dynamic.
MOST_WORK = 3e10
# The values of masks.
_FLAGS = ValueRange(0, 1)
# Sizes of named dimensions: distinct, so that two dimensions are never equal by accident.
_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
LARGEST = 33
"""The largest size of a single dimension in a case, in steps of its range."""


@dataclass(frozen=True)
class Limit:
    """The exclusive upper bound of an integer input used as an index: ``rows``, and the size of each of ``dims``."""

    rows: int | None = None
    dims: tuple[str, ...] = ()

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the limit at the given sizes."""
        sides = [sizes[dim] for dim in self.dims] + ([] if self.rows is None else [self.rows])
        return max(min(sides), 1)


@dataclass(frozen=True)
class Edge:
    """A case whose values are chosen for what the model does.

    Attributes:
        inputs: the inputs by name.
        numbers: constants of the model that are among the values, as the model has them.
        ordered: whether the model defines its outputs; False if it sorts values that may be equal.
        extreme: whether the values are at the ends of their datatype, where a difference is noted but does not
            fail the export.
    """

    inputs: Mapping[str, Array]
    numbers: tuple[float, ...] = ()
    ordered: bool = True
    extreme: bool = False


class Examples:
    """A source of valid inputs for a signature.

    Args:
        inputs: the model's inputs.
        ranges: bounds of their named dimensions.
        given: the user's arrays, which are repeated or cut along named dimensions; other inputs are generated.
        limits: upper bounds of integer inputs that are indices.
        states: inputs that are states of the model, with their initial values.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        ranges: Mapping[str, Range],
        given: Mapping[str, Array] | None = None,
        limits: Mapping[str, Limit] | None = None,
        states: Mapping[str, Array] | None = None,
    ):
        self.inputs = tuple(inputs)
        self._signature = Signature(self.inputs, (), ranges=ranges)
        self._given = given or {}
        self._limits = limits or {}
        self.states = states or {}
        self._work = 0.0
        self._signed = False
        self._related = False
        self._opposite: frozenset[str] = frozenset()
        self._more: list[dict[str, int]] = []
        self.edges: tuple[Edge, ...] = ()
        self.computed: frozenset[DType] = frozenset()
        own = replace(self._signature, inputs=tuple(spec for spec in inputs if spec.name in self._given))
        self._own_sizes = tensors.check_inputs(own, self._given)

    def _changed(self, **attributes: Any) -> Examples:
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def signed(self) -> Examples:
        """Return examples with alternating signs of the floats, since a trace records one branch only."""
        return self._changed(_signed=True)

    def within(self, ranges: Mapping[str, Range]) -> Examples:
        """Return examples with other bounds of the dimensions in ``ranges``."""
        signature = self._signature
        return self._changed(_signature=replace(signature, ranges={**signature.ranges, **ranges}))

    def limited(self, limits: Mapping[str, Limit]) -> Examples:
        """Return examples with further limits of indices."""
        return self._changed(_limits={**self._limits, **limits})

    def limit(self, name: str) -> int:
        """Return the exclusive upper bound of an index at the default sizes."""
        return self._limits[name].at(self.default_sizes)

    def with_edges(self, edges: Sequence[Edge]) -> Examples:
        """Return examples with further cases at given values, which come last in the proof."""
        return self._changed(edges=tuple(edges))

    def of_results(self, computed: Iterable[DType]) -> Examples:
        """Return examples of a model that computes in given datatypes, whose rounding the proof allows."""
        return self._changed(computed=frozenset(computed))

    def fitted(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return inputs with each value replaced by the nearest one of its declared range."""
        return {spec.name: _within(spec, inputs[spec.name]) for spec in self.inputs}

    @property
    def flags(self) -> tuple[str, ...]:
        """The inputs that may be flags, such as masks: integers and booleans whose only known values are 0 and 1."""
        return tuple(spec.name for spec in self.inputs if spec.name not in self.states and self._is_flag(spec))

    def _is_flag(self, spec: TensorSpec) -> bool:
        if spec.name in self._given:
            return set(np.unique(self._given[spec.name]).tolist()) <= {0, 1} if spec.dtype is not DType.BYTES else False
        if spec.values not in (None, _FLAGS) or self.is_index(spec.name):
            return False
        return spec.dtype is DType.BOOL or spec.dtype.is_integer

    def opposite(self, flags: Iterable[str]) -> Examples:
        """Return examples with the opposite meaning of some flags: of a mask, True for the positions to ignore."""
        return self._changed(_opposite=self._opposite ^ set(flags))

    def related(self) -> Examples:
        """Return examples some of which the model may reject, because its dimensions depend on each other."""
        return self._changed(_related=True)

    def with_states(self, inputs: Sequence[TensorSpec], states: Mapping[str, Array]) -> Examples:
        """Return examples with states of the model among the inputs."""
        inputs = tuple(inputs)
        return self._changed(inputs=inputs, states=states, _signature=replace(self._signature, inputs=inputs))

    def with_work(self, work: float) -> Examples:
        """Return examples of a model whose call at the default sizes takes ``work`` FLOPs."""
        return self._changed(_work=work)

    @property
    def work(self) -> float:
        """The FLOPs of a call at the default sizes."""
        return self._work

    def called(self, inputs: Sequence[TensorSpec]) -> Examples:
        """Return examples of the same inputs, whose dimensions have other names."""
        return self._changed(inputs=tuple(inputs), _signature=replace(self._signature, inputs=tuple(inputs)))

    @property
    def default_sizes(self) -> dict[str, int]:
        """One size per named dimension: that of the given arrays if it is 2 or more, otherwise a distinct one."""
        candidates = itertools.cycle(_SIZES)
        sizes = {}
        for symbol, bounds in self.ranges.items():
            own, size = self._own_sizes.get(symbol, 0), next(candidates) * bounds.step
            size = size if size >= bounds.low else bounds.low + size
            sizes[symbol] = bounds.nearest(own if own > 1 else size)
        return sizes

    @property
    def ranges(self) -> dict[str, Range]:
        """The bounds of each named dimension."""
        return {symbol: self._signature.range(symbol) for symbol in self._signature.symbols}

    def at(self, more: Sequence[Mapping[str, int]]) -> Examples:
        """Return examples with further cases."""
        return self._changed(_more=[*self._more, *map(dict, more)])

    def is_index(self, name: str) -> bool:
        """Return whether an input is known to be an index."""
        return name in self._limits

    def is_given(self, name: str) -> bool:
        """Return whether an input has values: the user's, or the initial ones of a state."""
        return name in self._given or name in self.states

    def is_limited(self, name: str) -> bool:
        """Return whether only some values of an input are valid: those of an index, or of a declared range."""
        return self.is_index(name) or name in self._signature.values

    @property
    def stretched(self) -> bool:
        """Whether the model may reject some cases, for instance those made by cutting or repeating given arrays."""
        return bool(self._given) or self._related

    def affordable(self, sizes: Mapping[str, int], most: float | None = None) -> bool:
        """Return whether a call needs at most ``most`` FLOPs, :data:`MOST_WORK` by default, assuming that
        they grow linearly."""
        shares = (sizes[symbol] / size for symbol, size in self.default_sizes.items())
        return self._work * math.prod(shares) <= (MOST_WORK if most is None else most)

    def cases(self) -> Iterator[dict[str, int]]:
        """Yield the sizes of the proof: the default, then each dimension at its minimum, at 2, at 9 and at 33.

        The default is repeated in between and at the end, for other values. Cases over :data:`MOST_WORK` are left out,
        except those of the minimum sizes, of 2 and those given to :meth:`at`.
        """
        default, ranges = self.default_sizes, self.ranges
        seen = [default]
        yield default
        for size in (0, 2, 9, LARGEST):
            each = [{**default, symbol: bounds.nearest(size * bounds.step)} for symbol, bounds in ranges.items()]
            for sizes in (*self._more, *each):
                if sizes not in seen and (size < 9 or sizes in self._more or self.affordable(sizes)):
                    seen.append(sizes)
                    yield sizes
            if size in (0, LARGEST) and self.affordable(default):
                yield default

    def make(self, sizes: Mapping[str, int], seed: int = 0, *, varied: bool = True) -> dict[str, Array]:
        """Return inputs at the given sizes; the user's arrays are cut or repeated, and with ``varied`` also perturbed.

        Values are within their declared range. Without one, generated integers are below their limit, or if that is
        unknown 0 or 1, which are nearly always valid indices.
        """
        rng = np.random.default_rng(seed)
        try:
            made = {spec.name: self._make(spec, sizes, seed, rng, varied) for spec in self.inputs}
        except MemoryError:
            shown = ", ".join(str(spec) for spec in self.inputs)
            raise ExportError(f"example inputs for {shown} do not fit in memory") from None
        if self._signed:
            sign = -1 if seed % 2 else 1
            made = {name: sign * np.abs(array) if DType.of(array).is_float else array for name, array in made.items()}
        made |= {name: (1 - made[name]).astype(made[name].dtype) for name in self._opposite}
        return self.fitted(made)

    def _make(
        self, spec: TensorSpec, sizes: Mapping[str, int], seed: int, rng: np.random.Generator, varied: bool
    ) -> Array:
        shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
        if spec.name in self.states:
            return self.states[spec.name]
        if spec.name in self._given:
            resized = _resized(self._given[spec.name], shape)
            exact = seed == 0 and resized.size <= self._given[spec.name].size
            return resized if exact or not varied else _varied(resized, rng, mixed=seed % 3 == 2)
        if spec.dtype is DType.BYTES:
            texts = np.array([b"7", b"12", b"305", b"86"], dtype=object)  # some models parse numbers
            return np.asarray(texts[rng.integers(0, len(texts), shape)], dtype=object)
        if spec.values is not None and not (spec.dtype.is_integer and spec.values == _FLAGS):
            return _spanned(spec.values.draw(rng, shape, spec.dtype.numpy), spec.values, seed)
        if spec.dtype.is_float:
            return np.asarray(rng.standard_normal(shape)).astype(spec.dtype.numpy)
        limit = self._limits[spec.name].at(sizes) if spec.name in self._limits else 2
        numbers = np.asarray(rng.integers(0, limit, shape)).astype(spec.dtype.numpy)
        if limit == 2 and (len(spec.shape) == 1 or spec.shape[-1:] == (1,)):
            # One value a sample: with equal ones, nothing would show whether samples are independent.
            numbers.flat[:1], numbers.flat[1:2] = 1, 0
        elif shape and limit == 2:
            numbers[..., :1] = 1  # a mask of zeros only is undefined, and engines disagree on it
        return numbers


def _within(spec: TensorSpec, array: Array) -> Array:
    array = np.asarray(array)  # arithmetic turns arrays without dimensions into numbers
    return array if spec.values is None else spec.values.clip(array)


def _spanned(array: Array, values: ValueRange, seed: int) -> Array:
    """Set an element to the upper end of the range if ``seed`` is odd, to the lower one if it is even, but not 0.

    The first case must be ordinary: graphs are captured with it, and an end, such as a size of 0, may take a branch.
    """
    end = values.high if seed % 2 else values.low
    if seed and end is not None and array.size:
        array[(-1,) * array.ndim] = end
    return array


def _resized(array: Array, shape: tuple[int, ...]) -> Array:
    """Cut or repeat an array; a sorted vector of integers, such as offsets, stays sorted."""
    order = _order(array)
    for axis, size in enumerate(shape):
        array = array.take(np.arange(size), axis, mode="wrap")
    return np.sort(array)[::order] if order else array


def _order(array: Array) -> int:
    """Return 1 for a vector of integers that ascends, -1 for one that descends, and 0 for all other arrays.

    Two values are in order by accident, unless the first is 0, as in offsets.
    """
    if array.ndim != 1 or not DType.of(array).is_integer or len(set(array.tolist())) < (3 if array[:1].any() else 2):
        return 0
    return next((order for order in (1, -1) if (np.diff(array.astype(np.int64)) * order >= 0).all()), 0)


def _varied(array: Array, rng: np.random.Generator, mixed: bool = False) -> Array:
    """Return other values of the same kind: an example of equal samples, or of one value, would prove little.

    With ``mixed``, a vector of integers, such as lengths, gets any values up to the largest instead of a permutation.
    """
    if DType.of(array).is_float:
        values = array.astype(np.float64)
        finite = np.isfinite(values)
        if set(np.unique(values[finite])) <= {0.0, 1.0}:  # a mask or a placeholder
            return np.where(finite, rng.integers(0, 2, array.shape), values).astype(array.dtype)
        spread = float(values[finite].std()) or 1.0
        return np.where(finite, values + 0.1 * spread * rng.standard_normal(array.shape), values).astype(array.dtype)
    if array.ndim == 0 or not len(array):
        return array
    if order := _order(array):
        low, high = array.min(), array.max()
        drawn = np.sort(rng.integers(min(low, 1) if mixed else low, high + 1, array.shape))[::order]
        drawn[0] *= array[0] != 0  # offsets begin at 0
        return drawn.astype(array.dtype)
    if array.ndim == 1:
        most = int(array.max()) if mixed and DType.of(array).is_integer else 0
        return rng.integers(1, most + 1, array.shape).astype(array.dtype) if most > 1 else rng.permutation(array)
    return np.take_along_axis(array, rng.integers(0, len(array), array.shape), 0)  # mixed from the given samples


def infer_specs(names: Sequence[str], arrays: Mapping[str, Array], batch: str) -> tuple[TensorSpec, ...]:
    """Describe arrays whose first dimension is the batch and whose other dimensions are fixed.

    Raises:
        ExportError: the arrays have different first dimensions.
    """
    firsts = {arrays[name].shape[0] if arrays[name].ndim else None for name in names}
    if len(firsts) != 1 or None in firsts:
        shapes = ", ".join(f"{name} {list(arrays[name].shape)}" for name in names)
        raise ExportError(
            f"the example inputs have different first dimensions ({shapes}), so none can be the batch; "
            "describe each dimension, as in inputs=['x:float32[batch,3]', 'scale:float32[1]']"
        )
    return tuple(TensorSpec(name, DType.of(arrays[name]), (batch, *arrays[name].shape[1:])) for name in names)
