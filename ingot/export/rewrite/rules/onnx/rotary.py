"""Rotary position embedding by halves, as Llama has it, becomes one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, constant, dims, producer, same, scalar

# The operator set that has an operator for it.
_OPSET = 23


class _Rotary:
    """``x * cos + concat(-x2, x1) * sin``; x1 and x2 are the halves of the last axis of x [B, H, S, D]."""

    def __init__(self, opset: int, split: bool):
        self._opset = opset
        self._split = split

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        if self._split:
            left, right = op.Split(x, _allow_other_inputs=True, _outputs=["left", "right"])
        else:
            left = op.Slice(x, _allow_other_inputs=True, _outputs=["left"])
            right = op.Slice(x, _allow_other_inputs=True, _outputs=["right"])
        turned = op.Concat(op.Neg(right), left, axis=-1)
        return op.Add(op.Mul(x, cos), op.Mul(turned, sin))

    def check(self, context: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, left: ir.Value, right: ir.Value) -> bool:
        shape, angles = dims(x), dims(cos)
        if shape is None or len(shape) != 4 or angles is None or dims(sin) != angles or len(angles) not in (2, 3, 4):
            return False
        size = shape[-1]
        if not isinstance(size, int) or size % 2:
            return False
        batch, heads = (1, 1, *angles[:-2])[-2:]
        return (
            x.dtype is cos.dtype is sin.dtype is ir.DataType.FLOAT
            and _starts_at(left, 0, size // 2)
            and _starts_at(right, size // 2, size // 2)
            and same(size, angles[-1])
            and same(shape[2], angles[-2])
            and heads == 1
            and (batch == 1 or same(shape[0], batch))
            and _mirrored(cos)
            and _mirrored(sin)
        )

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **_: Any) -> Any:
        angles = dims(cos) or ()
        half, batched = int(angles[-1] or 0) // 2, len(angles) == 4 and angles[0] != 1
        batch = op.Shape(x, start=0, end=1)

        def cache(value: ir.Value, shape: Sequence[int]) -> Any:  # [1 | B, 1, S, D] -> ..., D / 2]
            ints = (op.Constant(value_ints=[item]) for item in (0, half, -1))
            return op.Reshape(op.Slice(value, *ints), op.Constant(value_ints=[*shape, half]))

        if self._opset >= _OPSET:
            ones = op.Concat(batch, op.Constant(value_ints=[1, 1]), axis=0)
            caches = [op.Expand(cache(value, (0 if batched else 1, -1)), ones) for value in (cos, sin)]  # [B, S, D / 2]
            return op.RotaryEmbedding(x, *caches)
        caches = [cache(value, (-1,)) for value in (cos, sin)]  # [S, D / 2] or [B * S, D / 2]
        positions = op.Constant(value_ints=[0])  # where the positions of every row begin
        if batched:
            rows = op.Squeeze(op.Shape(caches[0], start=0, end=1))
            count = op.Range(op.Constant(value_int=0), rows, op.Constant(value_int=1))
            positions = op.Reshape(count, op.Concat(batch, op.Constant(value_ints=[-1]), axis=0))  # [B, S]
        return op.RotaryEmbedding(x, positions, *caches, _domain="com.microsoft")


def _starts_at(part: ir.Value, start: int, size: int) -> bool:
    """Tell whether a value is ``size`` elements of the last of four axes, from ``start`` on."""
    node, shape = producer(part), dims(part)
    if shape is None or shape[-1] != size:
        return False
    if node.op_type == "Split":
        return node.attributes.get_int("axis", 0) in (3, -1) and size * (part.index() or 0) == start
    starts, _, axes, steps = (*(constant(value) for value in node.inputs[1:]), None, None)[:4]
    return (
        starts is not None
        and starts.tolist() == [start]
        and axes is not None
        and axes.tolist() in ([3], [-1])
        and (steps is None or steps.tolist() == [1])
    )


def _mirrored(value: ir.Value) -> bool:
    """Tell whether the halves of the last axis are equal; kernels read only the first."""
    array, node = constant(value), value.producer()
    if array is not None:
        left, right = np.split(array, 2, axis=-1)
        return bool(np.array_equal(left, right))
    if node is None or any(item is None for item in node.inputs):
        return False
    inputs = [item for item in node.inputs if item is not None]
    if node.op_type == "Concat":
        axis = node.attributes["axis"].as_int()
        return len(inputs) == 2 and inputs[0] is inputs[1] and axis in (-1, len(dims(value) or ()) - 1)
    if node.op_type in ("Mul", "Div") and scalar(inputs[1]) is None:
        return scalar(inputs[0]) is not None and _mirrored(inputs[1])
    known = ("Cos", "Sin", "Cast", "Unsqueeze", "Expand", "Reshape", "Mul", "Div")
    if node.op_type not in known and not _takes_rows(node):
        return False
    return same(_last(inputs[0]), _last(value)) and _mirrored(inputs[0])


def _takes_rows(node: ir.Node) -> bool:
    """Tell whether a node picks from any axis but the last."""
    if node.op_type == "Gather":
        axes = [node.attributes.get_int("axis", 0)]
    elif node.op_type == "Slice" and len(node.inputs) > 3 and (array := constant(node.inputs[3])) is not None:
        axes = array.tolist()
    else:
        return False
    return not {-1, len(dims(node.inputs[0]) or ()) - 1} & set(axes)


def _last(value: ir.Value) -> int | str | None:
    return (dims(value) or (None,))[-1]


class Rotary(PatternRule):
    """Finds rotary embedding by halves.

    From opset 23 on it becomes ``RotaryEmbedding``, before that ONNX Runtime's own operator of that name.
    """

    name = "rotary"
    default = False
    anchors = ("Neg",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_Rotary(opset, split=False), _Rotary(opset, split=True))
