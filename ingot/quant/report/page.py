"""The quantization report as a page of HTML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from ingot.model_store.format.evidence import BatchLatency
from ingot.quant.report import words
from ingot.quant.report.records import Audit, Candidate, Layer, Report, Score
from ingot.report import charts, pages
from ingot.report.charts import Bar, Curve, Kind, Point
from ingot.report.units import duration, number, percent, size, times

# A longer table of layers is collapsed.
_LONGEST = 40
# A speed-up below this, or above its inverse, is implausible: latencies are between picoseconds and years.
_LEAST = 1e-21
# More points than this with one score are not drawn by it.
_MOST_EQUAL = 4
_COLORS = 6  # schemes with their own colour; further ones share the last


def html(report: Report) -> str:
    """Return a report as a page. All text in it is escaped: names come from the model."""
    sections = (
        ("Result", f'<p class="verdict">{escape(words.verdict(report))}</p>{_summary(report)}'),
        ("Frontier", _frontier(report)),
        ("Candidates", _candidates(report)),
        ("Latency by batch", _latency(report)),
        ("Outputs compared with the original's", _outputs(report)),
        ("Noise by layer", _noise(report.layers)),
        ("Layers", _layers(report.layers)),
        ("Integer operators of the optimized graph", _audit(report.audit)),
        ("Notes", pages.listing(report.notes)),
    )
    made = f" at <time>{escape(report.created)}</time>" if report.created else ""
    return pages.page(
        f"{report.model}#{report.variant}" if report.variant else report.model,
        "quantization report",
        f"quantized{made}",
        sections,
        f"{escape(pages.versions(report.versions))} &middot; report format {report.schema_version}",
        charts.STYLE + _STYLE,
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
    text = f"{words.score(report.drop)} of {number(report.budget)} allowed"
    return pages.mark(report.drop.value <= report.budget, escape(text), escape(text))


def _frontier(report: Report) -> str:
    lower = _lower_is_better(report)
    points = [
        Point(
            item.name,
            seconds,
            item.score.value,
            low=item.score.low,
            high=item.score.high,
            kind=_kind(item),
            title=_title(item),
        )
        for item in report.candidates
        if item.score is not None and (seconds := _milliseconds(item, report.baseline)) is not None
    ]
    if not points:
        return ""
    original = words.latency(report.baseline)
    before = report.before
    if original is not None and before is not None:
        points.insert(
            0, Point("original", original * 1e3, before.value, low=before.low, high=before.high, kind="original")
        )
    limit = None if before is None else before.value + (report.budget if lower else -report.budget)
    titles = ("ms per call, geometric mean over the batches", report.metric + (", lower is better" if lower else ""))
    if max(Counter(point.y for point in points).values()) > _MOST_EQUAL:
        return _speeds(report)
    keys = [("original", "original"), ("chosen", "chosen"), ("held", "accepted"), ("refused", "refused")]
    return charts.scatter(points, titles, limit, upside_down=lower) + charts.legend(keys)


def _speeds(report: Report) -> str:
    """Return the candidates' speed-ups as bars: in a plot, points with equal scores and their names would overlap."""
    items = [
        Bar(
            item.name,
            speed,
            ", ".join(filter(None, (times(speed), number(item.score.value) if item.score else "", _kind_name(item)))),
            color=None if _kind(item) == "refused" else 0 if item.chosen else 1,
            title=_title(item),
        )
        for item in words.by_speed(report.candidates)
        if (speed := words.mean(item.speedups.values())) is not None and _LEAST < speed < 1 / _LEAST
    ]
    about = f"<p>Speed-up over the original, and {escape(report.metric)}: many candidates have the same score.</p>"
    return about + charts.bars(items, "speed-up by candidate") if items else ""


def _kind_name(item: Candidate) -> str:
    return "chosen" if item.chosen else "" if item.accepted else "refused"


def _lower_is_better(report: Report) -> bool:
    """Return whether lower values of the metric are better, judged by the drops."""
    before = report.before
    return before is not None and any(
        (item.score.value - before.value) * item.drop.value > 0
        for item in report.candidates
        if item.score is not None and item.drop is not None and abs(item.drop.value) < 1e140
    )


def _milliseconds(item: Candidate, baseline: Sequence[BatchLatency]) -> float | None:
    """Return a candidate's latency from its speed-up: candidates were timed under different load."""
    original, speedup = words.latency(baseline), words.mean(item.speedups.values())
    if original is not None and speedup is not None and _LEAST < speedup < 1 / _LEAST:
        return original / speedup * 1e3
    seconds = words.latency(item.latency)
    return None if seconds is None else seconds * 1e3


def _kind(item: Candidate) -> Kind:
    return "chosen" if item.chosen else "held" if item.accepted else "refused"


def _title(item: Candidate) -> str:
    speedup = times(words.mean(item.speedups.values()))
    return ", ".join(filter(None, (item.name, words.score(item.score), speedup, words.outcome(item))))


def _candidates(report: Report) -> str:
    batches = sorted({rows for item in report.candidates for rows in item.speedups})[:8]
    head = ["Candidate", "", *(f"Batch {rows}" for rows in batches), "Mean", "Size", "Score", "Drop", "Recipe"]
    rows = [
        (
            f"<b>{escape(item.name)}</b>",
            _state(item),
            *(times(item.speedups.get(rows)) for rows in batches),
            times(words.mean(item.speedups.values())),
            size(item.size) if item.size else "",
            _score(item.score),
            _score(item.drop),
            _recipe(item),
        )
        for item in words.by_speed(report.candidates)
    ]
    return pages.table(head, rows)


def _state(item: Candidate) -> str:
    text = escape(words.outcome(item))
    if item.chosen:
        return pages.mark(item.holds, text, text)
    why = f'<small class="why">{text}</small>'
    return f"{pages.mark(False, '', 'refused')} {why}" if _kind(item) == "refused" else why


def _score(item: Score | None) -> str:
    value, _, interval = words.score(item).partition(" ")
    return f"{value}<br><small>{interval}</small>" if interval else value


def _recipe(item: Candidate) -> str:
    if not item.recipe:
        return ""
    content = escape(json.dumps(item.recipe, default=str))
    return pages.details("show", f'<code class="recipe">{content}</code>')


def _latency(report: Report) -> str:
    chosen = report.chosen
    if chosen is None or not chosen.latency:
        return ""
    drawn = latency_curves(("original", report.baseline), (chosen.name, chosen.latency))
    rows = latency_rows(report.baseline, chosen.latency, chosen.speedups)
    return drawn + pages.table(("Batch", "Original", "Chosen", "Speed-up"), rows)


def latency_curves(*sides: tuple[str, Sequence[BatchLatency]]) -> str:
    """Return the latency of two models by batch as curves."""
    kinds: tuple[Kind, Kind] = ("original", "chosen")
    items = [
        Curve(label, tuple((item.rows, item.seconds * 1e3) for item in latency if item.rows), kind)
        for (label, latency), kind in zip(sides, kinds, strict=True)
    ]
    return charts.curves(items, ("rows per call", "ms per call"))


def latency_rows(
    before: Sequence[BatchLatency], after: Sequence[BatchLatency], speedups: Mapping[int, float]
) -> list[tuple[str, ...]]:
    """Return batch, latency before and after, and speed-up as rows of a table."""
    first = {item.rows: item.seconds for item in before}
    return [
        (
            str(item.rows),
            duration(first[item.rows]) if item.rows in first else "",
            duration(item.seconds),
            times(speedups.get(item.rows)),
        )
        for item in after
    ]


def _outputs(report: Report) -> str:
    return pages.table(words.AGREEMENT, [(pages.code(item.tensor), *words.agreement(item)) for item in report.outputs])


def _noise(layers: Sequence[Layer]) -> str:
    colors = _colors(layers)
    items = [
        Bar(
            layer.name,
            layer.sqnr,
            (words.decibels(layer.sqnr) or layer.scheme) + (f"  #{layer.rank}" if layer.rank else ""),
            color=colors[layer.scheme],
            title=f"{layer.operator} {layer.name}, {layer.scheme}",
        )
        for layer in layers
    ]
    drawn = charts.bars(items, "signal to quantization noise by layer, dB")
    if not drawn:
        return ""
    keys = [("hollow" if color is None else f"c{color}", scheme) for scheme, color in colors.items()]
    intro = (
        "<p>Signal to quantization noise of each layer's output when it alone is quantized, in the graph's order: a "
        "short bar is a noisy layer. #1 hurts the metric most.</p>"
    )
    return intro + charts.legend(keys) + drawn


def _colors(layers: Sequence[Layer]) -> dict[str, int | None]:
    """Return a colour for each scheme except floating point."""
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
            percent(layer.clipped),
        )
        for layer in layers
    ]
    shown = pages.table(("Layer", "Operator", "Scheme", "Hurts", "SQNR", "Input range", "Clipped"), rows)
    return shown if len(rows) <= _LONGEST else pages.details(f"{len(rows)} layers", shown)


def _range(layer: Layer) -> str:
    return "" if layer.low is None or layer.high is None else f"{layer.low:.4g} to {layer.high:.4g}"


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return ""
    counts = pages.table(("Operator", "Count"), [(pages.code(name), str(n)) for name, n in audit.quantized.items()])
    if not audit.floats:
        return f"{counts}<p>No floating-point operator is left between quantized ones.</p>"
    return f"{counts}<p>Left in floating point between quantized operators:</p>{pages.listing(audit.floats)}"


_STYLE = """
.verdict{font-size:16px;margin-bottom:14px}td{white-space:nowrap;padding-right:14px}
td:first-child,.why,.recipe{white-space:normal}.why{display:block;min-width:14em}
summary{cursor:pointer;color:var(--soft)}td details{max-width:28em}
"""
