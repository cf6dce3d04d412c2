"""Quantizing an archive: check the data, try one recipe or search among all, and add the result with its evidence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ingot.errors import InvalidArgument, QuantizationError
from ingot.model_store import Archive, BlobFolder, Variant
from ingot.quant import halves, modules, packing
from ingot.quant.config import ENGINES, HalfRecipe, LayerRecipe, QuantConfig, Recipe
from ingot.quant.journal import Journal
from ingot.quant.layers import choose
from ingot.quant.metric import Metric, parse_metric
from ingot.quant.modules import Module
from ingot.quant.report import Report
from ingot.quant.samples import Data, Samples
from ingot.quant.search import Found, Search
from ingot.quant.source import Source
from ingot.quant.synthetic import synthetic
from ingot.quant.trial import FASTER, Trial, Workbench
from ingot.runtime import devices

Progress = Callable[[str], None]
Verdict = Literal["quantized", "nothing faster", "budget broken"]

# Rows that ranges are learnt from; more change nothing.
_CALIBRATION = 256
# Rows that the metric is taken of.
_EVALUATION = 2048
# With fewer rows than this, all serve for both.
_FEW = 16
_GENERATED = 64


@dataclass(frozen=True)
class Quantized:
    """What quantization gave.

    Attributes:
        archive: the given one with a new variant; the same one if no variant was found.
        report: what was tried and measured.
        verdict: whether there is a new variant, and if not, why.
        reason: the verdict in words.
    """

    archive: Archive
    report: Report
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Given:
    """The samples that a quantization works with.

    Attributes:
        calibration: what ranges are learnt from; None without data.
        evaluation: what the metric is taken of.
        held_out: whether nothing is learnt from the latter.
        generated: whether they are made up.
        notes: what should be known of them.
    """

    calibration: Samples | None
    evaluation: Samples
    held_out: bool = True
    generated: bool = False
    notes: tuple[str, ...] = ()


def quantize(
    archive: Archive | str | os.PathLike[str] | Module,
    data: Data | None = None,
    *,
    config: QuantConfig | Recipe | None = None,
    validate: Data | None = None,
    transform: str | None = None,
    journal: Path | None = None,
    progress: Progress = lambda step: None,
) -> Archive:
    """Add a quantized variant to an archive: the fastest that keeps its accuracy, or one by a named recipe.

    The archive comes back as it was if the search finds nothing that is faster and exact enough; :func:`run` tells why.

    Args:
        archive: an archive, the path of one, or a PyTorch module, which is exported on the way if ``data`` holds
            arrays by the names of its inputs.
        data: real inputs, and labels where the metric needs them; see :meth:`ingot.quant.samples.Samples.read`. Some
            hundred rows do. None: only recipes that need none, measured on generated inputs.
        config: the recipe, the metric, the budget and all else; by default a search whose result has a mean cosine of
            0.99 or more to the original's answers. A recipe alone will do too.
        validate: data that the metric is taken of; by default a part of ``data`` that nothing is learnt from.
        transform: how images become arrays, see :class:`ingot.quant.sources.transform.ImageTransform`.
        journal: a file that keeps the search's results as they come in. If the search is interrupted, the next one with
            the same file goes on where it was; it is removed at the end.
        progress: called with what begins now.

    Raises:
        InvalidArgument: the data does not fit the model or the metric, a layer to keep does not exist, or the
            archive is quantized already.
        QuantizationError: the recipe's result is slower or less exact than was asked; ``force`` keeps it.
    """
    return run(
        archive, data, config=config, validate=validate, transform=transform, journal=journal, progress=progress
    ).archive


def run(
    archive: Archive | str | os.PathLike[str] | Module,
    data: Data | None = None,
    *,
    config: QuantConfig | Recipe | None = None,
    validate: Data | None = None,
    transform: str | None = None,
    journal: Path | None = None,
    progress: Progress = lambda step: None,
) -> Quantized:
    """Do what :func:`quantize` does, and return the report and the verdict too."""
    config = config if isinstance(config, QuantConfig) else QuantConfig(recipe=config)
    if journal is not None and not journal.parent.is_dir():
        raise InvalidArgument(f"the journal {journal} cannot be kept: there is no folder {journal.parent}")
    if isinstance(archive, str | os.PathLike):
        original = Archive.open(archive)
    elif isinstance(archive, Archive):
        original = archive
    else:
        progress("Exporting")
        original = modules.exported(archive, data)
    blobs = BlobFolder.scratch()
    local = original.copy_to(blobs)
    source = Source(_parent(local, config))
    for precision in (config.recipe.precision,) if config.recipe else ("int8", "int4"):
        packing.free_name(local, precision)  # told before the work, not after
    choose(source.names, (*config.keep, *(config.recipe.keep if config.recipe else ())))
    metric = parse_metric(config.metric, source.signature)
    given = _given(source, data, validate, transform, config, metric)
    with contextlib.closing(
        Workbench(
            source,
            given.calibration,
            given.evaluation,
            metric,
            batches=config.batches,
            threads=config.threads,
            progress=progress,
        )
    ) as bench:
        work = packing.Work(local, blobs, bench, config, metric.name, given.held_out, given.generated, given.notes)
        if isinstance(config.recipe, HalfRecipe):
            report, result, fault = halves.add(work, config.recipe, progress)
            return Quantized(result, report, "quantized", fault)
        if config.recipe is not None:
            found, reason = _named(bench, config.recipe, config, progress)
            report, added = packing.add(work, found, progress)
            return Quantized(added or local, report, "quantized", reason)
        kept = Journal(journal, _identity(source, given, metric, config))
        if kept.resumed:
            progress(f"Going on after {kept.resumed} candidates of an interrupted search")
        found = Search(bench, config, kept, progress).run()
        report, added = packing.add(work, found, progress)
        kept.remove()
    verdict, reason = _verdict(found, config)
    return Quantized(added or original, report, verdict, reason)


def _parent(archive: Archive, config: QuantConfig) -> Variant:
    floats = [item for item in archive.variants if item.serving.recipe is None and item.serving.format == "onnx"]
    if not floats:
        raise InvalidArgument(f"'{archive.name}' has no floating-point variant of format 'onnx' to quantize")
    return floats[0]


def _given(
    source: Source,
    data: Data | None,
    validate: Data | None,
    transform: str | None,
    config: QuantConfig,
    metric: Metric,
) -> Given:
    if data is None and validate is None:
        return _generated(source, config, metric)
    signature = source.signature
    main = Samples.read(signature, data, transform=transform) if data is not None else None
    other = (
        Samples.read(signature, validate, transform=transform, purpose="validation data")
        if validate is not None
        else None
    )
    notes = (*(main.notes if main else ()), *(other.notes if other else ()))
    if other is not None:
        return _validated(main, other, config, metric, notes)
    if main is None:
        raise InvalidArgument("there is no data")
    metric.check(main)
    if main.rows < _FEW:
        notes = (*notes, f"all {main.rows} samples served for calibration and for the metric")
        return Given(main, main, held_out=False, notes=notes)
    first, second = main.split(min(0.5, _CALIBRATION / main.rows), config.seed)
    return Given(first, second.take(_EVALUATION, config.seed), notes=notes)


def _validated(
    main: Samples | None, other: Samples, config: QuantConfig, metric: Metric, notes: tuple[str, ...]
) -> Given:
    """Return what is there where data for the metric is given apart."""
    metric.check(other)
    evaluation = other.take(_EVALUATION, config.seed)
    if main is None:
        _check_recipe(config)
        return Given(None, evaluation, notes=(*notes, *_without_data(config)))
    same = main.digest == other.digest
    if same:
        notes = (*notes, "the metric was taken of the data that ranges were learnt from")
    return Given(main.take(_CALIBRATION, config.seed), evaluation, held_out=not same, notes=notes)


def _check_recipe(config: QuantConfig) -> None:
    if config.recipe is not None and config.recipe.needs_data:
        raise InvalidArgument(
            f"the recipe '{config.recipe.name}' learns ranges from data; give calibration data, or take dynamic-int8"
        )


def _without_data(config: QuantConfig) -> tuple[str, ...]:
    told = "recipes that learn ranges from data were not tried: there is no calibration data"
    return (told,) if config.recipe is None else ()


def _generated(source: Source, config: QuantConfig, metric: Metric) -> Given:
    _check_recipe(config)
    if metric.labels is not None:
        raise InvalidArgument(f"the metric '{metric.name}' needs labels, and there is no data")
    goldens = [golden.inputs for golden in source.variant.goldens()]
    samples = synthetic(source.signature, _GENERATED, config.seed, goldens)
    notes = ("measured on generated inputs alone: give real ones to be sure", *_without_data(config))
    return Given(None, samples, held_out=False, generated=True, notes=notes)


def _named(bench: Workbench, recipe: Recipe, config: QuantConfig, progress: Progress) -> tuple[Found, str]:
    """Try one recipe; return what it gives, and what is wrong with it where that is forced.

    Raises:
        QuantizationError: it gives nothing of use, or is slower or less exact than was asked and is not forced.
    """
    if not isinstance(recipe, LayerRecipe):
        raise InvalidArgument(f"{recipe!r} is no recipe")
    plan = replace(recipe.plan(bench.source), engine=(config.engines or ENGINES)[0])
    plan = plan.keep(choose(bench.source.names, (*config.keep, *recipe.keep)))
    if not plan.schemes:
        raise QuantizationError(
            f"nothing in this model can be quantized by '{recipe.name}': it has no layer left that the recipe takes"
        )
    progress(f"Trying {plan.name}")
    trial = bench.attempt(plan)
    if trial.failure:
        raise QuantizationError(trial.failure)
    if not trial.audit.quantized and not config.force:
        raise QuantizationError(
            f"ONNX Runtime computes nothing of the result of '{recipe.name}' in integers on this machine"
        )
    trial = bench.time_again([trial], 0.3)[0]
    faults = _faults(trial, config)
    if faults and not config.force:
        raise QuantizationError(f"the result of '{recipe.name}' {' and '.join(faults)}; force keeps it (--force)")
    return Found(trial, (trial,)), "; ".join(faults)


def _faults(trial: Trial, config: QuantConfig) -> list[str]:
    found: list[str] = []
    if trial.speed < FASTER:
        by_batch = ", ".join(f"{value:.2f}x at batch {rows}" for rows, value in trial.speedups.items())
        found.append(f"is not faster than the original on this machine ({by_batch})")
    if not trial.holds(config.max_drop):
        found.append(packing.loss(trial.drop, config.max_drop))
    return found


def _verdict(found: Found, config: QuantConfig) -> tuple[Verdict, str]:
    if found.chosen is not None:
        return "quantized", ""
    if not found.trials:
        return "nothing faster", (
            "nothing in this model can be quantized" if found.complete else "the time was up before anything was tried"
        )
    fast = [trial for trial in found.trials if not trial.failure and trial.speed >= FASTER]
    if not fast:
        return "nothing faster", "no candidate is faster than the original on this machine"
    best = min(fast, key=lambda trial: trial.drop)
    if best.holds(config.max_drop):
        return "nothing faster", "no candidate was faster than the original when it was timed once more"
    return "budget broken", (
        f"no candidate that is faster keeps the metric within {config.max_drop:g}; the most exact is "
        f"'{best.plan.name}': it loses {best.drop:.4g} and is {best.speed:.2f} times as fast"
    )


def _identity(source: Source, given: Given, metric: Metric, config: QuantConfig) -> dict[str, object]:
    """Return what results of a search depend on."""
    return {
        "journal": 1,
        "model": source.variant.descriptor.digest,
        "calibration": given.calibration.digest if given.calibration else "",
        "evaluation": given.evaluation.digest,
        "metric": metric.name,
        "batches": list(config.batches),
        "threads": config.threads,
        "machine": devices.describe(),
        "versions": packing.provenance(source.variant, ()).versions,
    }
