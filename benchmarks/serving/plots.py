"""Plots as SVG, written by hand: throughput and latency of the contestants, and goodput by offered load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.sax.saxutils import escape

from benchmarks.serving.contestants import contestants
from benchmarks.serving.goals import Record, by_round, closed
from benchmarks.serving.models import SPECS

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 400, 60, 140, 34, 46
_COLOURS = (
    "#0b62d6",
    "#d6450b",
    "#0b8f4d",
    "#8a4fd0",
    "#b8860b",
    "#c2185b",
    "#00838f",
    "#5d4037",
    "#607d8b",
    "#333333",
)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """One axis: its title, whether it is logarithmic, and the values between which it runs."""

    title: str
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, title: str, values: Sequence[float], *, logarithmic: bool) -> Axis:
        if logarithmic:
            return cls(title, 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))), True)
        return cls(title, 0.0, max(values) * 1.05, False)

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        if self.logarithmic:
            value, low, high = (math.log10(number) for number in (value, self.low, self.high))
            return (value - low) / ((high - low) or 1)
        return (value - self.low) / ((self.high - self.low) or 1)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        step = 0.5 if self.high > 1.2 else 0.2
        return [number * step for number in range(int(self.high / step) + 1)]


def write(records: Sequence[Record], out: Path) -> list[tuple[str, Path]]:
    """Write all plots that the records have figures for; return their titles and files."""
    found = []
    for name, spec in SPECS.items():
        for form in spec.formats:
            lines = {c: _curve(records, c, name, form) for c in contestants()}
            title = f"{name}, {form}: throughput and latency with 1, 8 and 32 clients"
            found.append((title, f"{name}-{form}.svg", lines, "requests/s", "p50, ms", True))
        title = f"{name}: goodput within 50 ms by offered load, both as shares of the capacity"
        lines = {c: _goodput(records, c, name) for c in contestants()}
        found.append((title, f"{name}-goodput.svg", lines, "offered", "goodput", False))
    written = []
    for title, file, lines, x, y, logarithmic in found:
        shown = {label: points for label, points in lines.items() if points}
        if shown:
            (out / file).write_text(drawing(title, shown, x, y, logarithmic=logarithmic))
            written.append((title, out / file))
    return written


def drawing(title: str, lines: Mapping[str, Points], x: str, y: str, *, logarithmic: bool) -> str:
    """Return a plot of lines, each with its label."""
    across = Axis.of(x, [point[0] for points in lines.values() for point in points], logarithmic=logarithmic)
    up = Axis.of(y, [point[1] for points in lines.values() for point in points], logarithmic=logarithmic)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
        *_axes(across, up),
    ]
    for number, (label, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [_place(across, up, point) for point in points]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{colour}"/>' for left, top in places]
        height = _TOP + 16 + 18 * number
        parts.append(f'<text x="{_WIDTH - _RIGHT + 14}" y="{height}" fill="{colour}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axes(across: Axis, up: Axis) -> list[str]:
    parts = []
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in across.ticks():
        left, _ = _place(across, up, (value, up.low))
        parts.append(f'<line x1="{left:.1f}" y1="{_TOP}" x2="{left:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{left:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks():
        _, top = _place(across, up, (across.low, value))
        parts.append(f'<line x1="{_LEFT}" y1="{top:.1f}" x2="{right}" y2="{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{across.title}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{up.title}</text>')
    return parts


def _place(across: Axis, up: Axis, point: tuple[float, float]) -> tuple[float, float]:
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return _LEFT + width * across.share(point[0]), _TOP + height * (1 - up.share(point[1]))


def _curve(records: Sequence[Record], contestant: str, model: str, form: str) -> Points:
    points = []
    for clients in (1, 8, 32):
        what = closed(contestant, model, form, clients)
        rates, times = (list(by_round(records, what, key).values()) for key in ("rate", "p50_ms"))
        if rates and min(*rates, *times) > 0:
            points.append((median(rates), median(times)))
    return points


def _goodput(records: Sequence[Record], contestant: str, model: str) -> Points:
    shares: dict[float, list[float]] = {}
    for record in records:
        if (record["kind"], record["contestant"], record["model"]) == ("goodput", contestant, model):
            shares.setdefault(record["share"], []).append(record["rate"] / record["capacity"])
    return [(share, median(rates)) for share, rates in sorted(shares.items())]
