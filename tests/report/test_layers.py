"""The layout of graphs: boxes apart, edges down, the same every time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.report.layers import Layout, layout

Sizes = list[tuple[float, float]]
Edges = list[tuple[int, int]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Sizes, Edges]:
    count = draw(st.integers(1, 24))
    side = st.integers(8, 200).map(float)
    sizes = draw(st.lists(st.tuples(side, side), min_size=count, max_size=count))
    ends = st.integers(0, count - 1)
    edges = draw(st.lists(st.tuples(ends, ends), max_size=50))
    return sizes, [(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]]


def check(sizes: Sizes, edges: Edges, found: Layout, gap: float = 24.0) -> None:
    boxes = [(x, y, x + width, y + height) for (x, y), (width, height) in zip(found.boxes, sizes, strict=True)]
    for box in boxes:
        assert box[0] >= -1e-6
        assert box[2] <= found.width + 1e-6
        assert 0 <= box[1] < box[3] <= found.height
    for one, other in combinations(boxes, 2):
        apart = max(other[0] - one[2], one[0] - other[2])
        assert apart >= gap - 1e-6 or one[1] >= other[3] or other[1] >= one[3]
    for (source, target), points in zip(edges, found.edges, strict=True):
        middle = [(box[0] + box[2]) / 2 for box in (boxes[source], boxes[target])]
        assert points[0] == pytest.approx((middle[0], boxes[source][3]))
        assert points[-1] == pytest.approx((middle[1], boxes[target][1]))
        assert all(upper[1] <= lower[1] for upper, lower in pairwise(points))
        assert boxes[source][3] < boxes[target][1]


@pytest.mark.matrix
@given(graphs())
def test_boxes_are_apart_and_edges_go_down(graph: tuple[Sizes, Edges]) -> None:
    found = layout(*graph)
    check(*graph, found)
    assert layout(*graph) == found


def test_long_edges_pass_boxes() -> None:
    """A residual connection passes next to the chain that it skips."""
    sizes, edges = [(100.0, 30.0)] * 5, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    found = layout(sizes, edges)
    check(sizes, edges, found)
    columns = {round(x) for x, _ in found.boxes[1:4]}
    assert len(columns) == 1
    left = found.boxes[1][0]
    for x, y in found.edges[-1][2:-1]:
        assert y < found.boxes[4][1]
        assert not left - 4 < x < left + 104


def test_a_chain_is_straight_whatever_constants_join_it() -> None:
    sizes = [(100.0, 30.0), (100.0, 30.0), (300.0, 30.0), (300.0, 30.0), (100.0, 30.0)]
    found = layout(sizes, [(0, 1), (1, 4), (2, 4), (3, 4)])
    middles = [found.boxes[node][0] for node in (0, 1, 4)]
    assert max(middles) - min(middles) < 40
    assert found.boxes[2][1] == found.boxes[3][1] == found.boxes[1][1]


def test_edges_of_one_source_share_their_way() -> None:
    found = layout([(50.0, 20.0)] * 6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 4), (0, 5)])
    long, longer = found.edges[-2], found.edges[-1]
    assert longer[: len(long) - 1] == long[:-1]


def test_two_thousand_boxes() -> None:
    sizes, edges = [(120.0, 40.0)] * 2000, [(node - 1, node) for node in range(1, 2000)]
    edges += [(node, node + 7) for node in range(0, 1990, 7)]
    found = layout(sizes, edges)
    assert len({y for _, y in found.boxes}) == 2000
    assert found.width < 2000


def test_cycles_are_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        layout([(10.0, 10.0)] * 2, [(0, 1), (1, 0)])


def test_nothing() -> None:
    assert layout([], []) == Layout(0.0, 0.0, (), ())
