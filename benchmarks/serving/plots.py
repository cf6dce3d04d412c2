"""Plots of throughput and latency of the contestants, and of goodput by offered load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.serving.contestants import contestants
from benchmarks.serving.goals import Record, by_round, closed
from benchmarks.serving.models import SPECS
from ingot.report import charts
from ingot.report.charts import Curve

Points = Sequence[tuple[float, float]]


def write(records: Sequence[Record], out: Path) -> list[tuple[str, Path]]:
    """Write all plots that the records have figures for; return their titles and files."""
    found = []
    for name, spec in SPECS.items():
        for form in spec.formats:
            lines = {c: _latency(records, c, name, form) for c in contestants()}
            title = f"{name}, {form}: throughput and latency with 1, 8 and 32 clients"
            found.append((title, f"{name}-{form}.svg", lines, ("requests/s", "p50, ms"), True))
        title = f"{name}: goodput within 50 ms by offered load, both as shares of the capacity"
        lines = {c: _goodput(records, c, name) for c in contestants()}
        found.append((title, f"{name}-goodput.svg", lines, ("offered", "goodput"), False))
    written = []
    for title, file, lines, titles, log in found:
        items = [Curve(label, tuple(points), number % 10) for number, (label, points) in enumerate(lines.items())]
        if chart := charts.curves(items, titles, log=log):
            (out / file).write_text(charts.image(chart, title))
            written.append((title, out / file))
    return written


def _latency(records: Sequence[Record], contestant: str, model: str, form: str) -> Points:
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
