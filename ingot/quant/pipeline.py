"""Quantizing an archive: check the data, try one recipe or search for a plan, and add the result with its evidence."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.errors import InvalidArgument, QuantizationError
from ingot.model_store import Archive, BlobFolder, Variant
from ingot.quant import modules
from ingot.quant.config import ENGINES, RECIPES, HalfRecipe, LayerRecipe, QuantConfig, Recipe
from ingot.quant.data.samples import Data
from ingot.quant.graph.decoder import DecoderSource
from ingot.quant.graph.layers import choose
from ingot.quant.graph.source import Source
from ingot.quant.measure import limits
from ingot.quant.measure.datasets import Datasets, prepare
from ingot.quant.measure.limits import Deadline, TimeUp
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.measure.trial import certain
from ingot.quant.metric import Metric
from ingot.quant.modules import Module
from ingot.quant.report.records import Report, Verdict
from ingot.quant.schemes.plan import EngineName
from ingot.quant.search.journal import Journal
from ingot.quant.search.search import Found, Search
from ingot.quant.variants import acceptance, halves, packing
from ingot.runtime.machine import devices

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
# Seconds per batch size and model for a named recipe, whose latencies are kept as evidence.
_TIMING = 0.3
_TITLES: dict[EngineName, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


@dataclass(frozen=True)
class Quantized:
    """The result of a quantization.

    Attributes:
        archive: the given one with a new variant; unchanged if no variant was found.
        report: the candidates and their measurements.
        journal: the search's results, to be removed once the archive is saved; None without a search.
    """

    archive: Archive
    report: Report
    journal: Journal | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether there is a new variant, and the reason if there is none."""
        return self.report.verdict

    @property
    def reason(self) -> str:
        """The verdict in words; for a forced variant, its faults."""
        return self.report.reason


def quantize(
    archive: Archive | str | os.PathLike[str] | Module,
    data: Data | None = None,
    *,
    config: QuantConfig | Recipe | None = None,
    validate: Data | None = None,
    transform: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    progress: Progress = lambda step: None,
) -> Archive:
    """Add a quantized variant to an archive: the fastest that keeps its accuracy, or one by a named recipe.

    Examples:
        >>> rows = np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)
        >>> config = ingot.QuantConfig(recipe=ingot.quant.DynamicInt8(), force=True)  # without a recipe: a search
        >>> quantized = ingot.quantize("net.ingot", {"x": rows}, config=config)
        >>> sorted(variant.name for variant in quantized.variants)
        ['fp32', 'int8']

    If the search finds nothing that is faster and exact enough, the archive is returned unchanged, and a warning is
    logged with the reason; :func:`run` also returns it.

    Args:
        archive: an archive, the path of one, or a PyTorch module, which is exported on the way if ``data`` holds
            arrays by the names of ``forward``'s parameters, whose dimensions other than the batch are then fixed.
        data: real inputs, all rows along the batch dimension, and labels where the metric needs them: arrays by name,
            the path of an ``.npz``, ``.npy`` or folder, or an iterable such as a ``DataLoader``; see
            :meth:`ingot.quant.data.samples.Samples.read`. A few hundred rows are enough. Without data, only recipes
            that need none are tried, measured on generated inputs.
        config: the recipe, the metric, the budget and other options; by default a search whose result has a mean cosine
            of 0.99 or more to the original's outputs. A recipe is accepted too.
        validate: data for the metric; by default a part of ``data`` that is not used for calibration.
        transform: how images become arrays, see :class:`ingot.quant.data.sources.transform.ImageTransform`.
        journal: a file that stores the search's results as they are measured. If the search is interrupted, the next
            one with the same file continues it; it is removed at the end.
        progress: called with the name of each step as it begins.

    Raises:
        InvalidArgument: the data does not fit the model or the metric, a layer to keep does not exist, or the
            archive is quantized already.
        QuantizationError: the recipe's result is slower or less exact than allowed, and not kept by ``force``; or no
            candidate of the search can run.
    """
    result = run(
        archive, data, config=config, validate=validate, transform=transform, journal=journal, progress=progress
    )
    if result.journal is not None:
        result.journal.remove()
    if result.verdict != "quantized":
        log.warning("%s; '%s' is returned unchanged", result.reason, result.archive.name)
    return result.archive


@limits.disk_watched()
def run(
    archive: Archive | str | os.PathLike[str] | Module,
    data: Data | None = None,
    *,
    config: QuantConfig | Recipe | None = None,
    validate: Data | None = None,
    transform: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    progress: Progress = lambda step: None,
    began: float | None = None,
) -> Quantized:
    """Quantize like :func:`quantize`, and also return the report and the verdict.

    The journal is kept, so that nothing is lost if the archive cannot be saved: call ``result.journal.remove()``
    afterwards. The configuration's budget counts from ``began``, in seconds of ``time.monotonic()``; by default from
    this call.
    """
    config = config if isinstance(config, QuantConfig) else QuantConfig(recipe=config)
    deadline = Deadline(config.budget, began)
    if journal is not None and not isinstance(journal, str | os.PathLike):
        raise InvalidArgument(f"the journal is of type {type(journal).__name__}; it must be the path of a file")
    kept_in = Path(journal) if journal is not None else None
    if kept_in is not None and not kept_in.parent.is_dir():
        raise InvalidArgument(f"the journal {journal} cannot be written: there is no folder {kept_in.parent}")
    _check_engine(config)
    if isinstance(archive, str | os.PathLike):
        original = Archive.open(archive)
    elif isinstance(archive, Archive):
        original = archive
    else:
        progress("Exporting")
        original = modules.exported(archive, data)
    blobs = BlobFolder.scratch()
    local = original.copy_to(blobs)
    try:
        added = _change_graph(local, blobs, config, (data, validate, transform), kept_in, progress, deadline)
    except TimeUp:
        reason = "the time was up before anything was tried"
        return Quantized(original, Report(model=original.name, verdict="nothing faster", reason=reason))
    return added if added.verdict == "quantized" else replace(added, archive=original)


def _change_graph(
    local: Archive,
    blobs: BlobFolder,
    config: QuantConfig,
    sources: tuple[Data | None, Data | None, str | None],
    journal: Path | None,
    progress: Progress,
    deadline: Deadline,
) -> Quantized:
    """Quantize an archive's ONNX graph; ``sources`` are the data, the validation data and the transform.

    Raises:
        TimeUp: the time for a search was over before it began.
    """
    parent = _parent(local, config)
    source = Source(parent) if parent.serving.generation is None else DecoderSource(parent)
    for name in (config.recipe.precision,) if config.recipe else ("int8", "int4", "bf16-openvino"):
        packing.free_name(local, name)  # fails before the work, not after it
    _check_kept(source, config)
    _check_recipe(source, config)
    datasets = prepare(source.variant, *sources, config)
    metric = datasets.metric
    with contextlib.closing(
        TrialRunner(
            source,
            calibration=datasets.calibration,
            evaluation=datasets.evaluation,
            metric=metric,
            batches=config.batches,
            threads=config.threads,
            progress=progress,
            check=deadline.check if config.recipe is None else lambda: None,
        )
    ) as runner:
        job = packing.Job(
            archive=local,
            blobs=blobs,
            runner=runner,
            config=config,
            metric=metric.name,
            datasets=datasets,
            notes=(*datasets.notes, *runner.notes),
            deadline=deadline,
        )
        if isinstance(config.recipe, HalfRecipe):
            report, result = halves.add(job, config.recipe, progress)
            return Quantized(result, report)
        if config.recipe is not None:
            found, reason = _named(runner, config.recipe, config, progress)
            report, added = packing.add(job, found, "quantized", reason, progress)
            return Quantized(added or local, report)
        kept = Journal(journal, _identity(source, datasets, metric, config))
        if kept.resumed:
            done = "a candidate" if kept.resumed == 1 else f"{kept.resumed} candidates"
            progress(f"Continuing after {done} of an interrupted search")
        found = Search(runner, config, kept, progress, deadline=deadline).run()
        if found.failed:
            kept.remove()  # the cause may be fixed before the next attempt
        report, added = packing.add(job, found, *acceptance.of_search(found, source, config), progress)
    return Quantized(added or local, report, kept)


def _check_kept(source: Source, config: QuantConfig) -> None:
    """Check the layers to keep.

    Raises:
        InvalidArgument: one does not exist, or they are all.
    """
    kept = choose(source.names, (*config.keep, *(config.recipe.keep if config.recipe else ())))
    if source.names and len(kept) == len(source.names):
        raise InvalidArgument(
            "every layer is kept in floating point, so that nothing is left to quantize; keep fewer (--keep)"
        )


def _check_recipe(source: Source, config: QuantConfig) -> None:
    """Check that a named recipe is for this kind of model.

    Raises:
        InvalidArgument: it is not.
    """
    recipe = config.recipe
    known = [
        kind.name for kind in RECIPES.values() if issubclass(kind, LayerRecipe) and {*kind.schemes} <= {*source.schemes}
    ]
    if recipe is not None and not source.one_call and recipe.name not in known:
        raise InvalidArgument(
            f"'{recipe.name}' is not for models that generate text: rows of a step must not influence each other, so "
            f"their weights alone are quantized; use {' or '.join(known)}"
        )


def _check_engine(config: QuantConfig) -> None:
    """Check that the engine has kernels for a named recipe.

    Raises:
        InvalidArgument: it has none.
    """
    recipe = config.recipe
    if recipe is None or _engine(config) != "openvino":
        return
    if not isinstance(recipe, LayerRecipe) or recipe.schemes != ("static",):
        raise InvalidArgument(
            f"OpenVINO has no kernels for the result of '{recipe.name}', only for that of 'static-int8'; leave out "
            "the engine, or use onnxruntime (--engine onnxruntime)"
        )


def _engine(config: QuantConfig) -> EngineName:
    """Return the engine for a named recipe."""
    return (config.engines or ENGINES)[0]


def _parent(archive: Archive, config: QuantConfig) -> Variant:
    floats = [item for item in archive.variants if item.serving.recipe is None and item.serving.format == "onnx"]
    if not floats:
        raise InvalidArgument(f"'{archive.name}' has no floating-point variant of format 'onnx' to quantize")
    return floats[0]


def _named(runner: TrialRunner, recipe: Recipe, config: QuantConfig, progress: Progress) -> tuple[Found, str]:
    """Try one recipe; return its result, and the faults of a result that is forced.

    Raises:
        QuantizationError: the result is unusable, or slower or less exact than allowed and not forced.
    """
    if not isinstance(recipe, LayerRecipe):
        raise InvalidArgument(f"{recipe!r} is not a recipe")
    plan = replace(recipe.plan(runner.source), engine=_engine(config))
    plan = plan.keep(choose(runner.source.names, (*config.keep, *recipe.keep)))
    if not plan.schemes:
        if recipe.plan(runner.source).schemes:
            raise QuantizationError(
                f"every layer that '{recipe.name}' supports is kept in floating point; keep fewer (--keep)"
            )
        raise QuantizationError(
            f"nothing in this model can be quantized by '{recipe.name}': it has no layer that the recipe supports"
            f"{acceptance.float64_hint(runner.source)}"
        )
    progress(f"Trying {plan.name}")
    trial = runner.attempt(plan, _TIMING, certain)
    if trial.failure:
        raise QuantizationError(trial.failure)
    if not trial.audit.quantized and not config.force:
        raise QuantizationError(
            f"{_TITLES[plan.engine]} computes nothing of the result of '{recipe.name}' in integers on this machine"
        )
    return Found(trial, (trial,)), " and ".join(acceptance.judge(recipe, trial.speedups, trial.drop, config))


def _identity(source: Source, datasets: Datasets, metric: Metric, config: QuantConfig) -> dict[str, object]:
    """Return everything that the results of a search depend on."""
    return {
        "journal": 1,
        "model": source.variant.descriptor.digest,
        "calibration": datasets.calibration.digest if datasets.calibration else "",
        "evaluation": datasets.evaluation.digest,
        "metric": metric.identity,
        "batches": list(config.batches),
        "threads": config.threads,
        "machine": devices.describe(),
        "versions": packing.provenance(source.variant, ()).versions,
    }
