"""The quantization report as one page of HTML that needs nothing else: no script, no font, no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from ingot import pages
from ingot.model_store.format.evidence import BatchLatency
from ingot.quant.report import Audit, Candidate, Layer, Report, Score, plots, words
from ingot.quant.report.plots import Bar, Curve, Kind, Point
from ingot.units import duration, size

# A longer table of layers is folded.
_LONGEST = 40
# A speed-up below this, or its inverse, is none: latencies lie between a picosecond and some years.
_LEAST = 1e-21
_COLORS = 6  # that plots have; more schemes share the last


def html(report: Report) -> str:
    """Return a report as a page; all text in it is escaped, whatever a model calls its parts."""
    sections = (
        ("Result", f'<p class="verdict">{escape(words.verdict(report))}</p>{_summary(report)}'),
        ("Frontier", _frontier(report)),
        ("Candidates", _candidates(report)),
        ("Latency by batch", _latency(report)),
        ("Outputs against the original's", _outputs(report)),
        ("Noise by layer", _noise(report.layers)),
        ("Layers", _layers(report.layers)),
        ("What is integer in the optimized graph", _audit(report.audit)),
        ("Notes", pages.listing(report.notes)),
    )
    made = f" at <time>{escape(report.created)}</time>" if report.created else ""
    return pages.page(
        f"{report.model}#{report.variant}" if report.variant else report.model,
        "quantization report",
        f"quantized{made}",
        sections,
        f"{escape(pages.versions(report.versions))} &middot; report format {report.schema_version}",
        plots.STYLE + _STYLE,
    )


def _summary(report: Report) -> str:
    chosen = report.chosen
    after = f"{words.score(report.after)} after" if report.after else ""
    scores = ", ".join(
        part for part in (f"{words.score(report.before)} before" if report.before else "", after) if part
    )
    sizes = [f"{size(report.size)} before" if report.size else "", f"{size(chosen.size)} after" if chosen else ""]
    rows = [
        (f"Metric {pages.code(report.metric)}", escape(scores)),
        ("Drop", _drop(report)),
        ("Size", escape(", ".join(filter(None, sizes)))),
        ("Data", escape(words.data(report.data))),
        ("Data digest", pages.code(report.data.digest) if report.data.digest else ""),
        ("Machine", escape(report.machine)),
        ("Threads", str(report.threads) if report.threads else ""),
    ]
    return pages.definitions(rows)


def _drop(report: Report) -> str:
    if report.drop is None:
        return ""
    text = f"{words.score(report.drop)}, where {words.number(report.budget)} is allowed"
    return pages.mark(report.drop.value <= report.budget, escape(text), escape(text))


def _frontier(report: Report) -> str:
    lower = _lower_is_better(report)
    points = [
        Point(item.name, seconds, item.score.value, item.score.low, item.score.high, _kind(item), _title(item))
        for item in report.candidates
        if item.score is not None and (seconds := _milliseconds(item, report.baseline)) is not None
    ]
    if not points:
        return ""
    original = words.latency(report.baseline)
    before = report.before
    if original is not None and before is not None:
        points.insert(0, Point("original", original * 1e3, before.value, before.low, before.high, "original"))
    limit = None if before is None else before.value + (report.budget if lower else -report.budget)
    titles = ("ms a call, geometric mean over the batches", report.metric + (", lower is better" if lower else ""))
    keys = [("original", "original"), ("chosen", "chosen"), ("held", "within the budget"), ("refused", "refused")]
    return plots.scatter(points, titles, limit, upside_down=lower) + plots.legend(keys)


def _lower_is_better(report: Report) -> bool:
    """Return which way the metric points, as its drops tell."""
    before = report.before
    return before is not None and any(
        (item.score.value - before.value) * item.drop.value > 0
        for item in report.candidates
        if item.score is not None and item.drop is not None and abs(item.drop.value) < 1e140
    )


def _milliseconds(item: Candidate, baseline: Sequence[BatchLatency]) -> float | None:
    """Return a candidate's time by its speed-up: candidates were timed at different moments of the machine."""
    original, speedup = words.latency(baseline), words.mean(item.speedups.values())
    if original is not None and speedup is not None and _LEAST < speedup < 1 / _LEAST:
        return original / speedup * 1e3
    seconds = words.latency(item.latency)
    return None if seconds is None else seconds * 1e3


def _kind(item: Candidate) -> Kind:
    return "chosen" if item.chosen else "held" if item.holds and not item.rejected else "refused"


def _title(item: Candidate) -> str:
    speedup = words.times(words.mean(item.speedups.values()))
    return ", ".join(filter(None, (item.name, words.score(item.score), speedup, item.rejected)))


def _candidates(report: Report) -> str:
    batches = sorted({rows for item in report.candidates for rows in item.speedups})[:8]
    head = ["Candidate", "", *(f"Batch {rows}" for rows in batches), "Mean", "Size", "Score", "Drop", "Recipe"]
    rows = [
        (
            f"<b>{escape(item.name)}</b>",
            _state(item),
            *(words.times(item.speedups.get(rows)) for rows in batches),
            words.times(words.mean(item.speedups.values())),
            size(item.size) if item.size else "",
            _score(item.score),
            _score(item.drop),
            _recipe(item),
        )
        for item in report.candidates
    ]
    return pages.table(head, rows)


def _state(item: Candidate) -> str:
    if item.chosen:
        return pages.mark(item.holds, "chosen", "chosen, over the budget")
    told = item.rejected or item.remark
    why = f' <small class="why">{escape(told)}</small>' if told else ""
    return (pages.mark(False, "", "refused") if _kind(item) == "refused" else "within the budget") + why


def _score(item: Score | None) -> str:
    value, _, interval = words.score(item).partition(" ")
    return f"{value}<br><small>{interval}</small>" if interval else value


def _recipe(item: Candidate) -> str:
    if not item.recipe:
        return ""
    content = escape(json.dumps(item.recipe, default=str))
    return f'<details><summary>show</summary><code class="recipe">{content}</code></details>'


def _latency(report: Report) -> str:
    chosen = report.chosen
    if chosen is None or not chosen.latency:
        return ""
    before = {item.rows: item.seconds for item in report.baseline}
    items = [
        _curve("original", report.baseline, "original"),
        _curve(chosen.name, chosen.latency, "chosen"),
    ]
    rows = [
        (
            str(item.rows),
            duration(before[item.rows]) if item.rows in before else "",
            duration(item.seconds),
            words.times(chosen.speedups.get(item.rows)),
        )
        for item in chosen.latency
    ]
    return plots.curves(items, ("rows a call", "ms a call")) + pages.table(
        ("Batch", "Original", "Chosen", "Speed-up"), rows
    )


def _curve(label: str, items: Sequence[BatchLatency], kind: Kind) -> Curve:
    return Curve(label, tuple((item.rows, item.seconds * 1e3) for item in items if item.rows), kind)


def _outputs(report: Report) -> str:
    return pages.table(words.AGREEMENT, [(pages.code(item.tensor), *words.agreement(item)) for item in report.outputs])


def _noise(layers: Sequence[Layer]) -> str:
    colors = _colors(layers)
    items = [
        Bar(
            layer.name,
            layer.sqnr,
            (words.decibels(layer.sqnr) or layer.scheme) + (f"  #{layer.rank}" if layer.rank else ""),
            colors[layer.scheme],
            f"{layer.operator} {layer.name}, {layer.scheme}",
        )
        for layer in layers
    ]
    drawn = plots.bars(items, "signal to quantization noise by layer, dB")
    if not drawn:
        return ""
    keys = [("hollow" if color is None else f"c{color}", scheme) for scheme, color in colors.items()]
    intro = (
        "<p>Signal to quantization noise of each layer's output when it alone is quantized, in the graph's order: a "
        "short bar is a layer that suffers. #1 hurts the metric most.</p>"
    )
    return intro + plots.legend(keys) + drawn


def _colors(layers: Sequence[Layer]) -> dict[str, int | None]:
    """Return a colour for each scheme, and none for those that are left in floating point."""
    schemes = dict.fromkeys(layer.scheme for layer in layers)
    whole = [scheme for scheme in schemes if not scheme.startswith("float")]
    return {scheme: min(whole.index(scheme), _COLORS - 1) if scheme in whole[:99] else None for scheme in schemes}


def _layers(layers: Sequence[Layer]) -> str:
    rows = [
        (
            pages.code(layer.name),
            escape(layer.operator),
            escape(layer.scheme),
            str(layer.rank or ""),
            words.decibels(layer.sqnr),
            _range(layer),
            words.share(layer.clipped),
        )
        for layer in layers
    ]
    shown = pages.table(("Layer", "Operator", "Scheme", "Hurts", "SQNR", "Input range", "Clipped"), rows)
    return shown if len(rows) <= _LONGEST else f"<details><summary>{len(rows)} layers</summary>{shown}</details>"


def _range(layer: Layer) -> str:
    return "" if layer.low is None or layer.high is None else f"{layer.low:.4g} to {layer.high:.4g}"


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return ""
    counts = pages.table(("Operator", "Count"), [(pages.code(name), str(n)) for name, n in audit.quantized.items()])
    if not audit.floats:
        return f"{counts}<p>No operator in floating point is left between quantized ones.</p>"
    return f"{counts}<p>Left in floating point between quantized operators:</p>{pages.listing(audit.floats)}"


_STYLE = """
.verdict{font-size:16px;margin-bottom:14px}td{white-space:nowrap;padding-right:14px}
td:first-child,.why,.recipe{white-space:normal}.why{display:block;min-width:14em}
summary{cursor:pointer;color:var(--soft)}td details{max-width:28em}
"""
