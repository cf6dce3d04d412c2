"""Cut a captured program into parts: programs that run one after the other."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import free_symbols

from ingot.errors import ExportError, InvalidArgument
from ingot.export.program import Program
from ingot.export.torch_internals import pytree
from ingot.tensors import DType, Range, Shape, Signature, TensorSpec, symbols

Exported = torch.export.ExportedProgram
# Switching to another engine and back takes some 50 us, as much as about ten small operators in PyTorch.
_WORTH_A_PART = 8


@dataclass(frozen=True)
class Part:
    """One part of a program that was cut; ``special`` are the operators that made it a separate part, if any."""

    program: Program
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """The parts of a program in order, and the names of its outputs, in the order of its signature.

    An input of the program has the same name in the parts that read it. The name of a value between parts is a percent
    sign and the name of its node.
    """

    parts: tuple[Part, ...]
    outputs: tuple[str, ...]


def cut(program: Program, special: Collection[fx.Node]) -> Cut:
    """Cut a program into as few parts as possible, so that special operators are in separate parts.

    Args:
        program: a program whose graph is functional: no operator changes a tensor.
        special: the nodes of its graph that need another engine than the rest.

    Raises:
        ExportError: a value that would have to pass from part to part is not a tensor of a known type.
    """
    graph = program.exported.graph
    levels = _assign(program.exported, set(special))
    groups: dict[int, list[fx.Node]] = defaultdict(list)
    for node, level in levels.items():
        groups[level].append(node)
    inner = [_with_free(graph, groups[level]) for level in sorted(groups)]
    read = [[node for node in graph.nodes if _enters(node, nodes)] for nodes in inner]
    computed = [groups[level] for level in sorted(groups)]
    returned: list[fx.Node] = list(graph.output_node().args[0])
    if inner:  # weights that are outputs of the program belong to no node, so the first part returns them
        weights = [node for node in _weights(program.exported) if node in returned]
        read[0] += [node for node in weights if node not in read[0]]
        computed[0] = [*computed[0], *weights]
    crossing = {*returned, *(node for nodes in read for node in nodes)}
    values = _Values(program)
    parts = []
    for nodes, inputs, results in zip(inner, read, computed, strict=True):
        own = dict.fromkeys(_name(node) for node in results if node in special)
        outputs = [node for node in results if node in crossing]
        parts.append(Part(_part(program.exported, nodes, inputs, outputs, values), tuple(own)))
    return Cut(tuple(parts), tuple(values.name(node) for node in returned))


def _assign(exported: Exported, special: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the level of each operator: odd for special operators, even for the others. A part is one level.

    A part too small to be worth another engine becomes special, unless it reads weights.
    """
    weights = set(_weights(exported))
    while True:
        levels = _levels(exported.graph, special)
        groups: dict[int, list[fx.Node]] = defaultdict(list)
        for node, level in levels.items():
            groups[level].append(node)
        small = [
            node
            for level, nodes in groups.items()
            if level % 2 == 0
            and len(nodes) < _WORTH_A_PART
            and weights.isdisjoint(source for node in nodes for source in node.all_input_nodes)
            for node in nodes
        ]
        if not small or not special:
            return levels
        special = special.union(small)


def _levels(graph: fx.Graph, special: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the lowest possible level of each operator."""
    levels: dict[fx.Node, int] = {}
    ready: dict[fx.Node, int] = {}
    for node in graph.nodes:
        ready[node] = max((ready[source] for source in node.all_input_nodes), default=0)
        if _is_free(node) or node.op == "output":
            continue
        if node.target is not operator.getitem:  # getitem stays with the operator whose results it unpacks
            ready[node] += ready[node] % 2 != (node in special)
        levels[node] = ready[node]
    return levels


def _is_free(node: fx.Node) -> bool:
    """Return whether a node can be repeated in any part: weights, subgraphs, and the arithmetic of sizes."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return node.op in ("placeholder", "get_attr") or not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _with_free(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the given nodes, and the size arithmetic and subgraphs that they need."""
    wanted = set(nodes)
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(item for item in node.all_input_nodes if _is_free(item) and item.op != "placeholder")
    return wanted


def _enters(node: fx.Node, nodes: set[fx.Node]) -> bool:
    """Return whether a node is an input of a part: some of the part's nodes read it, and it is not one of them."""
    return node not in nodes and not nodes.isdisjoint(node.users)


def _user_inputs(exported: Exported) -> list[fx.Node]:
    names = set(exported.graph_signature.user_inputs)
    return [node for node in exported.graph.find_nodes(op="placeholder") if node.name in names]


def _weights(exported: Exported) -> list[fx.Node]:
    names = set(exported.graph_signature.user_inputs)
    return [node for node in exported.graph.find_nodes(op="placeholder") if node.name not in names]


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


class _Values:
    """The names, datatypes and shapes of a program's values, with the user's names where there are any."""

    def __init__(self, program: Program):
        self._signature = program.signature
        self._inputs = dict(zip(_user_inputs(program.exported), program.signature.inputs, strict=True))
        self._symbols = {
            size.node.expr: sympy.Symbol(dim, integer=True, positive=True)
            for node, spec in self._inputs.items()
            for size, dim in zip(node.meta["val"].shape, spec.shape, strict=True)
            if isinstance(dim, str) and isinstance(size, torch.SymInt)
        }

    def name(self, node: fx.Node) -> str:
        return self._inputs[node].name if node in self._inputs else f"%{node.name}"

    def signature(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Signature:
        read, computed = tuple(map(self._spec, inputs)), tuple(map(self._spec, outputs))
        # Sizes that depend on values, such as a number of detections, may be 0.
        inner = [dim for dim in symbols(read) if dim not in self._signature.symbols]
        return Signature(read, computed, ranges={**self._signature.ranges, **dict.fromkeys(inner, Range(0))})

    def _spec(self, node: fx.Node) -> TensorSpec:
        if node in self._inputs:
            return self._inputs[node]
        value: Any = node.meta["val"]
        try:
            dtype = DType.parse(str(value.dtype).removeprefix("torch."))
        except (AttributeError, InvalidArgument) as error:
            kind = getattr(value, "dtype", type(value).__name__)
            raise ExportError(f"a value of type {kind} would have to pass between parts of the model") from error
        shape: Shape = tuple(
            size if isinstance(size, int) else str(size.node.expr.subs(self._symbols)) for size in value.shape
        )
        return TensorSpec(self.name(node), dtype, shape)


def _part(
    owner: Exported, nodes: set[fx.Node], sources: Sequence[fx.Node], outputs: Sequence[fx.Node], values: _Values
) -> Program:
    """Return some nodes of a program as a separate program, without tracing them again."""
    lifted = {spec.arg.name: spec for spec in owner.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT}
    weights = [node for node in sources if node.name in lifted]
    inputs = [node for node in sources if node.name not in lifted]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*weights, *inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta["val"]}
    for node in owner.graph.nodes:
        if node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    specs = [lifted[node.name] for node in weights]
    exported = Exported(
        root=fx.GraphModule(owner.graph_module, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [*specs, *(InputSpec(InputKind.USER_INPUT, _argument(copies[node]), None) for node in inputs)],
            [OutputSpec(OutputKind.USER_OUTPUT, _argument(copies[node]), None) for node in outputs],
        ),
        state_dict=_of_specs(owner.state_dict, specs),
        constants=_of_specs(owner.constants, specs),
        range_constraints=_ranges(owner, graph),
        module_call_graph=[_entry(len(inputs), len(outputs))],
        verifiers=owner.verifiers,
    )
    return Program(exported, values.signature(inputs, outputs))


def _argument(node: fx.Node) -> TensorArgument:
    return TensorArgument(node.name)


def _of_specs(values: Mapping[str, Any], specs: Iterable[InputSpec]) -> dict[str, Any]:
    """Return those of a program's weights or constants that are inputs of a part."""
    return {spec.target: values[spec.target] for spec in specs if spec.target is not None and spec.target in values}


def _ranges(owner: Exported, graph: fx.Graph) -> dict[sympy.Symbol, Any]:
    used = free_symbols(pytree.tree_leaves([node.meta.get("val") for node in graph.nodes]))
    return {symbol: bounds for symbol, bounds in owner.range_constraints.items() if symbol in used}


def _entry(inputs: int, outputs: int) -> ModuleCallEntry:
    """Return the calling convention of a program: tensors by position, and a tuple of tensors as the result."""
    arguments, results = pytree.tree_structure(((0,) * inputs, {})), pytree.tree_structure((0,) * outputs)
    return ModuleCallEntry("", ModuleCallSignature([], [], arguments, results))
