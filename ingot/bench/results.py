"""Results of measurements as rows: for the terminal, CSV, JSON and a page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from ingot.bench.measurement import Objective, Point
from ingot.report import pages, units
from ingot.report.charts import STYLE, Bar, Curve, bars, curves
from ingot.report.units import duration

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
_SHOWN = ("p50", "p90", "p99")
# Bars of the histogram.
_BARS = 24


@dataclass(frozen=True, kw_only=True)
class Report:
    """A finished run.

    Attributes:
        target: the model and its server, in one line.
        payload: what was sent, in one line.
        command: repeats the run.
        points: in the order in which they were measured.
        objective: of a search.
        best: the highest rate that holds it; None if there is none, or no search.
    """

    target: str
    payload: str
    command: str
    points: Sequence[Point]
    objective: Objective | None = None
    best: Point | None = None

    def json(self) -> dict[str, Any]:
        """Return the results for programs; times are in seconds."""
        found: dict[str, Any] = {
            "target": self.target,
            "payload": self.payload,
            "command": self.command,
            "points": [record(point) for point in self.points],
        }
        if self.objective is not None:
            found["objective"] = {"quantile": self.objective.quantile, "seconds": self.objective.seconds}
            found["highest_rate"] = self.best.offered if self.best else None
        return found

    def csv(self) -> str:
        """Return a line for each point."""
        rows = [{key: value for key, value in record(point).items() if key != "errors"} for point in self.points]
        output = io.StringIO()
        writer = csv.DictWriter(output, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
        return output.getvalue()

    def html(self) -> str:
        """Return a page with the table, latency against throughput, and the distribution of latencies."""
        sections = [
            ("Results", f"{_table(self.points)}<p>{escape(LEGEND)}</p>"),
            ("Latency against throughput", _throughput(self.points)),
            *((f"Latencies, {escape(point.name)}", histogram(point)) for point in self.points),
            (
                "Errors",
                pages.listing([f"{p.name}: {n} x {text}" for p in self.points for text, n in p.total.errors.items()]),
            ),
        ]
        if self.objective is not None:
            sections.insert(0, ("Objective", f"<p>{escape(self.verdict())}</p>"))
        footer = pages.code(self.command)
        return pages.page(self.target, "load report", escape(self.payload), sections, footer, STYLE)

    def verdict(self) -> str:
        """Return the result of a search in one line."""
        if self.best is None:
            return f"no rate was found that holds a {self.objective}"
        return f"{units.rate(self.best.offered)} requests per second hold a {self.objective}"


def record(point: Point) -> dict[str, Any]:
    """Return a point for programs; times are in seconds."""
    known = len(point.total.latencies) > 0
    stages = {
        f"server_{stage}": point.stage(stage) for stage in ("queue", "compute_input", "compute_infer", "compute_output")
    }
    return {
        "clients": point.clients or None,
        "offered_rate": point.offered or None,
        "rate": point.total.rate,
        "samples_rate": point.total.rate * point.samples,
        "requests": len(point.total.latencies),
        "failed": point.total.failed,
        "mean": float(point.total.latencies.mean()) if known else None,
        **{name: point.quantile(share) if known else None for name, share in _QUANTILES.items()},
        "max": float(point.total.latencies.max()) if known else None,
        **_streams(point),
        "seconds": point.total.seconds,
        "stable": point.stable,
        "waited": point.total.waited,
        "delay_p99": float(np.quantile(point.total.delays, 0.99)) if known else None,
        "generator_cpu": point.total.cpu,
        **stages,
        "server_batch": point.batch,
        "errors": dict(point.total.errors),
    }


def _streams(point: Point) -> dict[str, float | None]:
    """Return the times of streams; None if answers are not streams."""
    times = {"ttft": point.first, "itl": point.gap}
    quantiles = {f"{name}_{key}": of(_QUANTILES[key]) for name, of in times.items() for key in _SHOWN}
    rate = point.total.tokens / point.total.seconds if len(point.total.first) else None
    return {"tokens_rate": rate, **{name: None if math.isnan(value) else value for name, value in quantiles.items()}}


_OF_STREAMS = ("tokens/s", "ttft p50", "ttft p99", "itl p50", "itl p99")
COLUMNS = (
    "load", "req/s", "samples/s", *_OF_STREAMS, *_SHOWN, "max", "failed", "batch", "queue", "compute",
)  # fmt: skip
# The last three are the server's.
LEGEND = (
    "times in ms; ttft: to the first token; itl: between two tokens; batch, queue and compute: the server's counts; "
    "~ not stable"
)


def row(point: Point) -> list[str]:
    """Return the cells of a point under :data:`COLUMNS`; times are in ms."""
    total = point.total
    queue = point.stage("queue")
    compute = [point.stage(name) for name in ("compute_input", "compute_infer", "compute_output")]
    streams = [of(_QUANTILES[name]) for of in (point.first, point.gap) for name in ("p50", "p99")]
    latencies = [point.quantile(_QUANTILES[name]) for name in _SHOWN]
    latencies.append(float(total.latencies.max()) if len(total.latencies) else math.nan)
    if len(total.first):
        latencies[1] = latencies[3] = math.nan  # the table of streams has columns enough
    rate = f"{total.rate:.1f}" if 1 <= total.rate < 100 else units.rate(total.rate)
    return [
        point.name,
        f"~{rate}" if point.stable is False and point.done else rate,
        f"{total.rate * point.samples:,.0f}" if point.samples > 1 else "",
        f"{total.tokens / total.seconds:,.0f}" if len(total.first) else "",
        *("" if math.isnan(value) else _ms(value) for value in streams),
        *("" if math.isnan(value) else _ms(value) for value in latencies),
        str(total.failed) if total.failed else "",
        "" if point.batch is None else f"{point.batch:.1f}",
        "" if queue is None else _ms(queue),
        "" if compute[0] is None else _ms(sum(value or 0.0 for value in compute)),
    ]


def _ms(seconds: float) -> str:
    """Return a time in ms with three digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def warnings(point: Point, processes: int) -> list[str]:
    """Return the reasons to doubt a point, each with its remedy."""
    found = []
    if point.total.cpu > 0.9:
        found.append(
            f"{point.name}: the load generator was busy for {point.total.cpu:.0%} of the time; "
            f"results may be its own limit: use --processes {processes + 1} or more"
        )
    if point.total.waited:
        found.append(
            f"{point.name}: {point.total.waited:,} requests waited for a connection, which their latency includes; "
            "--connections allows more"
        )
    if point.stable is False:
        found.append(f"{point.name}: not stable: rate or latency differed by more than --tolerance to the end")
    return found


def shown(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of a table without its empty columns."""
    rows = [row(point) for point in points]
    used = [number for number in range(len(COLUMNS)) if number < 2 or any(cells[number] for cells in rows)]
    return [COLUMNS[number] for number in used], [[cells[number] for number in used] for cells in rows]


def _table(points: Sequence[Point]) -> str:
    titles, rows = shown(points)
    return pages.table(list(map(escape, titles)), [list(map(escape, cells)) for cells in rows])


def _throughput(points: Sequence[Point]) -> str:
    known = [point for point in points if len(point.total.latencies)]
    return curves(
        [
            Curve(name, tuple((p.total.rate, p.quantile(_QUANTILES[name]) * 1e3) for p in known), number)
            for number, name in enumerate(("p50", "p99"))
        ],
        ("requests per second", "latency in ms"),
    )


def histogram(point: Point) -> str:
    """Return the distribution of a point's latencies as bars, with widths that grow by the same factor."""
    latencies = point.total.latencies
    if not len(latencies):
        return ""
    low, high = float(latencies.min()), float(latencies.max())
    edges = np.geomspace(max(low, 1e-6), max(high, low * 1.01, 2e-6), _BARS + 1)
    edges[0], edges[-1] = min(low, edges[0]), max(high, edges[-1])
    counts = np.histogram(latencies, edges)[0]
    return bars(
        [
            Bar(f"{duration(left)} to {duration(right)}", float(count), f"{count:,}", color=0)
            for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
        f"Latencies of {point.name}",
    )
