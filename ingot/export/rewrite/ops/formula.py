"""The rewrite rule of a custom operator, which replaces its formula in a captured model."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.rewrite.ops.tracing import trace
from ingot.export.rewrite.passes.dead_code import drop_unused
from ingot.export.rewrite.passes.fx_graph import Memory
from ingot.export.rewrite.passes.manager import FxPass, PassResult
from ingot.export.torch_internals import OpOverload, pytree

# Formulas do not contain these numbers: one in a traced formula shows where an argument is used unchanged.
_MARK = 0.7390851332151607
_KEPT = ("val", "stack_trace", "nn_module_stack")


class FormulaRule(FxPass):
    """Replaces a formula by an operator.

    A model's formula matches if it has the same operations with the same order of operands. Its tensors may have other
    sizes and types, and its floating-point numbers other values if they are parameters of the operator.

    Args:
        overload: the operator.
        spellings: functions of the operator's parameters: the formulas to look for.
        arguments: an example of those parameters, by name.
    """

    def __init__(
        self,
        overload: OpOverload,
        spellings: Sequence[Callable[..., Any]],
        arguments: Mapping[str, Any],
    ):
        self._overload = overload
        self._spellings = spellings
        self._arguments = arguments

    def call(self, graph: fx.GraphModule) -> PassResult[fx.GraphModule]:
        _drop_assertions(graph.graph)
        matches = 0
        for formula in self._formulas:
            places = replace_pattern_with_filters(graph, formula.graph, self._replacement(formula), [formula.fits])
            for place in places:
                self._describe(place.replacements, [place.nodes_map[node] for node in formula.results])
            matches += len(places)
        return PassResult(graph, matches)

    @functools.cached_property
    def _formulas(self) -> list[_Formula]:
        return [_read(spelling, self._arguments) for spelling in self._spellings]

    def _replacement(self, formula: _Formula) -> fx.Graph:
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in formula.graph.find_nodes(op="placeholder")}
        call = graph.call_function(self._overload, kwargs=map_arg(dict(formula.arguments), made.__getitem__))
        count = len(formula.results)
        parts = (
            [graph.call_function(operator.getitem, (call, index)) for index in range(count)] if count > 1 else [call]
        )
        graph.output(tuple(parts))
        return graph

    def _describe(self, made: Sequence[fx.Node], replaced: Sequence[fx.Node]) -> None:
        """Copy the metadata of the replaced nodes to the new ones: shape, type and the user's line."""
        for node in made:
            old = replaced[int(node.args[1])] if node.target is operator.getitem else replaced[0]  # type: ignore[arg-type]
            node.meta.update({key: old.meta[key] for key in _KEPT if key in old.meta})
            if node.target is self._overload and len(replaced) > 1:
                node.meta["val"] = tuple(item.meta.get("val") for item in replaced)


@dataclass(frozen=True)
class _Formula:
    """A formula whose free parts are placeholders: the tensors, then the numbers, then the sizes of tensors."""

    graph: fx.Graph
    arguments: Mapping[str, Any]  # the operator's, with placeholders in them
    numbers: frozenset[fx.Node]
    sizes: Mapping[fx.Node, sympy.Expr]  # placeholders of sizes, in the symbols of the formula's tensors

    @property
    def results(self) -> list[fx.Node]:
        return self.graph.output_node().all_input_nodes

    def fits(self, match: InternalMatch, graph: fx.Graph, pattern: fx.Graph) -> bool:
        """Return whether a match has tensors and numbers as the operator's arguments, and the formula's constants, and
        nothing writes to memory between its nodes.
        """
        for node in (leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, fx.Node)):
            found: Any = match.nodes_map[node]
            if node in self.numbers:
                if not isinstance(found, int | float):
                    return False
            elif not (isinstance(found, fx.Node) and isinstance(found.meta.get("val"), torch.Tensor)):
                return False
        if not self._sizes_fit(match.nodes_map):
            return False
        constants = pattern.find_nodes(op="get_attr")
        if not all(torch.equal(_constant(node), _constant(match.nodes_map[node])) for node in constants):
            return False
        calls = {match.nodes_map[node] for node in pattern.nodes if node.op == "call_function"}
        return Memory(graph).unchanged(calls, max(calls))

    def _sizes_fit(self, found: Mapping[fx.Node, Any]) -> bool:
        """Return whether the sizes in a match are those of its tensors, not other numbers."""
        actual: dict[sympy.Expr, sympy.Expr] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            own, other = node.meta.get("val"), getattr(found.get(node), "meta", {}).get("val")
            if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor) and own.ndim == other.ndim:
                actual |= {_expr(size): _expr(real) for size, real in zip(own.shape, other.shape, strict=True)}
        for node, expr in self.sizes.items():
            if not expr.free_symbols <= actual.keys():  # of a tensor of another rank
                return False
            value = found[node].meta.get("val") if isinstance(found[node], fx.Node) else found[node]
            if not isinstance(value, int | torch.SymInt) or sympy.expand(expr.xreplace(actual) - _expr(value)) != 0:
                return False
        return True


def _read(function: Callable[..., Any], arguments: Mapping[str, Any]) -> _Formula:
    """Trace a formula.

    Raises:
        ExportError: it cannot be traced, or does not use all of its tensors.
    """
    leaves, spec = pytree.tree_flatten(dict(arguments))
    marks = {place: _MARK + place for place, leaf in enumerate(leaves) if isinstance(leaf, float)}
    graph = _traced(function, pytree.tree_unflatten(_replaced(leaves, marks), spec))
    seen = [leaf for node in graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs))]
    free = {place: mark for place, mark in marks.items() if mark in seen}
    if free != marks:  # a number that enters a computation is not seen: only its value in the example can match
        graph = _traced(function, pytree.tree_unflatten(_replaced(leaves, free), spec))
    tensors = dict(zip(_places_of_tensors(leaves), graph.find_nodes(op="placeholder"), strict=True))
    numbers = {place: _free_number(graph, mark) for place, mark in free.items()}
    sizes = _free_sizes(graph)
    if not all(node.users for node in tensors.values()):
        raise ExportError("the formula does not use the values of all of its tensors, so a match cannot find them")
    found = pytree.tree_unflatten(_replaced(leaves, {**tensors, **numbers}), spec)
    return _Formula(graph, found, frozenset(numbers.values()), sizes)


def _replaced(leaves: Sequence[Any], others: Mapping[int, Any]) -> list[Any]:
    return [others.get(place, leaf) for place, leaf in enumerate(leaves)]


def _places_of_tensors(leaves: Sequence[Any]) -> list[int]:
    return [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _traced(function: Callable[..., Any], arguments: Mapping[str, Any]) -> fx.Graph:
    # One tensor as two arguments would be traced as one input.
    arguments = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
    sizes = [range(leaf.ndim) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]

    def failed(error: Exception) -> str:
        return f"the formula cannot be traced with the operator's example: {foreign.one_line(error, 300)}"

    with foreign.reported_as(ExportError, failed):
        graph: fx.Graph = trace(function, arguments, sizes).module(check_guards=False).graph
    _drop_assertions(graph)
    return graph


def _free_number(graph: fx.Graph, mark: float) -> fx.Node:
    node = _placeholder(graph, "number")
    for user in graph.nodes:
        user.args, user.kwargs = map_aggregate((user.args, user.kwargs), lambda leaf: node if leaf == mark else leaf)
    return node


def _free_sizes(graph: fx.Graph) -> dict[fx.Node, sympy.Expr]:
    """Replace sizes of tensors in a formula by placeholders, because a model may have numbers there."""
    sizes = {}
    for node in [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]:
        if any(not isinstance(user.meta.get("val"), torch.SymInt) for user in node.users):
            free = _placeholder(graph, "size")
            sizes[free] = _expr(node.meta["val"])
            node.replace_all_uses_with(free)
    drop_unused(graph)
    return sizes


def _expr(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _placeholder(graph: fx.Graph, name: str) -> fx.Node:
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        return graph.placeholder(name)


def _constant(node: fx.Node) -> torch.Tensor:
    tensor: torch.Tensor = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return tensor


def _drop_assertions(graph: fx.Graph) -> None:
    """Remove the checks of casts, which would be other users of a formula's inner results."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
