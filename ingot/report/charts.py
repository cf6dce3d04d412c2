"""Charts in SVG: points with intervals, curves and bars. A page that shows them needs :data:`STYLE`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape
from typing import Literal

from ingot.report.axes import Axis
from ingot.report.pages import COLORS
from ingot.report.text import short_labels

Kind = Literal["chosen", "held", "refused", "original"]
"""The role of a point or curve, which decides its colour and shape."""

_HEIGHT = 400.0
_RIGHT, _TOP, _BOTTOM = 24.0, 18.0, 48.0
_CHAR = 6.4  # the width of an average character at 12 px
# With more points than this, none is labelled.
_MOST_LABELS = 40
# The legend of more curves than this is to the right of a broad chart; otherwise it is below.
_MOST_BELOW = 3


@dataclass(frozen=True)
class _Canvas:
    """The size of a drawing, in pixels, and the longest label, in characters."""

    kind: Literal["broad", "narrow"]
    width: float
    left: float
    longest: int


# A page has every chart twice, and shows the one that fits: text must not shrink with the drawing.
_CANVASES = (_Canvas("broad", 860.0, 76.0, 30), _Canvas("narrow", 340.0, 66.0, 20))


@dataclass(frozen=True)
class Point:
    """A point with the interval of its y value; ``title`` is its tooltip."""

    label: str
    x: float
    y: float
    _: KW_ONLY
    low: float
    high: float
    kind: Kind
    title: str = ""


@dataclass(frozen=True)
class Curve:
    """Connected points, in order; a number as ``kind`` is an index of a colour."""

    label: str
    points: tuple[tuple[float, float], ...]
    kind: Kind | int


@dataclass(frozen=True)
class Bar:
    """A bar. ``color`` is the index of its colour; None leaves it hollow. Without a value only the text is shown."""

    label: str
    value: float | None
    text: str
    _: KW_ONLY
    color: int | None
    title: str = ""


def scatter(
    points: Sequence[Point], titles: tuple[str, str], limit: float | None = None, *, upside_down: bool = False
) -> str:
    """Return points over a logarithmic x axis.

    Args:
        points: the points; those far below the limit are drawn as triangles at the lower edge.
        titles: the titles of the x and the y axis.
        limit: the y value of a dashed line.
        upside_down: let the y axis point down.
    """
    return _drawn(lambda canvas: _scatter(canvas, points, titles, limit, upside_down)) if points else ""


def curves(
    items: Sequence[Curve], titles: tuple[str, str], *, log: bool = True, limit: tuple[float, str] | None = None
) -> str:
    """Return curves over logarithmic axes, or over linear axes that begin at 0.

    Args:
        items: the curves; those without points are left out.
        titles: the titles of the x and the y axis.
        log: whether the axes are logarithmic.
        limit: the y value of a dashed line, and its label.
    """
    items = [item for item in items if item.points]
    if not items:
        return ""
    return _drawn(lambda canvas: _curves(canvas, items, titles, log, limit))


def bars(items: Sequence[Bar], title: str) -> str:
    """Return horizontal bars, from the top to the bottom."""
    if all(item.value is None for item in items):
        return ""
    return _drawn(lambda canvas: _bars(canvas, items, title))


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return a line of HTML that explains classes of :func:`bars` and :func:`scatter`, given with their texts."""
    shown = "".join(
        f'<span class="key"><svg class="sample" aria-hidden="true"><rect class="{kind}" x="1" y="1" width="10" '
        f'height="10" rx="2"/></svg>{escape(text)}</span>'
        for kind, text in items
    )
    return f'<p class="legend">{shown}</p>'


def meter(share: float) -> str:
    """Return a small horizontal bar of a share of its width, from 0 to 1."""
    return f'<svg class="meter" aria-hidden="true"><rect width="{100 * share:.1f}%" height="100%" rx="3"/></svg>'


def image(chart: str, title: str = "", style: str = "") -> str:
    """Return a chart as a separate SVG file, with its title above it; of a chart for pages, the broad drawing.

    Args:
        chart: a drawing of this package.
        title: the text above it.
        style: CSS besides that of charts.
    """
    head, _, rest = chart[chart.index("<svg") : chart.index("</svg>") + 6].partition(">")
    width, height = map(int, head.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    top = 30 if title else 0  # the drawing is moved down by extending the view upwards
    head = head.replace(f'viewBox="0 0 {width} {height}"', f'viewBox="0 {-top} {width} {height + top}"')
    heading = _text(_CANVASES[0].left, -10, title, "heading") if title else ""
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + top}">'
        f"<style>{COLORS}{_SHAPES}{style}</style>"
        f'<rect y="{-top}" width="100%" height="100%" style="fill:var(--card)"/>{heading}{rest}\n'
    )


def _drawn(draw: Callable[[_Canvas], str]) -> str:
    return "".join(f'<div class="{canvas.kind}">{draw(canvas)}</div>' for canvas in _CANVASES)


def _scatter(
    canvas: _Canvas, points: Sequence[Point], titles: tuple[str, str], limit: float | None, upside_down: bool
) -> str:
    sign = -1.0 if upside_down else 1.0
    end = canvas.width - _RIGHT
    across = Axis.over([point.x for point in points], canvas.left, end, log=True, pad=0.12)
    low, high = _window(points, limit, sign)
    ends = (_HEIGHT - _BOTTOM, _TOP)
    up = Axis.over((low, high), *(ends[::-1] if upside_down else ends), pad=0.1)
    drawn = [_grid(across, up, titles)]
    if limit is not None:
        y = up.at(limit)
        drawn.append(_line(canvas.left, y, end, y, "limit"))
        drawn.append(_text(canvas.left + 6, y + 14, "budget", "note"))
    beneath = [sign * point.y < min(sign * low, sign * high) for point in points]
    drawn += [_point(point, across, up, below) for point, below in zip(points, beneath, strict=True)]
    if len(points) <= _MOST_LABELS:
        names = [
            name + (f" ({point.y:.4g})" if below else "")
            for name, point, below in zip(
                short_labels([point.label for point in points], canvas.longest), points, beneath, strict=True
            )
        ]
        # The first ones get the best places.
        order = sorted(range(len(points)), key=lambda number: _RANKS.index(points[number].kind))
        spots = [(across.at(points[number].x), up.at(points[number].y), names[number]) for number in order]
        drawn += _labels(canvas, spots)
    return _svg(canvas, "".join(drawn), _HEIGHT, f"{titles[1]} against {titles[0]}")


_RANKS: tuple[Kind, ...] = ("chosen", "original", "held", "refused")


def _curves(
    canvas: _Canvas, items: Sequence[Curve], titles: tuple[str, str], log: bool, limit: tuple[float, str] | None
) -> str:
    origin = [] if log else [0.0]
    height, broad = 320.0, canvas.kind == "broad"
    beside = broad and len(items) > _MOST_BELOW
    right = canvas.width - (160.0 if beside else _RIGHT)
    across = Axis.over([*origin, *(x for item in items for x, _ in item.points)], canvas.left, right, log=log, pad=0.08)
    bounds = [*origin, *([] if limit is None else limit[:1])]
    up = Axis.over([*bounds, *(y for item in items for _, y in item.points)], height - _BOTTOM, _TOP, log=log, pad=0.1)
    drawn = [_grid(across, up, titles)]
    if limit is not None:
        y = up.at(limit[0])
        drawn += [_line(canvas.left, y, right, y, "limit"), _text(right - 6, y - 6, limit[1], "end note")]
    left, top = (right + 16, _TOP + 16) if beside else (16, height + 10)
    names = short_labels([item.label for item in items], canvas.longest if beside else 60 if broad else 44)
    for number, (item, name) in enumerate(zip(items, names, strict=True)):
        spots = [(across.at(x), up.at(y)) for x, y in item.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        drawn.append(f'<polyline class="curve {_class(item.kind)}" points="{path}"/>')
        drawn += [_shape(x, y, item.kind) for x, y in spots]
        y = top + 20 * number
        drawn += [_shape(left, y - 4, item.kind), _text(left + 12, y, name)]
    return _svg(canvas, "".join(drawn), height + (0 if beside else 20 * len(items)), f"{titles[1]} against {titles[0]}")


def _bars(canvas: _Canvas, items: Sequence[Bar], title: str) -> str:
    values = [item.value for item in items if item.value is not None]
    step = 22.0 if len(items) <= 40 else 16.0
    names = short_labels([item.label for item in items], 46 if canvas.kind == "broad" else canvas.longest)
    left = min(0.42 * canvas.width, 20 + 7.4 * max(map(len, names)))
    low, high = min(0.0, *values), max(0.0, *values)
    axis = Axis.over((low, high), left, canvas.width - 80, pad=0)
    zero = axis.at(0.0)
    drawn = []
    for number, (item, name) in enumerate(zip(items, names, strict=True)):
        y = 4 + number * step
        kind = "hollow" if item.color is None else f"c{item.color}"
        end = zero if item.value is None else axis.at(item.value)
        bar = (
            f'<rect class="{kind}" x="{min(zero, end):.1f}" y="{y + 2:.1f}" width="{max(abs(end - zero), 1):.1f}" '
            f'height="{step - 6:.1f}" rx="2"/>'
        )
        middle = y + step / 2 + 3
        drawn.append(
            f"<g>{_title(item.title or item.label)}{_text(left - 8, middle, name, 'end mono')}"
            f"{'' if item.value is None else bar}{_text(max(zero, end) + 6, middle, item.text, 'note')}</g>"
        )
    return _svg(canvas, "".join(drawn), 10 + step * len(items), title)


def _window(points: Sequence[Point], limit: float | None, sign: float) -> tuple[float, float]:
    """Return the visible range of y; one useless model must not compress the others into a line."""
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


def _class(kind: Kind | int) -> str:
    return f"c{kind}" if isinstance(kind, int) else kind


def _shape(x: float, y: float, kind: Kind | int) -> str:
    if kind == "original":
        return f'<rect class="original" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'
    return f'<circle class="{_class(kind)}" cx="{x:.1f}" cy="{y:.1f}" r="{7 if kind == "chosen" else 5}"/>'


def _labels(canvas: _Canvas, spots: Sequence[tuple[float, float, str]]) -> list[str]:
    """Place names next to their points, where they overlap neither each other nor a point; those without room go."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y, _ in spots]
    drawn = []
    for x, y, label in spots:
        width = _CHAR * len(label)
        places = [
            (x + 11 if right else x - 11 - width, y + 4 + sign * shift)
            for shift in range(0, int(_HEIGHT / 2), 13)
            for sign in (-1, 1)
            for right in (True, False)
        ]
        boxes = [
            (left - 3, base - 10, left + width + 3, base + 2)
            for left, base in places
            if left > canvas.left and left + width < canvas.width and _TOP < base < _HEIGHT - _BOTTOM - 2
        ]
        box = next((box for box in boxes if not any(_overlap(box, other) for other in taken)), None)
        if box is None:
            continue
        taken.append(box)
        left, base = box[0] + 3, box[3] - 2
        if abs(base - 4 - y) > 20:
            drawn.append(_line(x, y, left - 2 if left > x else left + width + 2, base - 4, "leader"))
        drawn.append(_text(left, base, label))
    return drawn


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _grid(across: Axis, up: Axis, titles: tuple[str, str]) -> str:
    bottom, top = max(up.start, up.end), min(up.start, up.end)
    left, right = across.start, across.end
    drawn = []
    for value, text in across.ticks():
        x = across.at(value)
        drawn += [_line(x, top, x, bottom, "grid"), _text(x, bottom + 18, text, "middle note")]
    for value, text in up.ticks():
        y = up.at(value)
        drawn += [_line(left, y, right, y, "grid"), _text(left - 8, y + 4, text, "end note")]
    middle = (top + bottom) / 2
    drawn.append(_text((left + right) / 2, bottom + 40, titles[0], "middle note"))
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    drawn.append(f'<text class="middle note" x="14" y="{middle:.1f}" {turned}>{escape(titles[1])}</text>')
    return "".join(drawn)


def _svg(canvas: _Canvas, content: str, height: float, title: str) -> str:
    return (
        f'<svg class="plot" role="img" viewBox="0 0 {canvas.width:.0f} {height:.0f}" '
        f'aria-label="{escape(title)}">{content}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


_SHAPES = (
    """
:root{--c0:#3564d4;--c1:#0d8a72;--c2:#b4690e;--c3:#8b46c4;--c4:#c2376f;--c5:#4d7c0f;--c6:#00838f;--c7:#8d5a3b;
--c8:#607d8b;--c9:#1d2433}
@media (prefers-color-scheme:dark){:root{--c0:#7ea2ff;--c1:#4fd1b5;--c2:#f0b05e;--c3:#c79bf2;--c4:#f590b8;--c5:#a3d65c;
--c6:#5ed0dc;--c7:#d0a184;--c8:#a3b8c2;--c9:#e4e7ee}}
.plot{font:12px system-ui,sans-serif}.plot text{fill:var(--ink);stroke:var(--card);stroke-width:3px;paint-order:stroke}
.plot .note{fill:var(--soft)}.plot .end{text-anchor:end}.plot .middle{text-anchor:middle}
.plot .heading{font-weight:bold}
.plot .mono{font:12px ui-monospace,monospace}.grid{stroke:var(--line)}.limit{stroke:var(--bad);stroke-dasharray:6 5}
.whisker{stroke:var(--soft);stroke-width:1.5}.leader{stroke:var(--soft);stroke-width:.7}
.chosen{fill:var(--key);stroke:var(--key)}.held{fill:var(--key);fill-opacity:.3;stroke:var(--key);stroke-width:1.5}
.refused{fill:var(--card);stroke:var(--bad);stroke-width:1.5}.original{fill:var(--ink);stroke:var(--ink)}
.hollow{fill:none;stroke:var(--soft);stroke-dasharray:3 2}.plot .curve{fill:none;stroke-width:2}
""".replace("\n", "")
    + "".join(f".c{n}{{fill:var(--c{n})}}.curve.c{n}{{stroke:var(--c{n})}}" for n in range(10))
)
STYLE = (
    _SHAPES
    + """
.plot{display:block;width:100%;height:auto}.broad .plot{max-width:1050px}.narrow{display:none}
@media (max-width:700px){.broad{display:none}.narrow{display:block}}
.legend{color:var(--soft)}.key{display:inline-flex;align-items:center;gap:6px;margin-right:16px}
.sample{width:12px;height:12px}.meter{width:100%;height:8px;fill:var(--key)}
"""
)
