"""Sigmoids whose small values matter.

ONNX Runtime's kernel is exact within 1e-7 of 1, so the sigmoid of -20 is 0 instead of 2e-9. Where a graph takes a
logarithm or a root of such a value, divides by it or sorts it, the formula takes the operator's place.
"""

from __future__ import annotations

import onnx_ir as ir

# Operators that make a difference between small values large, and those whose results differ as their inputs do.
_MAGNIFYING = {"Log", "Reciprocal", "Sqrt", "TopK", "ArgMax", "ArgMin", "LogSoftmax"}
_PASSING = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Clip",
    "Max",
    "Min",
    "Where",
    "Cast",
    "CastLike",
    "Neg",
    "Abs",
    "Identity",
    "ReduceSum",
    "ReduceProd",
    "ReduceMin",
    "ReduceMax",
    "CumSum",
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Concat",
    "Slice",
    "Split",
    "Gather",
    "GatherElements",
    "GatherND",
}


def keep_small(model: ir.Model) -> int:
    """Write ``1 / (1 + exp(-x))`` for each sigmoid whose small values matter, and return their number."""
    found = [node for node in model.graph.all_nodes() if _is_lost(node)]
    for node in found:
        _write_out(node)
    return len(found)


def _is_lost(node: ir.Node) -> bool:
    """Return whether a node is a sigmoid of a type with more digits than the kernel, and its small values matter."""
    if node.op_type != "Sigmoid" or node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return False
    waiting, seen = [node.outputs[0]], set[ir.Node]()
    while waiting:
        value = waiting.pop()
        for user, place in value.uses():
            if user.op_type in _MAGNIFYING or (user.op_type == "Div" and place == 1) or _is_root(user):
                return True
            if user.op_type in _PASSING and user not in seen:
                seen.add(user)
                waiting += user.outputs
    return False


def _is_root(node: ir.Node) -> bool:
    """Return whether a node may compute a power below 1."""
    if node.op_type != "Pow" or node.inputs[1] is None:
        return False
    exponent = ir.convenience.get_const_tensor(node.inputs[1])
    return exponent is None or bool((exponent.numpy() < 1).any())


def _write_out(node: ir.Node) -> None:
    x, result = node.inputs[0], node.outputs[0]
    if x is None or result.dtype is None or node.graph is None:  # never, after _is_lost
        return
    one = ir.node("Constant", [], {"value": ir.tensor(1.0, result.dtype)})
    negative = ir.node("Neg", [x])
    power = ir.node("Exp", negative.outputs)
    total = ir.node("Add", [power.outputs[0], one.outputs[0]])
    inverse = ir.node("Reciprocal", total.outputs)
    made = [one, negative, power, total, inverse]
    for new in made:
        new.outputs[0].dtype = result.dtype
        new.outputs[0].shape = result.shape if new is not one else ir.Shape([])
        new.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [result], inverse.outputs)
