"""Large graphs are divided into drawings by modules; equal ones are drawn once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.export.graphs import drawing
from ingot.export.graphs.folding import Folded, Part
from ingot.export.report import GraphView, Node

STEPS = ("norm", "attention.query", "attention.key", "attention.value", "attention.mix", "attention.output", "mlp.up")


def transformer(layers: int, steps: tuple[str, ...] = STEPS) -> GraphView:
    nodes = [Node(name="ids", operator="Gather", inputs=("input",), module="embed")]
    for layer in range(layers):
        for step in steps:
            module = f"encoder.layer.{layer}.{step}"
            nodes.append(Node(name=f"{step}_{layer}", operator=step.title(), inputs=(nodes[-1].name,), module=module))
        nodes.append(Node(name=f"sum_{layer}", operator="Add", inputs=(nodes[-1].name, nodes[-len(steps)].name)))
    return GraphView(
        title="ONNX", nodes=tuple(nodes), operators={}, inputs={"input": "int64[batch]"}, outputs={"y": nodes[-1].name}
    )


def titles(folded: Folded, number: int) -> list[str]:
    return [folded.nodes[item].operator if isinstance(item, int) else item.title for item in folded.views[number].items]


def test_a_small_graph_is_one_drawing() -> None:
    folded = Folded(transformer(2), {})
    assert titles(folded, 0) == [node.operator for node in transformer(2).nodes]
    assert len(folded.views) == 1


def test_the_layers_of_a_transformer_share_a_drawing() -> None:
    folded = Folded(transformer(12), {})
    shown = titles(folded, 0)
    assert [title for title in shown if title.startswith("encoder")] == [
        f"encoder.layer.{layer}" for layer in range(12)
    ]
    assert [len(view.alike) for view in folded.views] == [1, 12]
    part = folded.views[1].alike[7]
    assert part.title == "encoder.layer.7"
    assert folded.view_of(part) is folded.views[1]


def test_a_layer_that_changed_has_its_own_drawing() -> None:
    folded = Folded(transformer(12), {"norm_5": "changed"})
    assert [len(view.alike) for view in folded.views] == [1, 11, 1]


def test_a_large_graph_without_modules_is_cut() -> None:
    nodes = tuple(Node(name=f"n{n}", operator="Relu", inputs=(f"n{n - 1}",)) for n in range(2500))
    folded = Folded(GraphView(title="ONNX", nodes=nodes, operators={}), {})
    assert titles(folded, 0) == [f"nodes {100 * n + 1} to {100 * n + 100}" for n in range(25)]
    assert sorted(len(view.items) for view in folded.views[1:]) == [100] * 25


def test_nodes_of_a_cycle_are_left_out() -> None:
    nodes = (Node(name="a", operator="Add", inputs=("b",)), Node(name="b", operator="Add", inputs=("a",)))
    folded = Folded(GraphView(title="ONNX", nodes=(*nodes, Node(name="c", operator="Relu")), operators={}), {})
    assert [node.name for node in folded.nodes] == ["c"]


NAMES = st.sampled_from([f"v{number}" for number in range(60)])
NODES = st.builds(
    Node,
    name=NAMES,
    operator=st.sampled_from(["Add", "Conv"]),
    inputs=st.lists(NAMES, max_size=3).map(tuple),
    module=st.sampled_from(["", "a", "a.b", "a.c", "d.0", "d.1", "d.0.e"]),
)


@pytest.mark.matrix
@settings(max_examples=30)
@given(st.lists(NODES, max_size=150))
def test_any_graph_can_be_drawn(nodes: list[Node]) -> None:
    """Names may be missing, defined twice or in a cycle: reports come from untrusted archives."""
    graph = GraphView(title="FX", nodes=tuple(nodes), operators={}, outputs={"y": "v1"}, inputs={"v0": ""})
    folded = Folded(graph, {})
    for view in folded.views:
        bounds = [(item.start, item.stop) if isinstance(item, Part) else (item, item + 1) for item in view.items]
        assert all(one[1] == other[0] for one, other in pairwise(bounds))
        assert not bounds or (bounds[0][0], bounds[-1][1]) == (view.part.start, view.part.stop)
        assert "<svg" in drawing.draw(folded, view, {}, lambda part: part.title)
