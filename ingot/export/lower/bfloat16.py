"""Graphs with bfloat16, for which ONNX Runtime has few kernels on CPUs: operators run in single precision."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.convenience import replace_all_uses_with

# The exporter's record of the operator that a node is a part of.
_SOURCE = "pkg.torch.onnx.fx_node"
_NARROW = ir.DataType.BFLOAT16
_WIDE = ir.DataType.FLOAT
# Operators that only move values.
_MOVING = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Gather", "Concat", "Shape", "Size"}


def run_in_single(model: ir.Model) -> None:
    """Insert conversions around operators on bfloat16, so that each result is rounded as in PyTorch.

    PyTorch's kernels also compute in single precision, round once, and some accept operands of both types at once.
    """
    _widen(model.graph, {value for value in _given(model.graph) if value.dtype is _NARROW}, model.opset_imports)


def _given(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values()]


def _widen(graph: ir.Graph, narrow: set[ir.Value], opsets: dict[str, int]) -> None:
    """Convert one graph; ``narrow`` are the values in bfloat16 so far, also those of the graphs around it."""
    narrow |= {value for value in _given(graph) if value.dtype is _NARROW}
    wide: dict[ir.Value, ir.Value] = {}
    unrounded: set[ir.Value] = set()  # in single precision, within forms whose results are in bfloat16
    for node in list(graph):
        for attribute in node.attributes.values():
            for inner in [attribute.value] if attribute.type is ir.AttributeType.GRAPH else []:
                _widen(inner, narrow, opsets)
        made = _made(node, narrow | unrounded, opsets)
        if _accepts_both(node, unrounded):
            narrow |= made
            continue
        for place, value in enumerate(node.inputs):
            if value in narrow and value is not None:
                if value not in wide:
                    cast = _cast(value, _WIDE)
                    graph.insert_before(node, cast)
                    wide[value] = cast.outputs[0]
                node.replace_input_with(place, wide[value])
        for value in made:
            if _is_intermediate(node, value):
                value.dtype = _WIDE
                unrounded.add(value)
            else:
                narrow.add(_rounded(graph, node, value))


def _accepts_both(node: ir.Node, unrounded: set[ir.Value]) -> bool:
    """Return whether a node's results are in bfloat16 as it is, without a conversion."""
    if node.op_type == "CastLike":
        return node.inputs[1] not in unrounded
    if node.op_type in _MOVING:
        return unrounded.isdisjoint(node.inputs)
    return node.op_type in ("Cast", "Constant") or _is_opaque(node)


def _is_intermediate(node: ir.Node, value: ir.Value) -> bool:
    """Return whether a value is used only within the form of one operator, whose kernel does not round it."""
    source = node.metadata_props.get(_SOURCE)
    users = [user for user, _ in value.uses()]
    return (
        bool(source and users)
        and not value.is_graph_output()
        and all(user.metadata_props.get(_SOURCE) == source and user.graph is node.graph for user in users)
        and not any(map(_is_opaque, users))
    )


def _is_opaque(node: ir.Node) -> bool:
    """Return whether a node's inputs keep their datatype, as its own graphs or its operator may depend on it."""
    return bool(node.domain) or _has_graphs(node)


def _made(node: ir.Node, narrow: set[ir.Value], opsets: dict[str, int]) -> set[ir.Value]:
    """Return the outputs in bfloat16, if the values ``narrow`` are."""
    number = node.attributes.get("value")
    if node.op_type == "ConstantOfShape" and number is not None and number.value.dtype is _NARROW:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(number.value.numpy().astype("float32")))
        return set(node.outputs)
    if node.op_type in ("Constant", "Cast"):
        kind = number.value.dtype if number is not None else None
        target = node.attributes.get("to")
        return set(node.outputs) if _NARROW in (kind, target and ir.DataType(target.value)) else set()
    if node.op_type == "CastLike":
        return set(node.outputs) if node.inputs[1] in narrow else set()
    of_sequence = node.op_type == "SequenceAt"  # sequences have no bfloat16
    if of_sequence or node.domain or not onnx.defs.has(node.op_type, opsets.get("", 1), "") or _has_graphs(node):
        return {value for value in node.outputs if value.dtype is _NARROW}
    schema = onnx.defs.get_schema(node.op_type, opsets.get("", 1), "")
    last = len(schema.inputs) - 1  # a variadic input
    kinds = {schema.inputs[min(at, last)].type_str for at, value in enumerate(node.inputs) if value in narrow}
    last = len(schema.outputs) - 1
    return {value for at, value in enumerate(node.outputs) if schema.outputs[min(at, last)].type_str in kinds}


def _has_graphs(node: ir.Node) -> bool:
    return any(attribute.type is ir.AttributeType.GRAPH for attribute in node.attributes.values())


def _cast(value: ir.Value, kind: ir.DataType) -> ir.Node:
    made = ir.node("Cast", [value], {"to": kind})
    made.outputs[0].dtype, made.outputs[0].shape = kind, value.shape
    return made


def _rounded(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Value:
    """Convert an output that is now in single precision back to bfloat16; the result has its name and place."""
    cast = _cast(value, _NARROW)
    (made,) = cast.outputs
    replace_all_uses_with(value, made, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    graph.insert_after(node, cast)
    made.name, value.name = value.name, f"{value.name}_single"
    value.dtype = _WIDE
    return made
