"""Scores, speed-ups and acceptance as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ingot.model_store.format.evidence import Agreement, BatchLatency
from ingot.quant.report.records import Candidate, DataRecord, Report, Score
from ingot.report.units import number, percent, size
from ingot.runtime.profiling.profile import STEADY


def score(item: Score | None) -> str:
    """Return a value with its interval."""
    if item is None:
        return ""
    if item.low == item.high == item.value:
        return number(item.value)
    return f"{number(item.value)} [{number(item.low)}, {number(item.high)}]"


def mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean of the values above 0, or None."""
    held = [math.log(value) for value in values if value > 0]
    return math.exp(sum(held) / len(held)) if held else None


def latency(items: Sequence[BatchLatency]) -> float | None:
    """Return the geometric mean of the seconds over all batches."""
    return mean(item.seconds for item in items)


def decibels(value: float | None) -> str:
    """Return a signal to noise ratio."""
    return "" if value is None else f"{value:.1f} dB" if value < 200 else "no noise"


def agreement(item: Agreement) -> tuple[str, ...]:
    """Return cosine, SQNR, share of equal top classes and largest error of one output."""
    return (f"{item.cosine:.4f}", decibels(item.sqnr), percent(item.top1), f"{item.error:.1e}")


AGREEMENT = ("Output", "Cosine", "SQNR", "Same top class", "Largest error")


def data(item: DataRecord) -> str:
    """Return a description of the data, in a line."""
    parts = [item.source or "generated inputs"]
    if item.calibration_rows:
        parts.append(f"{item.calibration_rows} rows for calibration")
    if item.evaluation_rows:
        held_out = ", none of them among those" if item.held_out and item.calibration_rows else ""
        parts.append(f"{item.evaluation_rows} rows for the metric{held_out}")
    return "; ".join(parts)


def outcome(item: Candidate) -> str:
    """Return the result of a candidate: that it was chosen, or the reason why not."""
    if item.chosen:
        return "chosen" if item.holds else "chosen, over the budget"
    return item.rejected or item.remark or ("within the budget" if item.holds else "over the budget")


def by_speed(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates, the fastest first."""
    return sorted(candidates, key=lambda item: -(mean(item.speedups.values()) or 0))


def speed(speedups: Mapping[int, float]) -> str:
    """Return how fast something is, in a clause."""
    found = mean(speedups.values())
    if found is None:
        return "not timed"
    batches = ", ".join(map(str, speedups))
    several = f" (geometric mean over the batches {batches})" if len(speedups) > 1 else f" at batch {batches}"
    return f"{found:.2f} times as fast as the original{several}"


def uncertainty(latency: Sequence[BatchLatency]) -> tuple[str, ...]:
    """Return remarks on a timing that other programs disturbed."""
    disturbed = ", ".join(str(item.rows) for item in latency if item.disturbed)
    wide = {item.rows: item.spread for item in latency if item.spread > STEADY}
    found = []
    if disturbed:
        found.append(
            "other programs used the processor during the timing: the speed-ups at batch "
            f"{disturbed} are ratios of CPU time"
        )
    if wide:
        listed = ", ".join(f"{share:.0%} at batch {rows}" for rows, share in wide.items())
        found.append(f"the speed-ups may be wrong by {listed}: repeat the command on a machine without other work")
    return tuple(found)


def verdict(report: Report) -> str:
    """Return the result and its reason in a sentence."""
    chosen = report.chosen
    if chosen is None:
        why = f": {report.reason}" if report.reason else ""
        return f"{_tried(report.candidates)}; the model is unchanged{why}."
    parts = [f"{chosen.name} {_why(report, chosen)}: {speed(chosen.speedups)}"]
    if report.size and chosen.size:
        parts.append(f"{size(chosen.size)} instead of {size(report.size)}")
    if chosen.drop is not None:
        parts.append(_loss(report, chosen))
    return "; ".join(parts) + "."


def _tried(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "Nothing was tried"
    return f"{candidates[0].name} was tried" if len(candidates) == 1 else f"{len(candidates)} candidates were tried"


def _why(report: Report, chosen: Candidate) -> str:
    count = len(report.candidates)
    if report.reason or not chosen.holds:
        return f"was kept although it {report.reason or 'exceeds the budget'}"
    if count == 1:
        return "is within the budget"
    accepted = [mean(item.speedups.values()) or 0 for item in report.candidates if item.accepted]
    if len(accepted) == 1:
        return f"is the only one of {count} candidates that is within the budget and faster than the original"
    how = "is the fastest" if (mean(chosen.speedups.values()) or 0) >= max(accepted) else "was chosen"
    return (
        f"{how} of the {len(accepted)} that are within the budget and faster than the original, of {count} candidates"
    )


def _loss(report: Report, item: Candidate) -> str:
    metric = report.metric or "the metric"
    drop = item.drop
    if drop is None:
        return f"{metric} unknown"
    direction = "better" if drop.value < 0 else "worse"
    change = "unchanged" if drop.value == 0 else f"{number(abs(drop.value))} {direction}"
    shown = Score(value=drop.value, low=drop.low, high=drop.high) if drop.value >= 0 else _turned(drop)
    interval = "" if shown.low == shown.high else f" (95 % interval {number(shown.low)} to {number(shown.high)})"
    return f"{metric} is {change}{interval} where {number(report.budget)} is allowed"


def _turned(drop: Score) -> Score:
    return Score(value=-drop.value, low=-drop.high, high=-drop.low)
