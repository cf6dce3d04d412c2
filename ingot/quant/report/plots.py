"""Plots as SVG inside a page, drawn without any library: points with intervals, curves, and bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from ingot.quant.report.axes import Axis

Kind = Literal["chosen", "held", "refused", "original"]

_WIDTH, _HEIGHT = 860.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 24.0, 18.0, 48.0
_CHAR = 6.4  # the width of an average character at 12 px
# More points are drawn than can be told apart by their names.
_MOST_LABELS = 40
_LONGEST_LABEL = 30


@dataclass(frozen=True)
class Point:
    """A point with an interval; ``title`` is shown when the pointer rests on it."""

    label: str
    x: float
    y: float
    low: float
    high: float
    kind: Kind
    title: str = ""


@dataclass(frozen=True)
class Curve:
    """Points that belong together, in order."""

    label: str
    points: tuple[tuple[float, float], ...]
    kind: Kind


@dataclass(frozen=True)
class Bar:
    """A bar; ``color`` numbers its colour, and None leaves it hollow. Without a value there is only the text."""

    label: str
    value: float | None
    text: str
    color: int | None
    title: str = ""


def scatter(
    points: Sequence[Point], titles: tuple[str, str], limit: float | None = None, *, upside_down: bool = False
) -> str:
    """Return points over a logarithmic x axis.

    Args:
        points: what to draw; those far below the limit stand at the lower edge, as triangles.
        titles: of the x and the y axis.
        limit: where a dashed line is drawn.
        upside_down: smaller values lie higher.
    """
    if not points:
        return ""
    sign = -1.0 if upside_down else 1.0
    across = Axis.over([point.x for point in points], _LEFT, _WIDTH - _RIGHT, log=True, pad=0.12)
    low, high = _window(points, limit, sign)
    ends = (_HEIGHT - _BOTTOM, _TOP)
    up = Axis.over((low, high), *(ends[::-1] if upside_down else ends), pad=0.1)
    drawn = [_grid(across, up, titles)]
    if limit is not None:
        y = up.at(limit)
        drawn.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "limit"))
        drawn.append(_text(_LEFT + 6, y + 14, "budget", "note"))
    beneath = [sign * point.y < min(sign * low, sign * high) for point in points]
    drawn += [_point(point, across, up, below) for point, below in zip(points, beneath, strict=True)]
    if len(points) <= _MOST_LABELS:
        names = [
            _short(point.label) + (f" ({point.y:.4g})" if below else "")
            for point, below in zip(points, beneath, strict=True)
        ]
        spots = [(across.at(point.x), up.at(point.y)) for point in points]
        drawn += _labels([(*spot, name) for spot, name in zip(spots, names, strict=True)])
    return _svg("".join(drawn), _HEIGHT, f"{titles[1]} against {titles[0]}")


def curves(items: Sequence[Curve], titles: tuple[str, str]) -> str:
    """Return curves over logarithmic axes."""
    items = [item for item in items if item.points]
    if not items:
        return ""
    height = 320.0
    across = Axis.over([x for item in items for x, _ in item.points], _LEFT, _WIDTH - _RIGHT, log=True, pad=0.08)
    up = Axis.over([y for item in items for _, y in item.points], height - _BOTTOM, _TOP, log=True, pad=0.1)
    drawn = [_grid(across, up, titles)]
    for number, item in enumerate(items):
        spots = [(across.at(x), up.at(y)) for x, y in item.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        drawn.append(f'<polyline class="curve {item.kind}" points="{path}"/>')
        drawn += [_shape(x, y, item.kind) for x, y in spots]
        y = _TOP + 16 + 20 * number
        drawn += [_shape(_LEFT + 16, y - 4, item.kind), _text(_LEFT + 28, y, _short(item.label, 60))]
    return _svg("".join(drawn), height, f"{titles[1]} against {titles[0]}")


def bars(items: Sequence[Bar], title: str) -> str:
    """Return horizontal bars, from the top to the bottom."""
    values = [item.value for item in items if item.value is not None]
    if not values:
        return ""
    step = 22.0 if len(items) <= 40 else 16.0
    left = min(360.0, 20 + 7.4 * max(len(_short(item.label, 46)) for item in items))
    low, high = min(0.0, *values), max(0.0, *values)
    axis = Axis.over((low, high), left, _WIDTH - 80, pad=0)
    zero = axis.at(0.0)
    drawn = []
    for number, item in enumerate(items):
        y = 4 + number * step
        kind = "hollow" if item.color is None else f"c{item.color}"
        end = zero if item.value is None else axis.at(item.value)
        bar = (
            f'<rect class="{kind}" x="{min(zero, end):.1f}" y="{y + 2:.1f}" width="{max(abs(end - zero), 1):.1f}" '
            f'height="{step - 6:.1f}" rx="2"/>'
        )
        middle = y + step / 2 + 3
        drawn.append(
            f"<g>{_title(item.title or item.label)}{_text(left - 8, middle, _short(item.label, 46), 'end mono')}"
            f"{'' if item.value is None else bar}{_text(max(zero, end) + 6, middle, item.text, 'note')}</g>"
        )
    return _svg("".join(drawn), 10 + step * len(items), title)


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return what the classes of :func:`bars` and :func:`scatter` mean, as a line of HTML."""
    shown = "".join(
        f'<span class="key"><svg class="sample" aria-hidden="true"><rect class="{kind}" x="1" y="1" width="10" '
        f'height="10" rx="2"/></svg>{escape(text)}</span>'
        for kind, text in items
    )
    return f'<p class="legend">{shown}</p>'


def _window(points: Sequence[Point], limit: float | None, sign: float) -> tuple[float, float]:
    """Return the range of y that is shown; a model that is useless must not press the others into one line."""
    values = [sign * point.y for point in points]
    best, lowest = max(values), min(values)
    if limit is not None and best > sign * limit:
        lowest = min(max(lowest, best - 5 * (best - sign * limit)), sign * limit)
    ends = [
        sign * end
        for point, value in zip(points, values, strict=True)
        if value >= lowest
        for end in (point.low, point.high)
    ]
    best, lowest = max(best, *ends), min(lowest, *ends)
    return (sign * lowest, sign * best) if sign > 0 else (sign * best, sign * lowest)


def _point(point: Point, across: Axis, up: Axis, below: bool) -> str:
    x, y = across.at(point.x), up.at(point.y)
    if below:
        shape = f'<path class="{point.kind}" d="M{x - 6:.1f} {y - 8:.1f}h12l-6 8z"/>'
        return f"<g>{_title(point.title)}{shape}</g>"
    low, high = up.at(point.low), up.at(point.high)
    whisker = "" if low == high else _line(x, low, x, high, "whisker")
    return f"<g>{_title(point.title)}{whisker}{_shape(x, y, point.kind)}</g>"


def _shape(x: float, y: float, kind: Kind) -> str:
    if kind == "original":
        return f'<rect class="original" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{7 if kind == "chosen" else 5}"/>'


def _labels(spots: Sequence[tuple[float, float, str]]) -> list[str]:
    """Place the names beside their points, where they cover neither each other nor a point if there is room."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y, _ in spots]
    drawn = []
    for x, y, label in spots:
        width = _CHAR * len(label)
        places = [
            (x + 11 if right else x - 11 - width, y + 4 + shift)
            for shift in (0, -14, 14, -26, 26, -38, 38, -50, 50, -62, 62)
            for right in (True, False)
        ]
        inside = [
            (left, base)
            for left, base in places
            if left > _LEFT and left + width < _WIDTH and _TOP < base < _HEIGHT - _BOTTOM - 2
        ] or places[:1]
        boxes = [(left, base - 10, left + width, base + 2) for left, base in inside]
        free = (number for number, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken))
        best = next(free, 0)
        left, base = inside[best]
        taken.append(boxes[best])
        if abs(base - 4 - y) > 20:
            drawn.append(_line(x, y, left - 2 if left > x else left + width + 2, base - 4, "leader"))
        drawn.append(_text(left, base, label))
    return drawn


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _grid(across: Axis, up: Axis, titles: tuple[str, str]) -> str:
    bottom, top = max(up.start, up.end), min(up.start, up.end)
    drawn = []
    for value, text in across.ticks():
        x = across.at(value)
        drawn += [_line(x, top, x, bottom, "grid"), _text(x, bottom + 18, text, "middle note")]
    for value, text in up.ticks():
        y = up.at(value)
        drawn += [_line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"), _text(_LEFT - 8, y + 4, text, "end note")]
    middle = (top + bottom) / 2
    drawn.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 40, titles[0], "middle note"))
    turned = f'transform="rotate(-90 16 {middle:.1f})"'
    drawn.append(f'<text class="middle note" x="16" y="{middle:.1f}" {turned}>{escape(titles[1])}</text>')
    return "".join(drawn)


def _svg(content: str, height: float, title: str) -> str:
    return (
        f'<div class="wide"><svg class="plot" role="img" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" '
        f'aria-label="{escape(title)}">{content}</svg></div>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _short(text: str, most: int = _LONGEST_LABEL) -> str:
    """Return a text with its middle left out if it is long: names of layers differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{text[-(most - most // 2) :]}"


STYLE = """
:root{--c0:#3564d4;--c1:#0d8a72;--c2:#b4690e;--c3:#8b46c4;--c4:#c2376f;--c5:#4d7c0f}
@media (prefers-color-scheme:dark){:root{--c0:#7ea2ff;--c1:#4fd1b5;--c2:#f0b05e;--c3:#c79bf2;--c4:#f590b8;--c5:#a3d65c}}
.plot{display:block;width:100%;min-width:640px;max-width:1050px;height:auto;font:12px system-ui,sans-serif}
.plot text{fill:var(--ink);stroke:var(--card);stroke-width:3px;paint-order:stroke}
.plot .note{fill:var(--soft)}.plot .end{text-anchor:end}.plot .middle{text-anchor:middle}
.plot .mono{font:12px ui-monospace,monospace}.grid{stroke:var(--line)}.limit{stroke:var(--bad);stroke-dasharray:6 5}
.whisker{stroke:var(--soft);stroke-width:1.5}.leader{stroke:var(--soft);stroke-width:.7}
.chosen{fill:var(--key);stroke:var(--key)}.held{fill:var(--key);fill-opacity:.3;stroke:var(--key);stroke-width:1.5}
.refused{fill:var(--card);stroke:var(--bad);stroke-width:1.5}.original{fill:var(--ink);stroke:var(--ink)}
.plot .curve{fill:none;stroke-width:2}.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}
.c4{fill:var(--c4)}.c5{fill:var(--c5)}.hollow{fill:none;stroke:var(--soft);stroke-dasharray:3 2}
.legend{color:var(--soft)}.key{display:inline-flex;align-items:center;gap:6px;margin-right:16px}
.sample{width:12px;height:12px}
"""
