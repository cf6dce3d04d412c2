"""The quantization report as text for terminals, and :func:`ingot.quant.report.page.html` for symmetry."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.quant.report import words
from ingot.quant.report.page import html as html
from ingot.quant.report.records import Audit, Candidate, Layer, Report
from ingot.report import pages
from ingot.report.text import items, section, table
from ingot.report.units import number, percent, size, times

# The number of layers that fits a terminal; the page shows all.
_MOST_LAYERS = 10


def text(report: Report) -> str:
    """Return a report as text."""
    name = f"{report.model}#{report.variant}" if report.variant else report.model
    lines = [f"{name}, quantized at {report.created}" if report.created else name, "", words.verdict(report)]
    lines += section("Metric", _metric(report))
    lines += section("Candidates", _candidates(report.candidates))
    lines += section("Outputs compared with the original's", agreement(report))
    lines += section(*_layers(report.layers))
    lines += section("Integer operators of the optimized graph", _audit(report.audit))
    where = [words.data(report.data), report.data.digest, report.machine]
    lines += section("Measured with", items(list(filter(None, where))))
    lines += section("Notes", items(report.notes))
    made = pages.versions(report.versions) or "unknown versions"
    return "\n".join([*lines, "", f"Made with {made}; report format {report.schema_version}", ""])


def agreement(report: Report) -> list[str]:
    """Return the outputs' agreement with the original's as a table."""
    rows = [(item.tensor, *words.agreement(item)) for item in report.outputs]
    return table([tuple(name.lower() for name in words.AGREEMENT), *rows]) if rows else []


def _metric(report: Report) -> list[str]:
    scores = (("before", report.before), ("after", report.after), ("drop", report.drop))
    rows = [(name, words.score(item)) for name, item in scores if item is not None]
    budget = [("allowed", number(report.budget))] if rows else []
    return [f"  {report.metric}", *table([*rows, *budget], "    ")] if rows else []


def _candidates(candidates: Sequence[Candidate]) -> list[str]:
    rows = [
        (
            item.name,
            times(words.mean(item.speedups.values())),
            size(item.size) if item.size else "",
            number(item.drop.value) if item.drop else "",
            words.outcome(item),
        )
        for item in words.by_speed(candidates)
    ]
    return _padded(table([("", "speed", "size", "drop"), *(row[:4] for row in rows)]), [row[4] for row in rows])


def _padded(lines: list[str], ends: list[str]) -> list[str]:
    """Return a table whose last column, of whole sentences, is aligned."""
    width = max(map(len, lines))
    return (
        [lines[0], *(f"{line.ljust(width)}  {end}" for line, end in zip(lines[1:], ends, strict=True))] if ends else []
    )


def _layers(layers: Sequence[Layer]) -> tuple[str, list[str]]:
    """Return the layers that hurt most, or if they are not ranked, those with the lowest signal-to-noise ratio."""
    known = [layer for layer in layers if layer.rank or layer.sqnr is not None]
    worst = sorted(known, key=lambda layer: (layer.rank or 1 << 63, layer.sqnr if layer.sqnr is not None else 1e150))
    rows = [
        (f"{layer.operator} {layer.name}", layer.scheme, words.decibels(layer.sqnr), percent(layer.clipped))
        for layer in worst[:_MOST_LAYERS]
    ]
    head = ("layer", "scheme", "SQNR", "clipped")
    return f"Layers that hurt most, of {len(layers)}", table([head, *rows]) if rows else []


def _audit(audit: Audit | None) -> list[str]:
    if audit is None:
        return []
    lines = table([(name, str(count)) for name, count in audit.quantized.items()])
    return lines + [f"  left in floating point: {item}" for item in audit.floats]
