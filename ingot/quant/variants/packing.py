"""The new variant of an archive: its model, evidence, goldens and report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, InvalidArgument
from ingot.model_store import Archive, BlobFolder, Evidence, Provenance, Serving, Variant, add_variant
from ingot.model_store.format.evidence import Interval, MetricEvidence, distributions
from ingot.quant.config import QuantConfig, installed
from ingot.quant.data.samples import Samples
from ingot.quant.measure.datasets import Datasets
from ingot.quant.measure.limits import Deadline, TimeUp
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.measure.trial import Trial, slowness
from ingot.quant.metric import Comparison
from ingot.quant.report import words
from ingot.quant.report.page import html
from ingot.quant.report.records import DOCUMENT, Candidate, DataRecord, Layer, Report, Score, Verdict
from ingot.quant.report.view import text
from ingot.quant.schemes.plan import LABELS, Plan
from ingot.quant.search import sensitivity
from ingot.quant.search.search import Found
from ingot.quant.search.sensitivity import Noise
from ingot.runtime.machine import devices

log = logging.getLogger(__name__)

_UNJOINED = "a server runs its requests one by one: with ranges per call, the rows of a batch affect each other"
# Integer kernels round differently on each CPU family; a damaged model differs by far more than this.
_GOLDEN_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """The quantization of an ONNX graph.

    Attributes:
        archive: the original archive, whose blobs are files.
        blobs: the folder of old and new blobs.
        runner: tries plans and measures results.
        config: the configuration.
        datasets: the samples.
        metric: the metric's name.
        notes: remarks for the report.
        deadline: after it, parts of the report that are only informative are omitted.
    """

    archive: Archive
    blobs: BlobFolder
    runner: TrialRunner
    config: QuantConfig
    metric: str
    datasets: Datasets
    notes: tuple[str, ...]
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def data(self) -> str:
        """The digest of the samples for the metric; empty if they are generated."""
        return "" if self.datasets.generated else self.runner.evaluation.digest

    @property
    def parent(self) -> Variant:
        """The original."""
        return self.runner.source.variant


def add(
    job: Job, found: Found, verdict: Verdict, reason: str, progress: Callable[[str], None]
) -> tuple[Report, Archive | None]:
    """Return the report of a search, and the archive with its result; None if there is none.

    ``verdict`` and ``reason`` are those of the report.
    """
    chosen = found.chosen
    if chosen is None:
        return report(job, found, "", ()).model_copy(update={"verdict": verdict, "reason": reason}), None
    progress("Writing the evidence")
    noises = _noises(job, found, chosen.plan)
    name = free_name(job.archive, chosen.plan.variant)
    if chosen.plan.rows_touch and job.parent.signature.batch is not None:
        job = replace(job, notes=(*job.notes, _UNJOINED))
    built = job.runner.build(chosen.plan, job.blobs)
    goldens, notes = job.runner.source.replayed(built.spec(job.config.threads))
    job = replace(job, notes=(*job.notes, *notes))
    summary = report(job, found, name, noises).model_copy(update={"verdict": verdict, "reason": reason})
    recipe = _recipe(job, chosen)
    serving = Serving(
        name=job.archive.name,
        variant=name,
        format="onnx",
        precision=chosen.plan.precision,
        signature=job.parent.signature,
        padding=job.parent.serving.padding,
        defaults=job.parent.serving.defaults,
        steps=job.parent.serving.steps,
        requires={**job.parent.serving.requires, **_requires(chosen.plan)},
        recipe=recipe,
        parents=(job.parent.descriptor.digest,),
        golden_tolerance=_GOLDEN_TOLERANCE,
        batchable=job.parent.serving.batchable and not chosen.plan.rows_touch,
        generation=job.parent.serving.generation,
        provenance=provenance(job.parent, job.notes),
        evidence=_evidence(job, chosen),
    )
    added = add_variant(
        job.blobs, serving, built.graph, built.weights, goldens, documents(summary), job.parent.step_files()
    )
    others = [variant.descriptor for variant in job.archive.variants]
    first = bool(serving.evidence.holds) and chosen.faster
    return summary, Archive.create(job.blobs, [added, *others] if first else [*others, added])


def _requires(plan: Plan) -> dict[str, str]:
    """Return the requirements of a plan's model."""
    needed: dict[str, str] = {"engine": plan.engine}
    return needed if plan.compute == "f32" else {**needed, "inference_precision": plan.compute}


def free_name(archive: Archive, precision: str) -> str:
    """Return the name of a new variant.

    Raises:
        InvalidArgument: the archive already has a variant of that name.
    """
    for variant in archive.variants:
        if variant.name != precision:
            continue
        if variant.serving.recipe is None:
            raise InvalidArgument(f"'{archive.name}' is in {precision} already")
        raise InvalidArgument(
            f"'{archive.name}' has a variant '{precision}' already; quantize the archive from which it was made"
        )
    return precision


def loss(drop: float, budget: float) -> str:
    """Return the fault of a result that is less exact than allowed, as a clause."""
    return f"loses {drop:.4g} of the metric, more than the {budget:g} allowed"


def provenance(parent: Variant, notes: Sequence[str]) -> Provenance:
    """Return the provenance of a new variant."""
    known = distributions()
    runtimes = (known[name][0] for name in installed() if name in known)
    return Provenance.of(parent.serving.provenance.source, (*runtimes, "onnx"), notes)


def documents(summary: Report) -> dict[str, bytes]:
    """Return a report in the formats that a variant contains."""
    return {
        DOCUMENT: summary.model_dump_json(indent=1).encode(),
        "quantization.html": html(summary).encode(),
        "quantization.txt": text(summary).encode(),
    }


def head(job: Job, variant: str, comparison: Comparison | None) -> Report:
    """Return a report's first part: configuration, data and metric."""
    runner = job.runner
    calibration, evaluation = runner.calibration, runner.evaluation
    made = provenance(job.parent, ())
    return Report(
        model=job.archive.name,
        variant=variant,
        created=made.created,
        machine=devices.describe(),
        versions=made.versions,
        data=DataRecord(
            digest=job.data,
            source="" if job.datasets.generated else _origin(calibration or evaluation),
            calibration_rows=calibration.rows if calibration else 0,
            evaluation_rows=evaluation.rows,
            held_out=job.datasets.held_out,
        ),
        metric=job.metric,
        budget=job.config.max_drop,
        before=Score.of(runner.before),
        after=Score.of(comparison.after) if comparison else None,
        drop=Score.of(comparison.drop) if comparison else None,
        threads=job.config.threads or devices.cpu_count(),
        size=job.parent.size,
        notes=job.notes,
    )


def report(job: Job, found: Found, variant: str, noises: Sequence[Noise]) -> Report:
    """Return the report of a search."""
    chosen = found.chosen
    part = head(job, variant, chosen.comparison if chosen is not None else None)
    notes = (*job.notes, *(words.uncertainty(chosen.latency) if chosen is not None else ()), *found.notes)
    return part.model_copy(
        update={
            "baseline": chosen.baseline if chosen else next((trial.baseline for trial in found.trials), ()),
            "candidates": tuple(_candidate(trial, job.config.max_drop, found) for trial in found.trials),
            "layers": _layers(job, chosen.plan, noises) if chosen else (),
            "audit": chosen.audit if chosen else None,
            "outputs": chosen.outputs if chosen else (),
            "notes": notes,
        }
    )


def _candidate(trial: Trial, budget: float, found: Found) -> Candidate:
    holds, taken = trial.holds(budget), found.chosen is not None and trial.plan.key == found.chosen.plan.key
    reason = trial.failure
    if not reason and not taken:
        reason = slowness(trial.speedups) or ("" if holds else f"loses more than {budget:g}")
    return Candidate(
        name=trial.plan.name,
        recipe=trial.plan.record(),
        size=trial.size,
        latency=trial.latency,
        speedups=trial.speedups,
        score=Score.of(trial.comparison.after) if trial.comparison else None,
        drop=Score.of(trial.comparison.drop) if trial.comparison else None,
        holds=holds,
        chosen=taken,
        rejected=reason,
        remark=found.remarks.get(trial.plan.key, ""),
    )


def _noises(job: Job, found: Found, plan: Plan) -> Sequence[Noise]:
    """Return the noise of each quantized layer, measured now if the search did not need it."""
    source = job.runner.source
    if found.noises or job.runner.large or not source.one_call or not found.complete or not plan.schemes:
        return found.noises
    samples = job.runner.calibration or job.runner.evaluation
    seen = job.runner.seen if plan.needs_data else {}
    try:
        job.deadline.check(2 * found.cost)
        return sensitivity.rank(
            source,
            plan,
            seen,
            samples,
            seed=job.config.seed,
            effects=False,
            progress=lambda done, total: job.deadline.check(found.cost),
        )
    except TimeUp:
        return ()
    except IngotError as error:  # only a part of the report, so the result is kept
        log.warning("the noise of layers cannot be measured: %s", error)
        return ()


def _layers(job: Job, plan: Plan, noises: Sequence[Noise]) -> tuple[Layer, ...]:
    by_name = {noise.layer: (rank, noise) for rank, noise in enumerate(noises, 1)}
    rows = []
    for layer in job.runner.source.layers:
        rank, noise = by_name.get(layer.name, (None, None))
        scheme = plan.schemes.get(layer.name)
        seen = job.runner.seen.get(layer.data.name or "") if plan.needs_data else None
        observed = seen if scheme == "static" else None
        rows.append(
            Layer(
                name=layer.name,
                operator=layer.operator,
                scheme=LABELS[scheme] if scheme else "float" if plan.compute == "f32" else plan.compute,
                sqnr=noise.sqnr if noise else None,
                low=seen.low if seen else None,
                high=seen.high if seen else None,
                clipped=observed.clipped(*observed.range(plan.method)) if observed else None,
                rank=rank if noise and noise.damage is not None else None,
            )
        )
    return tuple(rows)


def _recipe(job: Job, chosen: Trial) -> dict[str, Any]:
    asked = job.config.recipe
    named = asked.record() if asked is not None else {"name": "auto", "version": 1, "seed": job.config.seed}
    return {
        **named,
        "plan": chosen.plan.record(),
        "quantized_ops": sum(chosen.audit.quantized.values()),
        "operators": chosen.audit.quantized,
    }


def _evidence(job: Job, chosen: Trial) -> Evidence:
    return Evidence(
        machine=devices.describe(),
        baseline=chosen.baseline,
        latency=chosen.latency,
        agreement=chosen.outputs,
        holds=chosen.holds(job.config.max_drop),
        metric=metric_evidence(job, chosen.comparison),
        bounds=job.parent.serving.evidence.bounds,  # its variant takes no more memory
    )


def metric_evidence(job: Job, values: Comparison | None) -> MetricEvidence | None:
    """Return the record of a metric before and after."""
    if values is None:
        return None
    before, after, drop = (Score.of(score) for score in (values.before, values.after, values.drop))
    if before is None or after is None or drop is None:  # infinity, which JSON does not have
        return None
    return MetricEvidence(
        name=job.metric,
        before=_interval(before),
        after=_interval(after),
        drop=_interval(drop),
        budget=job.config.max_drop,
        rows=job.runner.evaluation.rows,
        held_out=job.datasets.held_out,
        data=job.data,
    )


def _origin(samples: Samples) -> str:
    """Return the name of the file or folder of data, without its path, which is private."""
    return Path(samples.where.removeprefix(" in ")).name or "data in memory"


def _interval(score: Score) -> Interval:
    """Return the record of a metric's value."""
    return Interval(value=score.value, low=score.low, high=score.high)
