"""Bounds of tensors: of their sizes and, where these may become sizes, of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.bounds.graph import Constant
from ingot.bounds.interval import Interval
from ingot.bounds.poly import ONE, ZERO, Poly, Size, product

ITEMS = 64
"""Values are known one by one in tensors of at most this many elements."""

FLOAT, UINT8, INT8, INT32, INT64, STRING, BOOL = 1, 2, 3, 6, 7, 8, 9
"""Element types of ONNX that rules name."""
_WIDTHS = {1: 4, 4: 2, 5: 2, 6: 4, 7: 8, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16, 16: 2, STRING: 32}
_LIMITS = {BOOL: (0, 1), UINT8: (0, 255), INT8: (-128, 127), 4: (0, 65535), 5: (-32768, 32767)}
_ENDS = {
    **_LIMITS,
    INT32: (-(1 << 31), (1 << 31) - 1),
    INT64: (-(1 << 63), (1 << 63) - 1),
    12: (0, (1 << 32) - 1),
    13: (0, (1 << 64) - 1),
    21: (0, 15),
    22: (-8, 7),
}
INTEGERS = frozenset(_ENDS)
ROUNDED = 1 + Fraction(1, 1 << 20)
"""Sizes that are computed in 32-bit floats are off by a few of their last places, of 2**-24 each."""
# By how much results of floating-point types may differ from exact ones, relatively, and the largest of them.
_ROUNDING = {FLOAT: (Fraction(1, 1 << 20), 1 << 120), 11: (Fraction(1, 1 << 40), 1 << 1000)}

Dims = tuple[Interval, ...]
UNKNOWN = Interval()
_SENT = -1  # the depth of symbols that are not sizes, so that no dimension's name equals theirs


class UnboundedError(Exception):
    """The work or memory of a node or a graph is not bounded by the sizes of the inputs; the text says why."""


@dataclass(frozen=True, slots=True)
class Text:
    """Bounds of the bytes of a string tensor's texts: at most ``sent``, and ``width`` for each element.

    ``sent`` is a sum of the bytes that clients send in inputs, one symbol each; see :func:`sent`.
    """

    sent: Poly
    width: int

    def covers(self, other: Text) -> bool:
        """Return whether these bounds also hold for all texts within the other ones."""
        return self.sent.covers(other.sent) and self.width >= other.width

    def upper(self, other: Text) -> Text:
        """Return bounds of texts that are within either."""
        return Text(self.sent.upper(other.sent), max(self.width, other.width))


def sent(name: str) -> Text:
    """Return the texts of an input."""
    return Text(Poly.symbol(Size(f"bytes of {name}", depth=_SENT)), 0)


def is_sent(symbol: str) -> bool:
    """Return whether a symbol stands for the bytes of an input's texts, and not for a size."""
    return isinstance(symbol, Size) and symbol.depth == _SENT


@dataclass(frozen=True, slots=True)
class Tensor:
    """Bounds of one tensor.

    ``kind`` is its ONNX element type, 0 if unknown. ``dims`` are the sizes, None if the rank is unknown. ``count``
    bounds the number of elements. ``items`` are the values in order, if they are few and something is known of them;
    ``each`` contains all values. ``text`` bounds the bytes of texts.
    """

    kind: int
    dims: Dims | None
    count: Poly
    items: tuple[Interval, ...] | None = None
    each: Interval = UNKNOWN
    text: Text | None = None

    @classmethod
    def of(
        cls,
        kind: int,
        dims: Sequence[Interval],
        *,
        count: Poly | None = None,
        items: Sequence[Interval] | None = None,
        each: Interval | None = None,
        text: Text | None = None,
    ) -> Tensor:
        """Return a tensor of known rank.

        Raises:
            UnboundedError: a size has no bound.
        """
        dims, highs = list(dims), []
        for axis, dim in enumerate(dims):
            if dim.high is None:
                raise UnboundedError(f"the size of dimension {axis} of its output comes from values")
            if dim.exact is None and not dim.high.covers(ZERO):
                dim = dims[axis] = Interval.up_to(dim.high.upper(ZERO))  # no size is below 0
            highs.append(dim.high or ZERO)
        found = None if items is None or len(items) > ITEMS else tuple(items)
        if found and all(item.low is None and item.high is None for item in found):
            found = None
        return cls(kind, tuple(dims), product(highs) if count is None else count, found, each or limits(kind), text)

    @classmethod
    def constant(cls, value: Constant) -> Tensor:
        dims = [Interval.exactly(dim) for dim in value.dims]
        numbers = value.numbers(ITEMS)
        items = None if numbers is None else [Interval.exactly(number) for number in numbers]
        each = None
        if value.values is not None and value.values.size and value.kind in INTEGERS:
            each = Interval(Poly.of(int(value.values.min())), Poly.of(int(value.values.max())))
        text = None if value.longest is None else Text(ZERO, value.longest)
        return cls.of(value.kind, dims, items=items, each=each, text=text)

    @property
    def nbytes(self) -> Poly:
        width = _WIDTHS.get(self.kind, 1 if self.kind else 8)
        if self.text is None:
            return self.count.scaled(width)
        return self.count.scaled(width + self.text.width) + self.text.sent

    @property
    def bounds(self) -> Interval:
        """An interval that contains all values."""
        return reduce(Interval.joined, self.items) if self.items else self.each

    @property
    def scalar(self) -> Interval:
        """The value of a tensor of one element."""
        return self.items[0] if self.items and len(self.items) == 1 else self.each

    @property
    def length(self) -> int | None:
        """The number of elements, if it does not depend on the sizes of the inputs."""
        if self.items is not None:
            return len(self.items)
        if self.dims is None or any(dim.constant is None for dim in self.dims):
            return None
        return int(product(dim.exact or ZERO for dim in self.dims).constant or 0)

    def shape(self) -> Dims:
        """Return the sizes.

        Raises:
            UnboundedError: the rank is unknown.
        """
        if self.dims is None:
            raise UnboundedError("the rank of an input comes from values")
        return self.dims

    def listed(self) -> tuple[Interval, ...] | None:
        """Return an interval for each value, or None if their number is unknown or large."""
        if self.items is not None:
            return self.items
        length = self.length
        return None if length is None or length > ITEMS else (self.each,) * length

    def grid(self) -> npt.NDArray[Any] | None:
        """Return the intervals of the values in the tensor's shape, or None if they or the shape are unknown."""
        if self.items is None or self.dims is None or any(dim.constant is None for dim in self.dims):
            return None
        shape = [int(dim.constant or 0) for dim in self.dims]
        found = np.empty(len(self.items), object)
        found[:] = self.items
        return found.reshape(shape)

    def forgotten(self) -> Tensor:
        """Return the tensor without knowledge of its values."""
        return Tensor(self.kind, self.dims, self.count, None, limits(self.kind), self.text)


def limits(kind: int) -> Interval:
    """Return the values of a datatype; unknown for those that are too wide to bound a size."""
    if kind not in _LIMITS:
        return Interval()
    low, high = _LIMITS[kind]
    return Interval(Poly.of(low), Poly.of(high))


def settled(value: Interval, kind: int) -> Interval:
    """Return where the result of an addition or multiplication is, given the exact one: integers may wrap around.

    So do integers of 64 bits if an end is unknown, and floating-point numbers are rounded and may become NaN.
    """
    if kind not in INTEGERS:
        return _rounded(value, kind)
    least, most = _ENDS[kind]
    if value.low is not None and value.high is not None and value.low.at_least(least):
        if value.high.at_most(most):
            return value
        if kind not in _LIMITS:
            return Interval(None, value.high)  # what wraps around becomes smaller
    return limits(kind)


def fits(kind: int, wider: int) -> bool:
    """Return whether all values of an integer type are values of another."""
    if kind not in _ENDS or wider not in _ENDS:
        return False
    return _ENDS[wider][0] <= _ENDS[kind][0] and _ENDS[kind][1] <= _ENDS[wider][1]


def definite(value: Interval, kind: int) -> Interval:
    """Return the values of a choice between values: NaN is chosen unless all floating-point numbers have bounds."""
    return value if kind in INTEGERS or (value.low is not None and value.high is not None) else Interval()


def _rounded(value: Interval, kind: int) -> Interval:
    if kind not in _ROUNDING or value.low is None or value.high is None:
        return Interval()
    error, most = _ROUNDING[kind]
    if not (value.low.at_least(-most) and value.high.at_most(most)):
        return Interval()
    if value.constant is not None and abs(value.constant) < 1 << 20 and value.constant.denominator in (1, 2, 4):
        return value  # such numbers are exact
    return Interval(value.low.scaled(1 - error), value.high.scaled(1 + error)) if value.non_negative else Interval()


def broadcast(tensors: Sequence[Tensor]) -> tuple[Dims | None, Poly]:
    """Return the dimensions and a bound of the count of tensors that are broadcast against each other."""
    large = [tensor for tensor in tensors if tensor.count != ONE]
    shapes = [tensor.dims for tensor in tensors if tensor.dims is not None]
    if len(shapes) < len(tensors):
        return None, product(tensor.count for tensor in large)
    rank = max(map(len, shapes), default=0)
    columns = zip(*((Interval.exactly(1),) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    dims = tuple(reduce(stretched, column) for column in columns)
    if not large:
        return dims, ONE
    # Equal intervals are not equal sizes.
    same = all(tensor.dims == large[0].dims for tensor in large[1:])
    if same and (len(large) == 1 or all(dim.exact is not None for dim in large[0].dims or ())):
        return dims, reduce(lambda one, two: two if one.covers(two) else one, [tensor.count for tensor in large])
    return dims, product(dim.high or ZERO for dim in dims)


def stretched(one: Interval, two: Interval) -> Interval:
    """Return the size of two dimensions that are broadcast against each other."""
    if one == two:
        return one
    for first, second in ((one, two), (two, one)):
        if first.constant == Fraction(1):
            return second
    for first, second in ((one, two), (two, one)):
        if first.constant is not None:
            return first  # the other is 1 or equal
        # Where the other is 1, or this is, both are 1.
        if first.exact is not None and second.positive and second.high is not None and first.exact.covers(second.high):
            return first
    return one.most(two) if one.positive and two.positive else one.joined(two)
