"""Operators that combine the elements along axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from ingot.bounds.abstract import INT64, INTEGERS, Tensor, UnboundedError, settled
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, Rule, sizes
from ingot.bounds.poly import ONE, ZERO

_Fold = Callable[[Interval, Interval], Interval]


def reduced(fold: _Fold | None = None) -> Rule:
    """Return a rule for Reduce operators; ``fold`` combines two values, where their intervals are of use."""

    def rule(op: Op) -> list[Tensor]:
        source = op[0]
        dims = source.shape()
        axes = op.values(1, "axes")
        keep = bool(op.integer("keepdims", 1))
        if op.given_at(1, "axes") and (axes is None or any(axis.constant is None for axis in axes)):
            if not keep:
                raise UnboundedError("its axes come from values")
            return [Tensor.of(source.kind, [Interval(ZERO, high.upper(ONE)) for high in sizes(dims)])]
        if not axes:
            chosen = set() if op.integer("noop_with_empty_axes") else set(range(len(dims)))
        else:
            chosen = {int(axis.constant or 0) % max(1, len(dims)) for axis in axes}
        left = [Interval.exactly(1) if axis in chosen else dim for axis, dim in enumerate(dims)]
        if not keep:
            left = [dim for axis, dim in enumerate(dims) if axis not in chosen]
        whole = fold is not None and len(dims) == 1 and chosen and source.kind in INTEGERS
        values = source.listed() if whole else None
        items = None
        if values and fold is not None:
            found = reduce(fold, values)
            items = [found if fold in (Interval.most, Interval.least) else settled(found, source.kind)]
        selects = fold in (Interval.most, Interval.least) and source.kind in INTEGERS
        # The largest value of an empty tensor is the least of its type.
        same = source.each if selects and all(dim.positive for dim in dims) else None
        return [Tensor.of(source.kind, left, items=items, each=same)]

    return rule


def position(op: Op) -> list[Tensor]:
    """ArgMax and ArgMin: the values are positions along the axis."""
    dims = list(op[0].shape())
    axis = op.axis(len(dims))
    places = Interval.up_to(dims[axis].high or ZERO)
    left = [Interval.exactly(1)] if op.integer("keepdims", 1) else []
    return [Tensor.of(INT64, [*dims[:axis], *left, *dims[axis + 1 :]], each=places)]


def loss(op: Op) -> list[Tensor]:
    source = op[0]
    if op.text("reduction", "mean") == "none":
        rows = (source.shape()[0], *source.shape()[2:])
        # ONNX Runtime does not compare the sizes of scores and targets.
        found = [one.joined(two) for one, two in zip(rows, op[1].shape(), strict=True)]
        first = Tensor.of(source.kind, found)
    else:
        first = Tensor.of(source.kind, [])
    return [first, source.forgotten()][: op.outputs]


def inverse(op: Op) -> list[Tensor]:
    """Inverse: ONNX Runtime reads and writes as if all matrices were square."""
    *_, rows, columns = op[0].shape()
    if rows.exact is None or rows != columns:
        raise UnboundedError("its matrices may not be square, which ends the process")
    return [op[0].forgotten()]


def determinants(op: Op) -> list[Tensor]:
    op.workspace = op[0].nbytes
    return [Tensor.of(op[0].kind, op[0].shape()[:-2])]
