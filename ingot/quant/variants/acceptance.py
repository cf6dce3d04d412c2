"""Acceptance of results: whether one is kept, and the reason if not."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.errors import QuantizationError
from ingot.quant.config import QuantConfig, Recipe
from ingot.quant.graph.source import Source
from ingot.quant.measure.trial import FASTER, slowness
from ingot.quant.metric import within
from ingot.quant.report.records import Verdict
from ingot.quant.search.search import Found
from ingot.quant.variants import packing


def judge(recipe: Recipe, speedups: Mapping[int, float], drop: float, config: QuantConfig) -> list[str]:
    """Return the faults of a recipe's result.

    Raises:
        QuantizationError: the result has faults and is not forced.
    """
    found: list[str] = []
    if slow := slowness(speedups):
        by_batch = ", ".join(f"{value:.2f}x at batch {rows}" for rows, value in speedups.items())
        what = slow.partition(" (")[0] if slow.startswith("slower") else "not faster than the original"
        found.append(f"is {what} on this machine ({by_batch})")
    if not within(drop, config.max_drop):
        found.append(packing.loss(drop, config.max_drop))
    if found and not config.force:
        raise QuantizationError(f"the result of '{recipe.name}' {' and '.join(found)}; force keeps it (--force)")
    return found


def float64_hint(source: Source) -> str:
    """Return a clause for messages if the model's layers are float64, and an empty text otherwise."""
    return "; layers in float64 cannot be quantized: cast the model to float32 first" if source.double else ""


def of_search(found: Found, source: Source, config: QuantConfig) -> tuple[Verdict, str]:
    """Return the verdict on a search, and its reason in words.

    Raises:
        QuantizationError: no candidate can run.
    """
    if found.chosen is not None:
        return "quantized", ""
    if not found.trials:
        return "nothing faster", (
            f"nothing in this model can be quantized{float64_hint(source)}"
            if found.complete
            else "the time was up before anything was tried"
        )
    if found.failed:
        first = found.trials[0]
        raise QuantizationError(
            f"none of the {len(found.trials)} candidates can be run; '{first.plan.name}' failed: {first.failure}"
        )
    fast = [trial for trial in found.trials if not trial.failure and trial.faster]
    if not fast:
        whole = max((trial for trial in found.trials if not trial.failure), key=lambda trial: trial.speed)
        if whole.speed >= FASTER:
            return "nothing faster", (
                "no candidate is faster than the original without being slower at some batch size; "
                f"'{whole.plan.name}' is "
                f"{whole.speed:.2f} times as fast overall but {slowness(whole.speedups)}: pass the batch sizes that "
                "you serve"
            )
        return "nothing faster", "no candidate is faster than the original on this machine"
    best = min(fast, key=lambda trial: trial.drop)
    if best.holds(config.max_drop):
        return "nothing faster", "no candidate was faster than the original when it was timed once more"
    return "budget broken", (
        f"no candidate that is faster keeps the metric within {config.max_drop:g}; the most exact is "
        f"'{best.plan.name}': it loses {best.drop:.4g} and is {best.speed:.2f} times as fast"
    )
