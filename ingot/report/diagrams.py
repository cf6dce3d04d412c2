"""Graphs in SVG: boxes in layers, with titles, lines of text and labelled edges. A page needs :data:`STYLE`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from ingot.report import charts
from ingot.report.layers import Layout, Point, layout
from ingot.report.text import short

Kind = Literal["compute", "norm", "activation", "pool", "shape", "quantize", "other", "part", "value"]
"""What a box stands for, which decides its colour."""
Mark = Literal["", "added", "removed", "changed"]

KINDS: dict[Kind, tuple[str, str]] = {
    "compute": ("c0", "matrices, convolutions, attention"),
    "norm": ("c1", "normalization"),
    "activation": ("c4", "activation"),
    "pool": ("c5", "pooling, reduction"),
    "shape": ("c7", "shapes, indices"),
    "quantize": ("c3", "quantization"),
    "other": ("c8", "other"),
}
"""The class of each kind of operator in :func:`charts.legend`, and its description."""

_MARGIN = 16.0
_HEAD, _LINE, _LABEL = 26.0, 17.0, 18.0
_PAD = 11.0
# Widths of a character of the fixed-width fonts, generously: fonts differ.
_TITLE_CHAR, _CHAR = 7.6, 6.8
_LONGEST_TITLE, _LONGEST_LINE, _LEAST_NAME = 40, 46, 14
_PORT = 16.0
# The heading of a picture fits into the narrowest.
_LEAST_WIDTH, _LONGEST_HEADING = 330.0, 36


@dataclass(frozen=True)
class Box:
    """A box.

    Attributes:
        title: the text of its head.
        lines: names and values below; the name or the value may be empty.
        kind: what it stands for.
        results: labels below it, on its outgoing edges.
        mark: how it differs from the graph that this one is compared with.
        note: its tooltip.
        link: the fragment of the page that it leads to, or empty.
    """

    title: str
    lines: Sequence[tuple[str, str]] = ()
    _: KW_ONLY
    kind: Kind
    results: Sequence[str] = ()
    mark: Mark = ""
    note: str = ""
    link: str = ""

    @property
    def width(self) -> float:
        mark = _CHAR * (len(self.mark) + 3) if self.mark else 0.0
        texts = [_CHAR * len(" ".join(_fitted(*line))) for line in self.lines] + [
            _CHAR * len(text) for text in self.results
        ]
        return 2 * _PAD + max([_TITLE_CHAR * len(short(self.title, _LONGEST_TITLE)) + mark, *texts])

    @property
    def height(self) -> float:
        """The height of the box alone."""
        return _HEAD + (_LINE * len(self.lines) + 8 if self.lines else 0.0)

    @property
    def outer(self) -> float:
        """The height with its labels."""
        return self.height + (_LABEL * len(self.results) + 6 if self.results else 0.0)


def draw(boxes: Sequence[Box], edges: Sequence[tuple[int, int]], title: str) -> str:
    """Return a graph as SVG.

    Args:
        boxes: the boxes.
        edges: pairs of indices of boxes, without a cycle.
        title: what it shows, for readers who do not see it.
    """
    found = layout([(box.width, box.outer) for box in boxes], edges)
    drawn = [*_edges(boxes, edges, found), *(_box(box, place) for box, place in zip(boxes, found.boxes, strict=True))]
    width, height = max(found.width + 2 * _MARGIN, _LEAST_WIDTH), found.height + 2 * _MARGIN
    left = (width - found.width) / 2
    return (
        f'<div class="wide"><svg class="diagram" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="width:{width:.0f}px" aria-label="{escape(title)}"><g transform="translate({left:.1f} '
        f'{_MARGIN:.0f})">{"".join(drawn)}</g></svg></div>'
    )


def legend(kinds: Iterable[Kind]) -> str:
    """Return a line of HTML that explains the colours of these kinds."""
    shown = set(kinds)
    return charts.legend(KINDS[kind] for kind in KINDS if kind in shown)


def image(drawing: str, title: str = "") -> str:
    """Return a drawing as a separate SVG file, with its title above it."""
    return charts.image(drawing, short(title, _LONGEST_HEADING), _SHAPES)


def _fitted(name: str, value: str) -> tuple[str, str]:
    """Return a line that fits into a box; of a long name the middle is left out, as the types after it are short."""
    value = short(value, _LONGEST_LINE if not name else _LONGEST_LINE - _LEAST_NAME)
    return short(name, _LONGEST_LINE - len(value)), value


def _edges(boxes: Sequence[Box], edges: Sequence[tuple[int, int]], found: Layout) -> list[str]:
    into: dict[int, list[int]] = defaultdict(list)
    for number, (_, target) in enumerate(edges):
        into[target].append(number)
    drawn: list[str] = []
    seen: set[tuple[Point, Point]] = set()
    for target, numbers in into.items():
        numbers.sort(key=lambda number: (found.edges[number][-2][0], edges[number][0]))
        room = min(boxes[target].width - 2 * _PAD, _PORT * (len(numbers) - 1))
        for place, number in enumerate(numbers):
            shift = room * (place / (len(numbers) - 1) - 0.5) if len(numbers) > 1 else 0.0
            x, y = found.edges[number][-1]
            drawn.append(_edge((*found.edges[number][:-1], (x + shift, y)), seen))
    return drawn


def _edge(points: Sequence[Point], seen: set[tuple[Point, Point]]) -> str:
    """Return an edge: by turns a straight line and a curve; see :class:`Layout`.

    What edges of one source share is drawn once: ``seen`` are the segments that are drawn already.
    """
    path = ""
    for number, (start, end) in enumerate(pairwise(points)):
        if (start, end) in seen:
            continue
        seen.add((start, end))
        (x, y), (to, below) = start, end
        path += "" if path else f"M{x:.1f} {y:.1f}"
        middle = (y + below) / 2
        straight = number % 2 == 0 or abs(to - x) < 0.05
        path += f"V{below:.1f}" if straight else f"C{x:.1f} {middle:.1f} {to:.1f} {middle:.1f} {to:.1f} {below:.1f}"
    x, y = points[-1]
    return f'<path class="edge" d="{path}"/><path class="tip" d="M{x:.1f} {y:.1f}l-3.5-7h7z"/>'


def _box(box: Box, place: Point) -> str:
    x, y = place
    width, height = box.width, box.height
    color = KINDS[box.kind][0] if box.kind in KINDS else box.kind
    radius = 13 if box.kind == "value" else 5
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
    drawn = [f"<title>{escape(box.note or box.title)}</title>"]
    if box.kind == "part":
        behind = shape.replace(f'x="{x:.1f}" y="{y:.1f}"', f'x="{x + 4:.1f}" y="{y + 4:.1f}"', 1)
        drawn.append(f'<rect class="card" {behind}/>')
    drawn.append(f'<rect class="card {box.mark}" {shape}/>')
    if box.kind != "value":
        head = (
            f'<path class="head {color}" d="M{x:.1f} {y + _HEAD:.1f}v-{_HEAD - 5:.0f}q0-5 5-5h{width - 10:.1f}q5 0 5 5'
        )
        drawn.append(f'{head}v{_HEAD - 5:.0f}z"/>')
    title = short(box.title, _LONGEST_TITLE)
    drawn.append(f'<text class="name" x="{x + _PAD:.1f}" y="{y + 17:.1f}">{escape(title)}</text>')
    if box.mark:
        drawn.append(f'<text class="mark {box.mark}" x="{x + width - _PAD:.1f}" y="{y + 17:.1f}">{box.mark}</text>')
    for number, (name, value) in enumerate(box.lines):
        drawn.append(_line(x + _PAD, y + _HEAD + _LINE * (number + 1) - 2, name, value))
    for number, text in enumerate(box.results):
        base = y + height + _LABEL * (number + 1)
        drawn.append(f'<text class="type" x="{x + width / 2:.1f}" y="{base:.1f}">{escape(text)}</text>')
    content = "".join(drawn)
    return f'<a href="#{escape(box.link)}">{content}</a>' if box.link else f"<g>{content}</g>"


def _line(x: float, y: float, name: str, value: str) -> str:
    name, value = _fitted(name, value)
    label = f'<tspan class="soft">{escape(name)}</tspan> ' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}">{label}{escape(value)}</text>'


_SHAPES = """
.diagram{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.diagram text{fill:var(--ink);white-space:pre}.diagram .soft,.diagram .type{fill:var(--soft)}
.diagram .name{font-weight:600;font-size:12px}
.diagram .type{text-anchor:middle;stroke:var(--card);stroke-width:4px;paint-order:stroke}
.diagram .card{fill:var(--card);stroke:var(--soft);stroke-width:1}.diagram .head{fill-opacity:.2}
.diagram .head.part{fill:var(--key);fill-opacity:.12}
.diagram .edge{fill:none;stroke:var(--soft);stroke-width:1}.diagram .tip{fill:var(--soft)}
.diagram .card.added{stroke:var(--good);stroke-width:2.5}.diagram .card.removed{stroke:var(--bad);stroke-width:2.5;
stroke-dasharray:6 3}.diagram .card.changed{stroke:var(--c2);stroke-width:2.5}
.diagram .mark{text-anchor:end}.diagram .mark.added{fill:var(--good)}.diagram .mark.removed{fill:var(--bad)}
.diagram .mark.changed{fill:var(--c2)}.diagram a:hover .card{stroke:var(--key);stroke-width:2}
""".replace("\n", "")
STYLE = (
    charts.STYLE
    + _SHAPES
    + """
.diagram{display:block;height:auto;margin:auto}
"""
)
