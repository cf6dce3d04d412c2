"""The sizes that resizing gives a picture, by the rules of transformers' image processors, with their rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Size = tuple[int, int]
"""Height and width, in pixels."""

Side = Annotated[int, Field(ge=0, le=1 << 20)]
"""A declared side of a picture, in pixels."""
Multiple = Annotated[int, Field(ge=1, le=1 << 16)]
"""A number of which sides are made multiples."""
Rule = Literal[
    "exact", "shortest_edge", "longest_edge", "longest_edge_half_up", "bounded_edges", "bounded_edges_exact",
    "bounded_edges_half_up", "fit",
    "thumbnail", "closest", "keep", "line", "page",
]  # fmt: skip


class Target(BaseModel):
    """A rule and its numbers. Both sides are then cut to a multiple, or extended to it with ``round_up``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Rule
    height: Side = 0
    width: Side = 0
    edge: Side = 0
    longest: Side = 0
    least: Side = 0
    multiple: Multiple = 1
    round_up: bool = False

    def of(self, size: Size) -> Size:
        """Return the new size of a picture; a side may be 0 if the picture is too narrow."""
        height, width = _RULES[self.rule](size, self)
        if self.round_up:
            return -(-height // self.multiple) * self.multiple, -(-width // self.multiple) * self.multiple
        return height // self.multiple * self.multiple, width // self.multiple * self.multiple


def _exact(size: Size, to: Target) -> Size:
    return to.height, to.width


def _shortest_edge(size: Size, to: Target) -> Size:
    """Give the shorter side ``edge`` pixels; the other keeps the aspect ratio, cut to a whole number."""
    height, width = size
    other = int(to.edge * max(size) / min(size))
    return (other, to.edge) if width <= height else (to.edge, other)


def _longest_edge(size: Size, to: Target) -> Size:
    """Give the longer side ``edge`` pixels, and the other at least ``least``, both rounded to even."""
    ratio = to.edge / max(size)
    return max(round(size[0] * ratio), to.least), max(round(size[1] * ratio), to.least)


def _longest_edge_half_up(size: Size, to: Target) -> Size:
    """Give the longer side ``edge`` pixels, and round halves of the other up: SAM's rule."""
    ratio = to.edge / max(size)
    return int(size[0] * ratio + 0.5), int(size[1] * ratio + 0.5)


def _bounded_edges(size: Size, to: Target) -> Size:
    """Give the shorter side ``edge`` pixels, or fewer if the longer would have more than ``longest``: DETR's rule."""
    edge, _ = _bounded(size, to)
    return size if min(size) == edge else _bounded_edges_exact(size, to)


def _bounded_edges_exact(size: Size, to: Target) -> Size:
    """Bound both sides as above, also the longer side of a tall picture whose shorter one is right: YOLOS's rule."""
    height, width = size
    edge, exact = _bounded(size, to)
    if width < height:
        return int(exact * height / width), edge
    return size if height == edge else (edge, int(exact * width / height))


def _bounded(size: Size, to: Target) -> tuple[int, float]:
    """Return the shorter side, rounded and exact."""
    if max(size) / min(size) * to.edge <= to.longest:
        return to.edge, to.edge
    exact = to.longest * min(size) / max(size)
    return round(exact), exact


def _bounded_edges_half_up(size: Size, to: Target) -> Size:
    """Bound both sides as above, but round halves up at the end only: ViLT's rule."""
    height, width = size
    ratio = to.edge / min(size)
    new_height, new_width = (float(to.edge), ratio * width) if height < width else (ratio * height, float(to.edge))
    if max(new_height, new_width) > to.longest:
        ratio = to.longest / max(new_height, new_width)
        new_height, new_width = ratio * new_height, ratio * new_width
    return int(new_height + 0.5), int(new_width + 0.5)


def _fit(size: Size, to: Target) -> Size:
    """Give the picture the largest size within ``height`` and ``width``."""
    ratio = min(to.height / size[0], to.width / size[1])
    return int(size[0] * ratio), int(size[1] * ratio)


def _thumbnail(size: Size, to: Target) -> Size:
    """Make no side larger than ``height`` and ``width``: Donut's rule."""
    height, width = min(size[0], to.height), min(size[1], to.width)
    if (height, width) == size:
        return size
    if size[0] > size[1]:
        width = int(size[1] * height / size[0])
    elif size[1] > size[0]:
        height = int(size[0] * width / size[1])
    return height, width


def _closest(size: Size, to: Target) -> Size:
    """Scale by the smaller change of the two sides to ``height`` and ``width``, to closest multiples: DPT's rule."""
    scales = to.height / size[0], to.width / size[1]
    scale = scales[1] if abs(1 - scales[1]) < abs(1 - scales[0]) else scales[0]
    height, width = (round(scale * side / to.multiple) * to.multiple for side in size)
    return height, width


def _line(size: Size, to: Target) -> Size:
    """Give a line of text ``height`` pixels, rounded up in width, but down where it is wider than ``width``.

    It is compressed to ``longest`` pixels, unless that is 0: PaddleOCR's rule.
    """
    ratio = size[1] / size[0]
    most = max(to.width, int(to.height * ratio))
    return to.height, min(math.ceil(to.height * ratio), min(most, to.longest) if to.longest else most)


def _page(size: Size, to: Target) -> Size:
    """Enlarge the shorter side to ``edge``, or else shrink the longer to ``longest``; 0 for neither.

    Both sides are rounded to the closest multiples: the rule of PaddleOCR's detector of texts.
    """
    ratio = 1.0
    if to.edge and min(size) < to.edge:
        ratio = to.edge / min(size)
    elif to.longest and max(size) > to.longest:
        ratio = to.longest / max(size)
    height, width = (round(int(side * ratio) / to.multiple) * to.multiple for side in size)
    return height, width


def _keep(size: Size, to: Target) -> Size:
    return size


_RULES: dict[str, Callable[[Size, Target], Size]] = {
    "exact": _exact,
    "shortest_edge": _shortest_edge,
    "longest_edge": _longest_edge,
    "longest_edge_half_up": _longest_edge_half_up,
    "bounded_edges": _bounded_edges,
    "bounded_edges_exact": _bounded_edges_exact,
    "bounded_edges_half_up": _bounded_edges_half_up,
    "fit": _fit,
    "thumbnail": _thumbnail,
    "closest": _closest,
    "keep": _keep,
    "line": _line,
    "page": _page,
}
