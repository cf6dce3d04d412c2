"""Operators that compute each element from the elements at the same place; inputs are broadcast."""

from __future__ import annotations

from collections.abc import Callable

from ingot.bounds.abstract import (
    BOOL,
    FLOAT,
    INT64,
    INTEGERS,
    ROUNDED,
    Tensor,
    UnboundedError,
    broadcast,
    definite,
    fits,
    limits,
    settled,
)
from ingot.bounds.derived import quotient
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, Rule, refuse_empty
from ingot.bounds.poly import ONE, ZERO, Poly

Combine = Callable[..., Interval]

_WITHOUT_TRAP = frozenset((FLOAT, 2, 3, 4, 5, 10, 11, 12, 13, 16))


def same(op: Op) -> list[Tensor]:
    """All outputs have the first input's shape and type."""
    return [op[0].forgotten()] * op.outputs


def never_empty(op: Op) -> list[Tensor]:
    """As :func:`same`, for kernels that end the process where an input is empty."""
    for tensor in op.given:
        refuse_empty(tensor.shape())
    return same(op)


def shaped(kind: int) -> Rule:
    """Return a rule for outputs of the broadcast shape and of an element type."""

    def rule(op: Op) -> list[Tensor]:
        dims, count = broadcast(op.given)
        return [Tensor(kind, dims, count, None, limits(kind))]

    return rule


def quantized(op: Op) -> list[Tensor]:
    """QLinearAdd and QLinearMul: inputs 0 and 3 are broadcast, the others are scales and zero points."""
    dims, count = broadcast((op[0], op[3]))
    return [Tensor(op[0].kind, dims, count, None, limits(op[0].kind))]


def combined(combine: Combine, kind: int | None = None, *, computes: bool = False) -> Rule:
    """Return a rule that finds the intervals of the values, where they are known, by ``combine``.

    ``computes`` is whether the operator computes values, which may overflow, and does not only choose or compare.
    """

    def rule(op: Op) -> list[Tensor]:
        tensors = op.given
        result = op[0].kind if kind is None else kind
        settle = settled if computes else definite

        def found_in(*values: Interval) -> Interval:
            known = op[0].kind in INTEGERS or all(value.low is not None and value.high is not None for value in values)
            return settle(combine(*values), result) if known else limits(result)

        dims, count = broadcast(tensors)
        lists = [tensor.listed() for tensor in tensors]
        length = max((len(found) for found in lists if found is not None), default=0)
        items = None
        if all(found is not None and len(found) in (1, length) for found in lists) and count == Poly.of(length):
            rows = zip(*(found if len(found) == length else found * length for found in lists if found), strict=True)
            items = tuple(found_in(*row) for row in rows)
        each = found_in(*(tensor.bounds for tensor in tensors)) if result in INTEGERS else Interval()
        return [Tensor(result, dims, count, items, each)]

    return rule


def cast(op: Op) -> list[Tensor]:
    kind = op[1].kind if op.node.operator == "CastLike" else op.integer("to")
    source = op[0]
    if kind not in INTEGERS and kind not in (FLOAT, 10, 11, 16):
        return [Tensor(kind, source.dims, source.count)]

    def converted(value: Interval) -> Interval:
        if fits(source.kind, kind):
            return value
        exact = value.constant
        if source.kind not in INTEGERS and kind in INTEGERS and (exact is None or exact.denominator > 1):
            if value.high is None or not value.non_negative:
                return limits(kind)
            value = Interval(ZERO, value.high.scaled(ROUNDED) + ONE)
        return limits(BOOL) if kind == BOOL else settled(value, kind)

    items = None if source.items is None else tuple(map(converted, source.items))
    each = converted(source.each) if source.kind in INTEGERS else limits(kind)
    return [Tensor(kind, source.dims, source.count, items, each)]


def recast(op: Op) -> list[Tensor]:
    """BitCast: the same bits, of another type of the same width."""
    return [Tensor(op.integer("to"), op[0].dims, op[0].count, None, limits(op.integer("to")))]


def divided(op: Op) -> list[Tensor]:
    """Integer division; ONNX Runtime's traps, and so ends the process, where the quotient overflows."""
    if op[0].kind not in _WITHOUT_TRAP and not _cannot_trap(op):
        raise UnboundedError(
            "its divisor may be -1 and its dividend the least integer, which ends the process; export again, which "
            "guards the division, or declare the values' range: --input 'NAME:int64[...]=1..1000'"
        )
    whole = op[0].kind in INTEGERS
    return combined(lambda one, two: one.divided(two, rounded=whole), computes=not whole)(op)


def _cannot_trap(op: Op) -> bool:
    dividend, divisor = op[0].bounds, op[1]
    values = divisor.items or (divisor.each,)
    if all(_is_not_minus_one(value) for value in values):
        return True
    least = Poly.of(-(1 << (63 if op[0].kind == INT64 else 31)))
    if dividend.low is not None and dividend.low != least and dividend.low.covers(least):
        return True
    return _is_guard(op)


def _is_not_minus_one(value: Interval) -> bool:
    if value.low is not None and value.low.covers(ZERO):
        return True
    return value.high is not None and Poly.of(-2).covers(value.high)


def _is_guard(op: Op) -> bool:
    """Return whether the divisor is Where(Equal(b, -1), 1, b), as export's rule ``guarded-division`` writes it."""
    choice = op.maker(op.node.inputs[1])
    if choice is None or choice.operator != "Where":
        return False
    condition, one, divisor = choice.inputs
    test = op.maker(condition)
    if test is None or test.operator != "Equal" or divisor not in test.inputs:
        return False
    other = test.inputs[1 - test.inputs.index(divisor)]
    instead, compared = op.tensor(one), op.tensor(other)
    if instead is None or compared is None:
        return False
    return compared.bounds.constant == -1 and _is_not_minus_one(instead.bounds)


def equal(one: Interval, two: Interval) -> Interval:
    """Return 1 if the values are certainly equal, 0 if they certainly differ, and otherwise both."""
    if one.exact is not None and one.exact == two.exact:
        return Interval.exactly(1)
    apart = Interval.exactly(1) in (less(one, two), less(two, one))
    return Interval.exactly(0) if apart else limits(BOOL)


def less(one: Interval, two: Interval) -> Interval:
    """Return 1 if the first value is certainly less, 0 if it is certainly not, and otherwise both."""
    if one.high is not None and two.low is not None and two.low.covers(one.high + ONE):
        return Interval.exactly(1)
    if one.low is not None and two.high is not None and one.low.covers(two.high):
        return Interval.exactly(0)
    return limits(BOOL)


def remainder(op: Op) -> list[Tensor]:
    """Return the rest of sizes exactly: graphs divide a size n by k as ``(n - n mod k) / k``, rounded down."""
    floored = not op.integer("fmod")

    def rest(one: Interval, two: Interval) -> Interval:
        by = two.constant
        if one.exact is not None and by is not None and by >= 1 and (floored or one.non_negative):
            whole = quotient(one.exact, int(by)) if op[0].kind in INTEGERS else None
            if whole is not None:
                return Interval.exactly(one.exact - whole.scaled(by))
        if two.low is not None and two.low.covers(ONE) and two.high is not None:
            return Interval(ZERO if one.non_negative else -two.high, two.high)
        return Interval()

    return combined(rest)(op)


def clipped(op: Op) -> list[Tensor]:
    low = op[1].scalar if op.get(1) is not None else Interval()
    high = op[2].scalar if op.get(2) is not None else Interval()
    source = op[0]

    def clip(value: Interval) -> Interval:
        given = [value, *(end for end, index in ((low, 1), (high, 2)) if op.get(index) is not None)]
        if source.kind not in INTEGERS and any(end.low is None or end.high is None for end in given):
            return Interval()  # it may be NaN
        value = value.most(low) if op.get(1) is not None else value
        return value.least(high) if op.get(2) is not None else value

    items = None if source.items is None else tuple(map(clip, source.items))
    each = clip(source.each) if source.kind in INTEGERS else Interval()
    return [Tensor(source.kind, source.dims, source.count, items, each)]


def chosen(op: Op) -> list[Tensor]:
    """Where: the values are those of the second or the third input."""
    dims, count = broadcast(op.given)
    lists = [op[1].listed(), op[2].listed()]
    length = max((len(found) for found in lists if found is not None), default=0)
    items = None
    if all(found is not None and len(found) in (1, length) for found in lists) and count == Poly.of(length):
        one, two = ((found or ()) * (length if len(found or ()) < length else 1) for found in lists)
        items = tuple(first.joined(second) for first, second in zip(one, two, strict=True))
    return [Tensor(op[1].kind, dims, count, items, op[1].bounds.joined(op[2].bounds))]
