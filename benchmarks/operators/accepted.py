"""Differences that are accepted, each with its reason, and those that the notes of an export state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import numpy as np

from ingot.tensors import Array


@dataclass(frozen=True)
class Difference:
    """An output of one call that is not that of eager.

    Attributes:
        operator: its name.
        expected: eager's output.
        actual: the exported form's.
        inputs: the tensors of the call.
        arguments: the positional arguments of the operator, tensors among them.
        keywords: its other arguments.
        each: whether an element of the output depends on one element of each input.
        floor: elements up to this size may be wrong by as much as this one.
        other: the output of eager's other kernel, if it has one.
        single: eager's output for float16 or bfloat16, computed in float32 and rounded.
    """

    operator: str
    expected: Array
    actual: Array
    inputs: Sequence[Array] = ()
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    each: bool = False
    floor: float = 0.0
    other: Array | None = None
    single: Array | None = None

    def among_inputs(self, holds: Callable[[Array], Array]) -> Array | bool:
        """Return where one of the floats that an element depends on has a property."""
        found = [holds(value) for value in self.inputs if value.dtype.kind == "f"]
        if not self.each:
            return any(bool(part.any()) for part in found)
        places = np.zeros(self.expected.shape, bool)
        for part in found:
            places |= np.broadcast_to(part, places.shape)
        return places


Holds = Callable[[Difference], Array | bool]
"""Returns for which elements a reason holds."""


@dataclass(frozen=True)
class Accepted:
    """A kind of difference that says nothing about the exported graph: for which operators, where, and why."""

    operators: tuple[str, ...]
    reason: str
    holds: Holds


_AXES = {"sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "median": 1, "nanmedian": 1}
"""Operators that return places of values, with the position of the axis among their arguments."""
ZERO = "a zero has the other sign"


def _near_overflow(it: Difference) -> Array | bool:
    """Return where one of two numbers of one sign is infinite and the other near the largest number."""
    if it.expected.dtype.kind != "f":
        return False
    # Few intermediate results in float16 are far larger than the result.
    most = float(np.finfo(it.expected.dtype).max) / (100 if it.expected.itemsize > 2 else 2)
    left, right = it.expected.astype(np.float64), it.actual.astype(np.float64)
    near = np.fmin(np.abs(left), np.abs(right)) >= most
    return np.asarray((np.isinf(left) ^ np.isinf(right)) & near & (np.sign(left) == np.sign(right)))


def _tiny(it: Difference) -> Array | bool:
    """Return where both numbers are about 0 or subnormal. Kernels do not flush subnormals of float16."""
    if it.expected.dtype.kind != "f":
        return False
    limits = np.finfo(it.expected.dtype)
    least = 100 * float(limits.smallest_normal if it.expected.itemsize > 2 else limits.smallest_subnormal)
    return (np.abs(it.expected.astype(np.float64)) <= least) & (np.abs(it.actual.astype(np.float64)) <= least)


def _is_other_kernel(it: Difference) -> Array | bool:
    return False if it.other is None else _close(it.other, it.actual, 1e-6)


def _is_single(it: Difference) -> Array | bool:
    """Return where the graph is at least as close as eager to what eager computes in float32."""
    if it.single is None:
        return False
    exact, eager, actual = (value.astype(np.float64) for value in (it.single, it.expected, it.actual))
    return _close(it.single, it.actual, 1e-6) | (np.abs(actual - exact) <= np.abs(eager - exact))


def _has_infinite_weight(it: Difference) -> Array | bool:
    """Return where an answer is not finite, if a tensor after the first has an infinity or a NaN."""
    weights = [value for value in it.inputs[1:] if value.dtype.kind == "f"]
    if all(np.isfinite(value).all() for value in weights):
        return False
    return ~np.isfinite(it.expected) | ~np.isfinite(it.actual)


def _has_equal_value(it: Difference) -> Array | bool:
    """Return where a place holds the value that eager selected; no place may occur twice in a row.

    Zeros of both signs are equal, as to the comparisons of eager's kernels.
    """
    if it.expected.dtype != np.int64 or it.keywords.get("stable") or not it.arguments:
        return False
    source, position = np.asarray(it.arguments[0]), _AXES[it.operator]
    if not source.ndim:
        return False
    given = it.arguments[position] if len(it.arguments) > position else it.keywords.get("dim", -1)
    axis = given % source.ndim
    places = [it.expected, it.actual]
    if it.expected.ndim < source.ndim:
        places = [np.expand_dims(place, axis) for place in places]
    ordered = np.sort(places[1], axis)
    inside = (ordered >= 0) & (ordered < source.shape[axis])
    if not inside.all() or not np.diff(ordered, axis=axis).all():
        return False
    left, right = (np.take_along_axis(source, place, axis) for place in places)
    return np.asarray((left == right) | ((left != left) & (right != right))).reshape(it.expected.shape)


def _close(expected: Array, actual: Array, tolerance: float, least: float = 0) -> Array:
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    return np.isclose(right, left, rtol=tolerance, atol=least, equal_nan=True)


ACCEPTED = (
    Accepted(("*",), "an intermediate result overflows close to the largest number", _near_overflow),
    Accepted(("*",), "a result is below 100 times the smallest normal number, where kernels flush to 0", _tiny),
    Accepted(("*",), "eager's vectorized and scalar kernels differ, and the graph equals one", _is_other_kernel),
    Accepted(("*",), "in float16 or bfloat16, the graph is at least as close as eager to float32", _is_single),
    Accepted(
        ("nn.functional.tanhshrink",),
        "the hyperbolic tangent is within two roundings, and is subtracted from a number that is nearly equal",
        lambda it: it.among_inputs(lambda value: np.abs(value) * 2.5e-7 >= np.abs(it.expected - it.actual)),
    ),
    Accepted(
        ("sinc",),
        "the sine of a multiple of pi, which is 0 but for the rounding of pi, is within one rounding of 1",
        lambda it: np.abs(it.expected - it.actual) <= np.finfo(it.expected.dtype).eps,
    ),
    Accepted(
        ("nn.functional.conv*", "*group_norm"),
        "kernels multiply infinite weights by zeros of the padding, or fold them into other factors, as eager's own do",
        _has_infinite_weight,
    ),
    Accepted(
        ("linalg.multi_dot",),
        "eager chooses the order of the products by the sizes, and it decides which results of infinities are NaN",
        lambda it: it.among_inputs(np.isinf) & ~(np.isfinite(it.expected) & np.isfinite(it.actual)),
    ),
    Accepted(tuple(_AXES), "the order of equal values is unspecified without `stable`", _has_equal_value),
    Accepted(("*",), ZERO, lambda it: False),
)
"""The sign of a zero counts where an operator reads it, as ``signbit`` and the reciprocal do."""


def _has_nan(it: Difference) -> Array | bool:
    return it.among_inputs(np.isnan)


def _has_infinity(it: Difference) -> Array | bool:
    return it.among_inputs(np.isinf)


def _has_large(it: Difference) -> Array | bool:
    return it.among_inputs(lambda value: np.abs(value) > 10)


def _is_extreme(it: Difference) -> Array | bool:
    def extreme(value: Array) -> Array:
        size = np.abs(value)
        return ~np.isfinite(value) | (size > 1e30) | ((size < 1e-30) & (size > 0))

    return it.among_inputs(extreme) | _has_wide(it)


def _has_wide(it: Difference) -> Array | bool:
    return any(bool((np.abs(value.astype(np.float64)) > 1e4).any()) for value in it.inputs if value.dtype.kind in "iu")


def _is_within(error: float) -> Holds:
    return lambda it: np.abs(it.expected.astype(np.float64) - it.actual.astype(np.float64)) <= error


def _is_rounded(it: Difference) -> Array | bool:
    return _close(it.expected, it.actual, 2.0**-52)


STATED: dict[str, Holds] = {
    "with a NaN among the inputs, the graph's": _has_nan,
    "at inputs 50 times as large, the graph's": _has_large,
    "at integers up to 2^53, the graph's": _has_wide,
    "with infinities, NaN, 1e-38 or the largest integers among the inputs": _is_extreme,
    "within 1e-7, not relative to small results": _is_within(1e-7),
    "powers of odd integers with an exponent above 63 are not exact": lambda it: any(
        bool(np.any(np.asarray(number) > 63)) for number in it.arguments[1:2]
    ),
    "states within 1e-6, not relative to small results": _is_within(1e-6),
    "a NaN among the values may be ignored": _has_nan,
    "a NaN or an infinity among the scores may be ignored": lambda it: _has_nan(it) | _has_infinity(it),
    "or where a sum overflows, all results may be NaN or infinite": lambda it: (
        it.among_inputs(lambda value: np.abs(value) > np.finfo(value.dtype).max / 100) & ~np.isfinite(it.actual)
    ),
    "NaN where PyTorch returns a number or infinity": lambda it: _has_infinity(it) & np.isnan(it.actual),
    "a finite state where PyTorch returns NaN": lambda it: (
        _has_infinity(it) & np.isnan(it.expected) & np.isfinite(it.actual)
    ),
    "infinite where PyTorch returns NaN": lambda it: _has_infinity(it) & np.isnan(it.expected) & np.isinf(it.actual),
    "finite beyond 1e37, where PyTorch overflows": lambda it: np.isfinite(it.actual) & (np.abs(it.actual) > 1e37),
    "at coordinates beyond 1e7 pixels, and for volumes at infinities and NaN": lambda it: it.among_inputs(
        lambda value: ~(np.abs(value.astype(np.float64)) <= 1e5)  # which float16 lacks
    ),
    "integers beyond 2^53 are rounded to 53 bits": _is_rounded,
    "1.2e-7 of the value": lambda it: _close(it.expected, it.actual, 1.2e-7),
}
"""By a part of a note: for which elements it states a difference. Other notes state none."""
_STATED_SHAPES: dict[str, Callable[[Difference], Array | bool]] = {"rows that hold a NaN may count as equal": _has_nan}
"""By a part of a note: whether it states a difference in shape."""


@dataclass(frozen=True)
class Reasons:
    """Why elements of an output may differ.

    Attributes:
        accepted: the reasons of :data:`ACCEPTED`.
        stated: the notes of the export.
        rest: the actual output, with the elements that may differ replaced; ``expected`` itself if all may.
    """

    accepted: tuple[str, ...]
    stated: tuple[str, ...]
    rest: Array


def reasons(tolerance: float, difference: Difference, notes: Sequence[str] = ()) -> Reasons:
    """Return why elements of an output may differ."""
    expected, actual = difference.expected, difference.actual
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        known_shapes = (
            note for note in notes for part, holds in _STATED_SHAPES.items() if part in note and holds(difference)
        )
        stated = tuple(known_shapes) if expected.dtype == actual.dtype else ()
        return Reasons((), stated, expected if stated else actual)
    name = difference.operator
    kinds = [(item.reason, item.holds) for item in ACCEPTED if any(fnmatch(name, kind) for kind in item.operators)]
    known = [(note, holds) for note in notes for part, holds in STATED.items() if part in note]
    found: tuple[list[str], list[str]] = ([], [])
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        floor = difference.floor  # an element is compared with the largest one, or with itself
        good = _close(expected, actual, 0 if floor else tolerance, floor * tolerance)
        for texts, choices in zip(found, (kinds, known), strict=True):
            for text, holds in choices:
                held = np.asarray(holds(difference)) & ~good
                texts += [text] if held.any() else []
                good = good | held
    rest = expected if good.all() else np.where(good, expected, actual)
    return Reasons(tuple(found[0]), tuple(found[1]), rest)


def zero_has_other_sign(expected: Array, actual: Array) -> bool:
    """Return whether two equal outputs have zeros of different signs."""
    if expected.dtype.kind != "f":
        return False
    return bool(((expected == 0) & (actual == 0) & (np.signbit(expected) != np.signbit(actual))).any())


def worst(expected: Array, actual: Array) -> tuple[np.intp, ...]:
    """Return the place of the largest difference."""
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        gap = np.where(same, 0, np.nan_to_num(np.abs(left - right), nan=np.inf))
    return np.unravel_index(int(np.argmax(gap)), gap.shape)
