"""FX graphs in the form of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from ingot.export.explain import places
from ingot.export.program import Program, user_path
from ingot.export.report import GraphView, Node, named
from ingot.export.rewrite.passes.fx_graph import arguments
from ingot.export.torch_internals import OpOverload, pytree, schema
from ingot.report.text import one_line

_LONGEST_ATTRIBUTE = 80
# Torch sets it on nodes that it inserts itself.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"


def of_program(title: str, program: Program) -> GraphView:
    """Show the operations of a captured program, with the user's names of inputs, weights and sizes."""
    signature = program.exported.graph_signature
    found = {node.name: node for node in program.exported.graph.nodes}
    taken = {node.name for node in found.values() if node.op in ("call_function", "call_module")}
    inputs = dict(zip(map(str, signature.user_inputs), program.signature.inputs, strict=True))
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    names = {name: spec.name for name, spec in inputs.items()}
    names |= {name: user_path(target) for name, target in targets.items()}
    names = {name: shown for name, shown in names.items() if shown not in taken}
    symbols = {}
    for name, spec in inputs.items():
        for size, dim in zip(found[name].meta["val"].shape, spec.shape, strict=True):
            if isinstance(dim, str):
                symbols[str(size)] = dim
    symbols = {size: dim for size, dim in symbols.items() if size.isidentifier()}
    nodes = tuple(_node(found[name], names, symbols) for name in found if name in taken)
    return GraphView(
        title=title,
        nodes=nodes,
        operators=dict(Counter(node.operator for node in nodes).most_common()),
        inputs={spec.name: str(spec).removeprefix(f"{spec.name}:") for spec in program.signature.inputs},
        outputs={
            spec.name: names.get(str(name), str(name))
            for spec, name in zip(program.signature.outputs, signature.user_outputs, strict=True)
        },
        weights={names.get(name, name): "".join(_type(found[name])) for name in targets if name in found},
        symbols=symbols,
    )


def _node(node: fx.Node, names: Mapping[str, str], symbols: Mapping[str, str]) -> Node:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    module = user_path(str(stack[-1][0])) if stack else ""
    place = places.of_node(node)
    dtype, shape = _type(node)
    return Node(
        name=node.name,
        operator=_target(node),
        inputs=tuple(names.get(item.name, item.name) for item in node.all_input_nodes),
        shape=named(shape, symbols),
        module="" if module == _NO_MODULE else module,
        source=place.short if place is not None else "",
        dtype=dtype,
        attributes=_attributes(node, symbols),
    )


def _type(node: fx.Node) -> tuple[str, str]:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "", ""
    return str(value.dtype).removeprefix("torch."), f"[{','.join(map(str, value.shape))}]"


def _attributes(node: fx.Node, symbols: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of a call that are not tensors, without those at their defaults."""
    defaults = {}
    if isinstance(node.target, OpOverload):
        defaults = {argument.name: argument.default_value for argument in schema(node.target).arguments}
    shown = {}
    for name, value in arguments(node).items():
        leaves = pytree.tree_leaves(value)
        if value is None or not leaves or all(isinstance(leaf, fx.Node) for leaf in leaves):
            continue
        if name not in defaults or not _same(value, defaults[name]):
            shown[name] = one_line(named(str(pytree.tree_map(_size, value)), symbols), _LONGEST_ATTRIBUTE)
    return shown


def _size(value: object) -> object:
    """Return the size that a node computes instead of the node, whose name changes with each capture."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.SymInt) else value


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and not isinstance(value, fx.Node) and bool(value == default)


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    is_python = isinstance(node.target, BuiltinFunctionType)
    return f"operator.{node.target.__name__}" if is_python else str(node.target)
