"""Variants in half precision: computed in it for speed on GPUs, or only stored in it for size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ingot.errors import QuantizationError
from ingot.model_store import Archive, BatchLatency, BlobFolder, Evidence, Serving, add_variant
from ingot.model_store.diff.answers import agreement
from ingot.model_store.format import onnx_graph
from ingot.model_store.format.evidence import speedups
from ingot.quant.config import HalfRecipe
from ingot.quant.graph.layers import choose
from ingot.quant.metric import Comparison, within
from ingot.quant.report import words
from ingot.quant.report.records import Candidate, Report, Score
from ingot.quant.schemes import half
from ingot.quant.schemes.half import Halved
from ingot.quant.variants import packing
from ingot.quant.variants.packing import Job
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.machine import devices

# Sums in half precision depend on the order in which a GPU adds.
_GOLDEN_TOLERANCE = 0.1
_TIMING = 0.3


@dataclass(frozen=True)
class _Times:
    """Latencies by batch, if the variant can run on this machine; otherwise a note."""

    baseline: tuple[BatchLatency, ...] = ()
    latency: tuple[BatchLatency, ...] = ()
    notes: tuple[str, ...] = ()


def add(job: Job, recipe: HalfRecipe, progress: Callable[[str], None]) -> tuple[Report, Archive]:
    """Add a variant in half precision to an archive, after the existing ones.

    Its accuracy is measured in a float32 graph that rounds where a GPU would; its speed only on a machine with a GPU.
    Returns the report, whose reason has the faults of a forced variant, and the archive.

    Raises:
        QuantizationError: nothing can be converted, or the metric loses more than allowed.
    """
    progress(f"Converting to {recipe.precision}")
    model = job.runner.source.model()
    halved = _convert(recipe, model, job)
    graph, weights = onnx_graph.pack(model, job.blobs)
    emulation = BlobFolder.scratch()
    path = _on_cpu(recipe, job, job.blobs.path(graph), emulation)
    with contextlib.closing(load_engine(EngineSpec(path, device="cpu"))) as engine:
        progress("Measuring")
        comparison, outputs = job.runner.compare(engine)
        goldens = job.parent.rerun(engine.run)
    holds = within(comparison.drop.value, job.config.max_drop)
    fault = "" if holds else packing.loss(comparison.drop.value, job.config.max_drop)
    if fault and not job.config.force:
        raise QuantizationError(f"the result of '{recipe.name}' {fault}; keep layers in float32, or force it (--force)")
    times = _time(job, recipe, job.blobs.path(graph))
    size = graph.size + sum(item.size for item in weights)
    name = packing.free_name(job.archive, recipe.precision)
    agreed = agreement(job.parent.goldens(), goldens)
    notes = (*job.notes, *halved.notes, *times.notes, *agreed)
    summary = _report(job, recipe, name, size, comparison, times).model_copy(
        update={"outputs": outputs, "notes": notes, "reason": fault}
    )
    serving = Serving(
        name=job.archive.name,
        variant=name,
        format="onnx",
        precision=recipe.precision,
        signature=job.parent.signature,
        padding=job.parent.serving.padding,
        defaults=job.parent.serving.defaults,
        steps=job.parent.serving.steps,
        requires={**job.parent.serving.requires, **({"device": "cuda"} if recipe.device == "cuda" else {})},
        recipe={**recipe.record(), "operators": dict(halved.operators)},
        parents=(job.parent.descriptor.digest,),
        golden_tolerance=_GOLDEN_TOLERANCE,
        provenance=packing.provenance(job.parent, notes),
        evidence=Evidence(
            machine=devices.describe(),
            baseline=times.baseline,
            latency=times.latency,
            agreement=outputs,
            holds=holds,
            metric=packing.metric_evidence(job, comparison),
            bounds=job.parent.serving.evidence.bounds,
        ),
    )
    added = add_variant(
        job.blobs, serving, graph, weights, goldens, packing.documents(summary), job.parent.step_files()
    )
    archive = Archive.create(job.blobs, [*(item.descriptor for item in job.archive.variants), added])
    return summary, archive


def _on_cpu(recipe: HalfRecipe, job: Job, path: Path, blobs: BlobFolder) -> Path:
    """Return a model that computes on a CPU the same as the variant at ``path``; a new one is added to blobs."""
    if recipe.device == "any":
        return path
    source = job.runner.source
    model = source.model()
    _convert(recipe, model, job, emulate=True)
    return blobs.path(onnx_graph.pack(model, blobs, source.blobs)[0])


def _convert(recipe: HalfRecipe, model: ir.Model, job: Job, *, emulate: bool = False) -> Halved:
    dtype = ir.DataType.FLOAT16 if recipe.precision == "fp16" else ir.DataType.BFLOAT16
    layers = job.runner.source.by_name(model)
    kept = [layers[name].node for name in choose(job.runner.source.names, (*job.config.keep, *recipe.keep))]
    if recipe.device == "any":
        return half.stored(model, dtype, kept)
    convert = half.emulated if emulate else half.apply
    return convert(model, dtype, kept)


def _time(job: Job, recipe: HalfRecipe, path: Path) -> _Times:
    """Time the variant and the original if the variant can run."""
    device = "cuda" if recipe.device == "cuda" else "cpu"
    if device == "cuda" and not devices.has_cuda():
        return _Times(notes=("made for GPUs and not timed, as this machine has none",))
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                contextlib.closing(load_engine(EngineSpec(item, device=device, threads=job.config.threads)))
            )
            for item in (job.runner.source.path, path)
        ]
        baseline, latency = job.runner.time(engines, _TIMING)
    return _Times(baseline, latency, words.uncertainty(latency))


def _report(job: Job, recipe: HalfRecipe, name: str, size: int, comparison: Comparison, times: _Times) -> Report:
    candidate = Candidate(
        name=recipe.name,
        recipe=recipe.record(),
        size=size,
        latency=times.latency,
        speedups=speedups(times.baseline, times.latency),
        score=Score.of(comparison.after),
        drop=Score.of(comparison.drop),
        holds=within(comparison.drop.value, job.config.max_drop),
        chosen=True,
    )
    return packing.head(job, name, comparison).model_copy(
        update={"candidates": (candidate,), "baseline": times.baseline}
    )
