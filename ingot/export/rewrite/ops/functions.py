"""Custom operators in ONNX: a node in the operator's domain, and a local function that defines it.

Any ONNX runtime can run the function. ONNX Runtime prefers a kernel of the same domain and name, such as one from a
library of custom operators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from onnxscript import evaluator
from onnxscript.values import OnnxFunction
from torch import fx

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.rewrite.ops.definition import Op, defined, operators
from ingot.export.rewrite.ops.tracing import trace
from ingot.export.torch_internals import FakeTensorMode, OpOverload, pytree, shape_guards
from ingot.tensors import DType

Translate = Callable[[torch.export.ExportedProgram, Sequence[str], str], ir.Model]
"""Translates a program to ONNX, given the names of its inputs and a name of the program for errors."""

# The size of a dimension that depends on values, while a body is traced; other dimensions hardly ever have it.
_UNKNOWN_SIZE = 29
_SIZE = r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]"
_SAME_SIZE = re.compile(rf"{_SIZE} == {_SIZE}")


def translations() -> dict[OpOverload, Callable[..., Any]]:
    """Return the ONNX translation of each operator that this process has defined."""
    return {op.overload: _translation(op) for op in operators()}


def _translation(op: Op[Any, Any]) -> Callable[..., Any]:
    domain, _, name = (op.native or op.name).partition("::")

    def translate(*args: Any, **kwargs: Any) -> Any:
        inputs: list[ir.Value | None] = []
        attributes: dict[str, Any] = {}
        for parameter, argument in op.bind(args, kwargs).items():
            if parameter in op.tensors:
                # A kernel reads its inputs by position, so an omitted one leaves a gap; a function has no gaps.
                inputs += [item for item in pytree.tree_leaves(argument) if item is not None or op.native]
            elif any(isinstance(item, ir.Value) for item in pytree.tree_leaves(argument)):
                raise ExportError(
                    f"argument '{parameter}' of operator '{op.name}' is a size that changes, but an ONNX attribute is "
                    "fixed; let the operator read the size from a tensor"
                )
            elif argument is not None:
                attributes[op.attributes.get(parameter, parameter)] = _attribute(argument)
        node = ir.Node(
            domain, name, inputs, ir.convenience.convert_attributes(attributes), num_outputs=op.outputs, version=1
        )
        evaluator.default().nodes.append(node)  # type: ignore[attr-defined]  # the exporter's recorder
        return node.outputs[0] if op.outputs == 1 else node.outputs

    return translate


def _attribute(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return DType.parse(str(argument).removeprefix("torch.")).onnx
    return str(argument) if isinstance(argument, torch.device | torch.layout | torch.memory_format) else argument


class Functions:
    """The local functions of one ONNX model.

    Calls of one operator share a function if their bodies are the same in ONNX; others, such as for another value of
    ``eps``, have an overload each.

    Args:
        translate: translates bodies to ONNX.
    """

    def __init__(self, translate: Translate):
        self._translate = translate
        self._by_call: dict[Hashable, ir.Function] = {}
        self._by_body: dict[bytes, ir.Function] = {}
        self._checked: set[str] = set()

    def attach(self, model: ir.Model) -> None:
        """Add the functions that its nodes need to a model that the exporter made.

        Raises:
            ExportError: an operator fails its check, or its body has no ONNX form.
        """
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            called = node.meta.get("node")
            if not isinstance(called, fx.Node) or (op := defined(called.target)) is None:
                continue
            if op.example and op.name not in self._checked:
                op.check()
                self._checked.add(op.name)
            if not op.native:
                node.overload = self._function(op, called, node).overload
        for function in self._by_body.values():
            model.functions[function.identifier()] = function
            if "" in function.opset_imports:  # a script may be written for another opset, but both must be the same
                function.opset_imports[""] = model.opset_imports[""]
            for domain, version in function.opset_imports.items():
                model.opset_imports.setdefault(domain, version)

    def _function(self, op: Op[Any, Any], call: fx.Node, node: ir.Node) -> ir.Function:
        arguments = op.bind(call.args, call.kwargs)
        key = (op.name, repr(pytree.tree_map_only(fx.Node, _described, arguments)))
        if key not in self._by_call:
            function = self._from_body(op, arguments, node) if op.onnx is None else self._from_script(op.name, op.onnx)
            self._by_call[key] = self._shared(function)
        return self._by_call[key]

    def _from_body(self, op: Op[Any, Any], arguments: Mapping[str, Any], node: ir.Node) -> ir.Function:
        subject = f"the body of operator '{op.name}'"
        sizes = [_value(item).shape for item in _nodes(arguments)]
        dynamic = [[axis for axis, size in enumerate(shape) if not isinstance(size, int)] for shape in sizes]
        with FakeTensorMode():
            tensors = pytree.tree_map_only(fx.Node, _empty, arguments)

        def failed(error: Exception) -> str:
            reason = foreign.one_line(error, 300)
            return f"{subject} cannot be captured; state its ONNX form in its definition (onnx= or native=): {reason}"

        with foreign.reported_as(ExportError, failed):
            exported = trace(op.body, tensors, dynamic)
        decided = [code for code in shape_guards(exported) if not _holds_here(code, sizes)]
        if decided:
            raise ExportError(
                f"{subject} branches on sizes, of which a capture records only one side; state its ONNX form in its "
                f"definition (onnx= or native=): {'; '.join(decided)}"
            )
        model = self._translate(exported, _input_names(arguments), subject)
        # ONNX Runtime 1.31 does not distinguish overloads inside functions.
        Functions(self._translate).attach(model)
        InlinePass()(model)
        attributes = [ir.Attr(item.name, item.type, None) for item in node.attributes.values()]
        return _as_function(op.name, model.graph, attributes)

    def _from_script(self, name: str, script: OnnxFunction[..., Any]) -> ir.Function:
        for helper in script.function_ir.get_called_functions().values():
            self._shared(ir.from_proto(helper.to_function_proto()))
        function: ir.Function = ir.from_proto(script.to_function_proto())
        function.domain, _, function.name = name.partition("::")
        return function

    def _shared(self, function: ir.Function) -> ir.Function:
        """Return an equal function that exists already, or this one as a further overload of its name."""
        body = ir.serde.serialize_function(function).SerializeToString(deterministic=True)
        if body not in self._by_body:
            names = [(item.domain, item.name) for item in self._by_body.values()]
            if count := names.count((function.domain, function.name)):
                function.overload = str(count + 1)
            self._by_body[body] = function
        return self._by_body[body]


def _holds_here(guard: str, sizes: Sequence[Sequence[Any]]) -> bool:
    """Return whether a guard only states that two sizes are equal, which they are in this call."""
    match = _SAME_SIZE.fullmatch(guard)
    if match is None:
        return False
    first, axis, second, other = map(int, match.groups())
    return str(sizes[first][axis]) == str(sizes[second][other])


def _as_function(name: str, graph: ir.Graph, attributes: Sequence[ir.Attr]) -> ir.Function:
    """Make a function of a graph, without the sizes and names of the call that it was traced for."""
    for value in list(graph.initializers.values()):  # functions have none
        constant = ir.node("Constant", [], {"value": value.const_value})
        value.replace_all_uses_with(constant.outputs[0], replace_graph_outputs=True)
        graph.insert_before(graph[0], constant)
    graph.initializers.clear()
    for index, output in enumerate(graph.outputs):
        if output in graph.inputs:  # the body returns an input
            graph.append(same := ir.node("Identity", [output]))
            graph.outputs[index] = same.outputs[0]
    values = [output for node in ir.traversal.RecursiveGraphIterator(graph) for output in node.outputs]
    for index, value in enumerate(values):
        value.name = f"value_{index}"
    for value in (*graph.inputs, *values):
        value.type = value.shape = None
        value.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.name = node.doc_string = None
        node.metadata_props.clear()
    domain, _, name = name.partition("::")
    return ir.Function(domain, name, graph=graph, attributes=attributes)


def _nodes(arguments: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node)]


def _input_names(arguments: Mapping[str, Any]) -> list[str]:
    names = []
    for name, argument in arguments.items():
        if isinstance(argument, fx.Node):
            names.append(name)
        else:
            names += [f"{name}_{index}" for index, _ in enumerate(_nodes(argument))]
    return names


def _value(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _described(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{value.dtype}{[str(size) for size in value.shape]}" if isinstance(value, torch.Tensor) else str(value)


def _sizes(value: torch.Tensor) -> list[int]:
    """Return the sizes of a tensor while the model was captured."""
    return [
        size if isinstance(size, int) else size.node.hint if size.node.has_hint() else _UNKNOWN_SIZE
        for size in value.shape
    ]


def _empty(node: fx.Node) -> torch.Tensor:
    value = _value(node)
    return torch.empty(_sizes(value), dtype=value.dtype, device=value.device)
