"""Which nodes a rewrite added, removed and changed."""

from __future__ import annotations

from typing import Any

from ingot.export.graphs.changes import Change, compare
from ingot.export.report import GraphView, Node


def node(name: str, operator: str, module: str = "", *inputs: str, **more: Any) -> Node:
    return Node(name=name, operator=operator, module=module, inputs=inputs, **more)


def graph(*nodes: Node, **more: Any) -> GraphView:
    return GraphView(title="FX", nodes=nodes, operators={}, **more)


def test_added_removed_and_changed() -> None:
    before = graph(node("conv", "conv2d", "0", "w"), node("norm", "batch_norm", "1"), weights={"w": "float32[8,3]"})
    after = graph(
        node("conv", "conv2d", "1", "v", "b"), node("act", "relu"), weights={"v": "float32[8,3]", "b": "float32[8]"}
    )
    assert compare(before, after) == (
        {"conv": Change.CHANGED, "norm": Change.REMOVED},
        {"conv": Change.CHANGED, "act": Change.ADDED},
    )


def test_nodes_with_new_numbers_are_the_same() -> None:
    """A capture numbers nodes in order: without the first addition, all others have other names."""
    before = graph(
        node("add", "add", "embed"), *(node(f"add_{layer}", "add", f"layers.{layer}") for layer in range(1, 9))
    )
    after = graph(
        node("add", "add", "layers.1"), *(node(f"add_{layer}", "add", f"layers.{layer + 1}") for layer in range(1, 8))
    )
    assert compare(before, after) == ({"add": Change.REMOVED}, {})


def test_attributes_count_and_names_of_values_do_not() -> None:
    before = graph(node("a", "gelu", attributes={"approximate": "none"}), node("b", "relu", "", "a"))
    after = graph(node("a", "gelu", attributes={"approximate": "tanh"}), node("c", "relu", "", "x"))
    assert compare(before, after) == ({"a": Change.CHANGED}, {"a": Change.CHANGED})
