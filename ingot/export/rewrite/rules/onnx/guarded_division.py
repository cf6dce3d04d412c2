"""A guard for integer divisions that would end the process."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ingot.export.rewrite.passes.onnx import OnnxRule
from ingot.tensors import Array

# ONNX Runtime 1.32 divides smaller integers in 32 bits, where the quotient fits, and unsigned ones cannot overflow.
_TRAPPING: dict[ir.DataType, np.dtype[Any]] = {
    ir.DataType.INT32: np.dtype(np.int32),
    ir.DataType.INT64: np.dtype(np.int64),
}
# The first operator set with Where.
_OPSET = 9
# Operators whose integer results are never negative, whatever their inputs.
_COUNTS = ("Shape", "Size", "NonZero")
# Operators whose results are values of their first input, or of all inputs.
_PASSING = ("Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_COMBINING = ("Concat", "Max", "Min")


class GuardedDivision(OnnxRule):
    """Makes the least integer divided by -1 wrap around to itself, as in numpy and in ONNX Runtime's ``Mod``.

    The processor traps on this quotient, which it cannot represent, and the signal ends the process. Divisions whose
    divisor is a constant other than -1, or of which one operand is known not to be negative, stay as they are. So do
    those of unknown datatype, and those in bodies of local functions.
    """

    name = "guarded-division"
    remark = "the least integer divided by -1 is itself, where ONNX Runtime's Div ends the process"

    def rewrite(self, model: ir.Model) -> int:
        divisions = [node for node in model.graph.all_nodes() if node.op_type == "Div" and node.domain == ""]
        if not divisions or model.opset_imports.get("", 0) < _OPSET:
            return 0
        if any(_dtype(node) is None for node in divisions):
            common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
        found = [node for node in divisions if _may_trap(node)]
        for node in found:
            _guard(node)
        return len(found)


def _constant(value: ir.Value | None) -> Array | None:
    known = None if value is None else ir.convenience.get_const_tensor(value)
    return None if known is None else known.numpy()


def _dtype(node: ir.Node) -> ir.DataType | None:
    return next((value.dtype for value in (*node.inputs, *node.outputs) if value is not None and value.dtype), None)


def _may_trap(node: ir.Node) -> bool:
    dtype, (dividend, divisor) = _dtype(node), node.inputs
    if dtype not in _TRAPPING or _is_guarded(divisor) or _is_natural(dividend) or _is_natural(divisor):
        return False
    least, by = _constant(dividend), _constant(divisor)
    if least is not None and not np.isin(least, np.iinfo(_TRAPPING[dtype]).min).any():
        return False
    return by is None or bool((by == -1).any())


def _is_guarded(divisor: ir.Value | None) -> bool:
    """Return whether a divisor is ``Where(Equal(x, -1), c, x)`` with a constant that is not -1."""
    chosen = None if divisor is None else divisor.producer()
    if chosen is None or chosen.op_type != "Where":
        return False
    condition, instead, otherwise = chosen.inputs
    equal = None if condition is None else condition.producer()
    other = _constant(instead)
    if equal is None or equal.op_type != "Equal" or other is None or (other == -1).any():
        return False
    left, right = equal.inputs
    compared = _constant(right if left is otherwise else left)
    return otherwise in (left, right) and compared is not None and bool((compared == -1).all())


def _is_natural(value: ir.Value | None) -> bool:
    """Return whether a value is known not to be negative."""
    if value is None:
        return False
    known = _constant(value)
    if known is not None:
        return bool((known >= 0).all())
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type in _COMBINING:
        return all(map(_is_natural, node.inputs))
    return node.op_type in _COUNTS or (node.op_type in _PASSING and _is_natural(node.inputs[0]))


def _guard(node: ir.Node) -> None:
    """Replace a division a / b by a / ``Where(b == -1, 1, b)`` times ``Where(b == -1, -1, 1)``.

    With a divisor of few elements, only the division and the product are as large as the result: measured as 1.4 times
    the time of ``Div`` alone, and 2.7 times if the divisor is as large.
    """
    dtype, graph, (dividend, divisor), result = _dtype(node), node.graph, node.inputs, node.outputs[0]
    if dtype is None or graph is None:
        return
    minus, one = (
        ir.node("Constant", [], {"value": ir.tensor(np.array(number, _TRAPPING[dtype]))}) for number in (-1, 1)
    )
    reverses = ir.node("Equal", [divisor, minus.outputs[0]])
    safe = ir.node("Where", [reverses.outputs[0], one.outputs[0], divisor])
    sign = ir.node("Where", [reverses.outputs[0], minus.outputs[0], one.outputs[0]])
    quotient = ir.node("Div", [dividend, safe.outputs[0]])
    signed = ir.node("Mul", [quotient.outputs[0], sign.outputs[0]])
    made = [minus, one, reverses, safe, sign, quotient, signed]
    for new, like in ((reverses, divisor), (safe, divisor), (sign, divisor), (quotient, result), (signed, result)):
        new.outputs[0].dtype = ir.DataType.BOOL if new is reverses else dtype
        new.outputs[0].shape = like.shape.copy() if like is not None and like.shape is not None else None
    for new in made:
        new.metadata_props.update(node.metadata_props)  # where in the user's model it comes from
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, [result], signed.outputs)
