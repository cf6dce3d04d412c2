"""Patterns over FX graphs, and the pass that replaces what they match.

A pattern is written as the expression to find, as nested :class:`Op` objects::

    x, eps = Var("x"), Number("eps")
    variance = Op(aten.mean.dim, Op(aten.pow.Tensor_Scalar, x, 2), Dim(-1), True)
    pattern = Op(aten.mul.Tensor, x, Op(aten.rsqrt.default, Op(aten.add.Tensor, variance, eps)))

A match is exact: every argument that the pattern does not name must have its default. Nodes that return their input
unchanged, such as casts to the same type, are skipped. A match is replaced only if its inner results have no other user
and nothing between its nodes writes to memory that they read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from ingot.export.rewrite.passes.dead_code import drop_unused
from ingot.export.rewrite.passes.fx_graph import Memory, arguments, aten, finish, is_assert, is_identity, source, tensor
from ingot.export.rewrite.passes.manager import FxPass, PassResult
from ingot.export.torch_internals import OpOverload, is_erased, schema

_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass(frozen=True)
class Match:
    """Nodes that a pattern has matched, and the values of its variables."""

    nodes: frozenset[fx.Node] = frozenset()
    values: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def bind(self, name: str, value: Any) -> Match:
        return Match(self.nodes, {**self.values, name: value})

    def cover(self, *nodes: fx.Node) -> Match:
        return Match(self.nodes | set(nodes), self.values)


class Pattern(ABC):
    """A condition on an argument of a call."""

    @abstractmethod
    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        """Yield each way in which ``value``, an argument of ``user``, matches; ``match`` holds the matches so far."""


class Anything(Pattern):
    """Any value."""

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        yield match


ANY = Anything()


@dataclass(frozen=True)
class Var(Pattern):
    """Any node; all uses of one name in a pattern must be the same node."""

    name: str

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        value = source(value)
        if isinstance(value, fx.Node) and match.values.get(self.name, value) is value:
            yield match.bind(self.name, value)


@dataclass(frozen=True)
class Number(Pattern):
    """Any number that is a literal in the graph."""

    name: str

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield match.bind(self.name, value)


@dataclass(frozen=True)
class Dim(Pattern):
    """A dimension of the user's first input, alone or in a list, counted from either end."""

    index: int

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        given = tensor(user.all_input_nodes[0]) if user is not None else None
        dims = list(value) if isinstance(value, Sequence) else [value]
        if given is not None and len(dims) == 1 and isinstance(dims[0], int):
            rank = given.dim()
            if dims[0] % rank == self.index % rank:
                yield match


class Op(Pattern):
    """A call of one of some operators.

    Args:
        targets: one operator or several; a string names all overloads of an operator that may not be loaded.
        args: patterns or values for the first arguments, in the order of the operator's schema.
        name: binds the call itself.
        kwargs: patterns or values for other arguments.
    """

    def __init__(self, targets: Any, *args: Any, name: str = "", **kwargs: Any):
        self._targets = targets if isinstance(targets, tuple) else (targets,)
        self._args = args
        self._name = name
        self._kwargs = kwargs

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        while isinstance(value, fx.Node) and not self._calls(value) and is_identity(value):
            match = match.cover(value)
            value = value.args[0]
        if not isinstance(value, fx.Node) or not self._calls(value):
            return
        match = match.cover(value)
        if self._name:
            match = match.bind(self._name, value)
        actual = arguments(value)
        wanted = self._wanted(value, list(actual))
        orders = [wanted]
        if value.target in _COMMUTATIVE:
            orders.append({**wanted, "self": wanted["other"], "other": wanted["self"]})
        for order in orders:
            yield from _find_all([(order[name], actual[name]) for name in order], value, match)

    def _calls(self, node: fx.Node) -> bool:
        name = str(schema(node.target).name) if isinstance(node.target, OpOverload) else None
        return node.target in self._targets or name in self._targets

    def _wanted(self, node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
        given = dict(zip(names, self._args, strict=False)) | self._kwargs
        if not isinstance(node.target, OpOverload):
            return given
        return {item.name: item.default_value for item in schema(node.target).arguments} | given


class Either(Pattern):
    """Any of several patterns."""

    def __init__(self, *patterns: Any):
        self._patterns = patterns

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        for pattern in self._patterns:
            yield from _find(pattern, value, user, match)


def _find(pattern: Any, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
    if isinstance(pattern, Pattern):
        yield from pattern.find(value, user, match)
    elif isinstance(pattern, list):
        if isinstance(value, Sequence) and len(value) == len(pattern):
            yield from _find_all(list(zip(pattern, value, strict=True)), user, match)
    elif not isinstance(value, fx.Node) and value == pattern:
        yield match


def _find_all(pairs: Sequence[tuple[Any, Any]], user: fx.Node | None, match: Match) -> Iterator[Match]:
    if not pairs:
        yield match
        return
    for found in _find(*pairs[0], user, match):
        yield from _find_all(pairs[1:], user, found)


class PatternPass(FxPass):
    """A pass that replaces each match of a pattern. The largest matches come first: nodes are visited from the last."""

    pattern: ClassVar[Pattern]

    @abstractmethod
    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        """Insert the replacement of a match before its last node, ``root``; return None to leave the match.

        A method that returns None must not have inserted anything.
        """

    def call(self, graph_module: fx.GraphModule) -> PassResult[fx.GraphModule]:
        graph = graph_module.graph
        drop_unused(graph)
        memory = Memory(graph)
        matches = 0
        waiting = list(graph.nodes)
        while waiting:
            root = waiting.pop()
            if root.op != "call_function" or is_erased(root) or is_identity(root):
                continue
            for match in self.pattern.find(root, None, Match()):
                if not _is_closed(root, match) or not memory.unchanged(match.nodes, root):
                    continue
                new = self.replace(root, match, memory)
                if new is not None:
                    memory.join(new, root)
                    _substitute(root, new, match.nodes)
                    waiting.append(new)
                    matches += 1
                    break
        return finish(graph_module, matches)


def _is_closed(root: fx.Node, match: Match) -> bool:
    """Return whether no node outside a match uses its inner results."""
    return all(user in match.nodes or is_assert(user) for node in match.nodes - {root} for user in node.users)


def _substitute(root: fx.Node, new: fx.Node, nodes: frozenset[fx.Node]) -> None:
    root.replace_all_uses_with(new)
    for node in sorted(nodes, reverse=True):
        for user in list(node.users):
            if is_assert(user):
                root.graph.erase_node(user)
        if not node.users:
            root.graph.erase_node(node)
