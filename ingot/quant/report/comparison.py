"""A comparison of two models as text for terminals, and as a page of HTML."""

from __future__ import annotations

from html import escape

from ingot.quant.report import words
from ingot.quant.report.page import latency_curves, latency_rows
from ingot.quant.report.records import ModelComparison, Score
from ingot.report import charts, pages
from ingot.report.charts import Kind, Point
from ingot.report.text import section, table
from ingot.report.units import number, size

_LATENCY = ("Batch", "Before", "After", "Speed-up")


def html(comparison: ModelComparison) -> str:
    """Return a comparison as a page. All text in it is escaped: names come from the models."""
    before, after = comparison.before, comparison.after
    outputs = [(pages.code(item.tensor), *words.agreement(item)) for item in comparison.outputs]
    curves = latency_curves((before.label, before.latency), (after.label, after.latency))
    sections = (
        ("Result", f"<p>{escape(verdict(comparison))}</p>{_summary(comparison)}"),
        ("Score and latency", _scores(comparison)),
        (
            "Latency by batch",
            curves + pages.table(_LATENCY, _latency(comparison)),
        ),
        ("Outputs of the second compared with the first's", pages.table(words.AGREEMENT, outputs)),
        ("Notes", pages.listing(comparison.notes)),
    )
    return pages.page(
        comparison.model,
        "comparison",
        f"{pages.code(before.label)} and {pages.code(after.label)} at <time>{escape(comparison.created)}</time>",
        sections,
        f"{escape(pages.versions(comparison.versions))} &middot; comparison format {comparison.schema_version}",
        charts.STYLE,
    )


def text(comparison: ModelComparison) -> str:
    """Return a comparison as text."""
    scores = (
        ("before", comparison.score_before),
        ("after", comparison.score_after),
        ("drop", comparison.drop),
    )
    outputs = [(item.tensor, *words.agreement(item)) for item in comparison.outputs]
    lines = [verdict(comparison), ""]
    for side, name in ((comparison.before, "before"), (comparison.after, "after")):
        lines.append(f"{name:>6}  {side.label}, {side.format}, {size(side.size)}")
    lines += section(comparison.metric, table([(name, words.score(item)) for name, item in scores if item]))
    lines += section("latency", table([tuple(map(str.lower, _LATENCY)), *_latency(comparison)]))
    if outputs:
        lines += section("outputs", table([tuple(map(str.lower, words.AGREEMENT)), *outputs]))
    lines += ["", f"on {_data(comparison)}", *(f"note: {note}" for note in comparison.notes)]
    return "\n".join([*lines, ""])


def verdict(comparison: ModelComparison) -> str:
    """Return a one-sentence comparison of the second model with the first."""
    speedup = words.mean(comparison.speedups.values())
    parts = [] if speedup is None else [f"{speedup:.2f} times as fast"]
    if comparison.before.size:
        parts.append(f"{comparison.size_ratio:.2f} times the size")
    if comparison.drop is not None:
        parts.append(_change(comparison.metric, comparison.drop))
    return f"{comparison.after.label} against {comparison.before.label}: {', '.join(parts)}."


def _change(metric: str, drop: Score) -> str:
    if drop.value == 0:
        return f"{metric} the same"
    chance = " (which may be chance)" if drop.low <= 0 <= drop.high else ""
    return f"{metric} {number(abs(drop.value))} {'worse' if drop.value > 0 else 'better'}{chance}"


def _summary(comparison: ModelComparison) -> str:
    first, second = comparison.score_before, comparison.score_after
    rows = [
        ("Before", f"{pages.code(comparison.before.label)} {escape(comparison.before.format)}"),
        ("After", f"{pages.code(comparison.after.label)} {escape(comparison.after.format)}"),
        (f"Metric {pages.code(comparison.metric)}", f"{words.score(first)} before, {words.score(second)} after"),
        ("Drop", words.score(comparison.drop)),
        ("Size", f"{size(comparison.before.size)} before, {size(comparison.after.size)} after"),
        ("Data", escape(_data(comparison))),
        ("Data digest", pages.code(comparison.data.digest) if comparison.data.digest else ""),
        ("Machine", escape(comparison.machine)),
        ("Threads", str(comparison.threads) if comparison.threads else ""),
    ]
    return pages.definitions(rows)


def _data(comparison: ModelComparison) -> str:
    return f"{comparison.data.source}, {comparison.data.evaluation_rows} rows"


def _scores(comparison: ModelComparison) -> str:
    kinds: tuple[Kind, Kind] = ("original", "chosen")
    sides = (comparison.before, comparison.after)
    points = [
        Point(side.label, seconds * 1e3, score.value, low=score.low, high=score.high, kind=kind, title=side.label)
        for side, score, kind in zip(sides, (comparison.score_before, comparison.score_after), kinds, strict=True)
        if score is not None and (seconds := words.latency(side.latency)) is not None
    ]
    first, second, drop = comparison.score_before, comparison.score_after, comparison.drop
    lower = bool(first and second and drop and (second.value > first.value) == (drop.value > 0) and drop.value)
    metric = comparison.metric + (", lower is better" if lower else "")
    return charts.scatter(points, ("ms per call, geometric mean over the batches", metric), upside_down=lower)


def _latency(comparison: ModelComparison) -> list[tuple[str, ...]]:
    return latency_rows(comparison.before.latency, comparison.after.latency, comparison.speedups)
