"""Queries of FX graphs, and the edits that rules share.

The graph is that of ``ExportedProgram.module()``: operators are not decomposed, and some still write to memory
(``add_``), so a node's value may change after it was made. :class:`Memory` tracks these writes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ingot.export.program import quiet
from ingot.export.rewrite.passes.dead_code import drop_unused
from ingot.export.rewrite.passes.manager import PassResult
from ingot.export.torch_internals import FakeTensor, HigherOrderOperator, OpOverload, pytree, schema

aten = torch.ops.aten

_IDENTITIES = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
    aten.alias.default,
    aten.detach.default,
    aten.slice.Tensor,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
}
# They may return their input itself, although their schemas declare no alias.
_SILENT_ALIASES = {
    aten.type_as.default,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
    aten.atleast_1d.default,
    aten.atleast_2d.default,
    aten.atleast_3d.default,
    aten.broadcast_tensors.default,
    aten.einsum.default,
    aten.meshgrid.default,
    aten.meshgrid.indexing,
}
# Metadata that a new node inherits from the one it replaces: where in the user's model it comes from.
_PROVENANCE = ("nn_module_stack", "stack_trace", "from_node", "custom")


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return a call's arguments by name, defaults included; empty for other kinds of node."""
    if node.target is operator.getitem:
        return dict(zip(("self", "index"), node.args, strict=True))
    if not isinstance(node.target, OpOverload):
        return {}
    named = {argument.name: argument.default_value for argument in schema(node.target).arguments}
    return named | dict(zip(named, node.args, strict=False)) | node.kwargs


def tensor(value: Any) -> torch.Tensor | None:
    """Return the fake tensor of a node's result, or None if the result is not one tensor."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def same_sizes(left: Sequence[int | torch.SymInt], right: Sequence[int | torch.SymInt]) -> bool:
    """Return whether two shapes are equal at all sizes of their dynamic dimensions."""
    return len(left) == len(right) and all(statically_known_true(a == b) for a, b in zip(left, right, strict=True))


def is_identity(node: fx.Node) -> bool:
    """Return whether a node returns its input unchanged, such as a cast to the same type or dropout."""
    if node.target not in _IDENTITIES:
        return False
    named = arguments(node)
    if named.get("copy") or named.get("train") or named.get("memory_format") not in (None, torch.preserve_format):
        return False
    before, after = tensor(node.args[0]), tensor(node)
    return (
        before is not None
        and after is not None
        and (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
        and same_sizes(before.shape, after.shape)
    )


def is_assert(node: fx.Node) -> bool:
    """Return whether a node only checks the datatype, device and layout of a tensor, which an exported graph fixes."""
    if node.target is not aten._assert_tensor_metadata.default:
        return False
    named = arguments(node)
    checked = tensor(named.pop("a"))
    return checked is not None and all(
        wanted is None or (name in ("dtype", "device", "layout") and wanted == getattr(checked, name))
        for name, wanted in named.items()
    )


def is_pure(node: fx.Node) -> bool:
    """Return whether a call's result depends on its inputs alone, and the call has no side effect."""
    return node.target is operator.getitem or (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not node.is_impure()
    )


def source(value: Any) -> Any:
    """Return the node that computes a value, past nodes that return their input unchanged."""
    while isinstance(value, fx.Node) and is_identity(value):
        value = value.args[0]
    return value


def insert(before: fx.Node, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
    """Insert a call before a node, with that node's provenance.

    ``val`` is the fake tensor of its result, by default the node's.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = {key: before.meta[key] for key in _PROVENANCE if key in before.meta}
    node.meta["val"] = before.meta.get("val") if val is None else val
    return node


def adopt(module: nn.Module, name: str, value: torch.Tensor | nn.Module) -> str:
    """Register a tensor or module under a free name like the given one, and return that name.

    It goes into the submodule that the name starts with, if there is one: a new weight of a layer stays in the layer.
    """
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        path, last, owner = "", name, module
    base = free = "".join(character if character.isalnum() else "_" for character in last)
    count = 0
    while hasattr(owner, free):
        count += 1
        free = f"{base}_{count}"
    if isinstance(value, nn.Module | nn.Parameter):
        setattr(owner, free, value)
    else:
        owner.register_buffer(free, value)
    return f"{path}.{free}" if path else free


def insert_constant(before: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """Register a tensor with the graph's module under a free name like ``name``, and insert a node that reads it."""
    target = adopt(_owner(before.graph), name, value)
    with before.graph.inserting_before(before):
        node = before.graph.get_attr(target)
    like = tensor(before)
    if isinstance(like, FakeTensor):
        node.meta["val"] = like.fake_mode.from_tensor(value, static_shapes=True)
    return node


def finish(graph_module: fx.GraphModule, matches: int) -> PassResult[fx.GraphModule]:
    """Remove nodes and weights that a rewrite has left unused, and return the result of the pass."""
    if matches:
        drop_unused(graph_module.graph)
        with quiet():  # torch warns about its own copies
            graph_module = fx.GraphModule(graph_module, graph_module.graph)
    return PassResult(graph_module, matches)


def attribute(node: fx.Node) -> Any:
    """Return the tensor, or the graph of a branch, that a ``get_attr`` node reads."""
    return operator.attrgetter(str(node.target))(_owner(node.graph))


def _owner(graph: fx.Graph) -> fx.GraphModule:
    module = graph.owning_module
    if module is None:
        raise ValueError("the graph belongs to no module; make a GraphModule of it first")
    return module


class Memory:
    """The nodes of a graph that may share memory, and those that write to it."""

    def __init__(self, graph: fx.Graph):
        self._group: dict[fx.Node, fx.Node] = {}
        self._writes: list[tuple[fx.Node, fx.Node]] = []
        read: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self.join(node, read.setdefault(id(attribute(node)), node))
            elif node.op == "call_function":
                shared, written = _effects(node)
                for other in shared:
                    self.join(node, other)
                self._writes += [(node, other) for other in written]

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """Record that two nodes may share memory."""
        self._group[self._find(node)] = self._find(other)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that may overwrite a node's result."""
        return [writer for writer, written in self._writes if self._find(written) is self._find(node)]

    def constant(self, value: Any) -> torch.Tensor | None:
        """Return the weight that a node reads; None for any other node, and for a weight that the graph writes to."""
        value = source(value)
        if not isinstance(value, fx.Node) or value.op != "get_attr" or self.writers(value):
            return None
        found = attribute(value)
        return found.detach() if isinstance(found, torch.Tensor) else None

    def unchanged(self, nodes: Set[fx.Node], last: fx.Node) -> bool:
        """Return whether ``nodes`` may be computed all at once in place of ``last``, the last of them.

        They may unless something between the first and the last writes to their inputs or results. A write by one of
        them to a result of another that has no other user is equivalent to a new result.
        """
        first, seen = min(nodes), {*nodes, *(other for node in nodes for other in node.all_input_nodes)}
        for writer, written in self._writes:
            if not first < writer <= last:
                continue
            group = self._members(written)
            private = group <= nodes and [user for user in written.users if not is_assert(user)] == [writer]
            if group & seen and not private:
                return False
        return True

    def _members(self, node: fx.Node) -> set[fx.Node]:
        group = self._find(node)
        return {node, group, *(other for other in self._group if self._find(other) is group)}

    def _find(self, node: fx.Node) -> fx.Node:
        while (parent := self._group.get(node, node)) is not node:
            node = parent
        return node


def written(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that it writes to."""
    return _effects(node)[1] if node.op == "call_function" else []


def _effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the inputs that a call's result may share memory with, and those that the call writes to."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return node.all_input_nodes, node.all_input_nodes if _branch_writes(node) else []
    if not isinstance(target, OpOverload):
        return node.all_input_nodes, []
    if target in _SILENT_ALIASES:
        return node.all_input_nodes, []
    named, shared, written = arguments(node), [], []
    for argument in schema(target).arguments:
        if argument.alias_info is not None:
            nodes = [leaf for leaf in pytree.tree_leaves(named[argument.name]) if isinstance(leaf, fx.Node)]
            shared += nodes
            # detach_ changes a tensor's autograd state, not its values.
            written += nodes if argument.alias_info.is_write and target is not aten.detach_.default else []
    return shared, written


def _branch_writes(node: fx.Node) -> bool:
    """Return whether a graph that a higher-order operator runs writes to memory."""
    branches = [attribute(item) for item in node.all_input_nodes if item.op == "get_attr"]
    inner = [item for branch in branches if isinstance(branch, fx.GraphModule) for item in branch.graph.nodes]
    return any(item.op == "call_function" and (_effects(item)[1]) for item in inner)
