"""An archive's PyTorch program in int8 or half precision, compiled into native code by AOTInductor: a variant for CPUs.

Everything here imports torch: import it where it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from ingot.errors import ALLOW_CODE, InvalidArgument, Unsupported
from ingot.export.capture import exported
from ingot.export.lower import aoti
from ingot.export.lower.packed import Packed, release
from ingot.export.program import Program
from ingot.model_store import Archive, Evidence, Golden, Serving, Variant, add_variant
from ingot.quant.config import HalfRecipe, PT2EInt8, QuantConfig, Recipe
from ingot.quant.measure.stopwatch import Race
from ingot.quant.metric import Comparison, within
from ingot.quant.report import words
from ingot.quant.report.records import Audit, Candidate, Layer, Report, Score
from ingot.quant.variants import packing
from ingot.quant.variants.packing import Job
from ingot.quant.variants.programs import graph, half, pt2e
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.machine import devices

# Compilers of other releases, and other processors, sum in another order.
_GOLDEN_TOLERANCE = 0.1


@dataclass(frozen=True)
class Made:
    """A quantized program, and its layers."""

    program: Program
    layers: tuple[Layer, ...] = ()
    audit: Audit | None = None


@dataclass(frozen=True)
class Attempt:
    """A compiled model and its measurements."""

    made: Made
    packed: Packed
    _: KW_ONLY
    comparison: Comparison
    evidence: Evidence
    goldens: tuple[Golden, ...]


def find_program(archive: Archive, recipe: Recipe, config: QuantConfig) -> Variant:
    """Return the variant to compile.

    Raises:
        InvalidArgument: the archive has no PyTorch program.
        Unsupported: the program may not be run.
    """
    for variant in archive.variants:
        if variant.serving.format == "pt2" and variant.serving.recipe is None:
            break
    else:
        raise InvalidArgument(
            f"the recipe '{recipe.name}' compiles a PyTorch program, and '{archive.name}' has no variant of format "
            "'pt2': export the model with --to pt2"
        )
    if not config.allow_code:
        raise Unsupported(
            f"the recipe '{recipe.name}' runs the PyTorch program in the archive, which can run its author's code; "
            f"{ALLOW_CODE}"
        )
    return variant


def find_original(archive: Archive, program: Variant) -> Variant:
    """Return the variant to compare with: the ONNX model, or the program itself if there is none."""
    floats = (item for item in archive.variants if item.serving.recipe is None and item.serving.format == "onnx")
    return next(floats, program)


def name_of(recipe: Recipe) -> str:
    """Return the name of a recipe's variant."""
    return f"{recipe.precision}-aoti"


def load(variant: Variant, threads: int | None) -> Engine:
    """Return the engine of a variant whose code may be run."""
    return load_engine(
        EngineSpec(variant.path(), format=variant.serving.format, device="cpu", threads=threads, allow_code=True)
    )


def attempt(job: Job, program: Variant, recipe: Recipe, progress: Callable[[str], None]) -> Attempt:
    """Make the model of a recipe, compile it, and compare it with the original.

    Raises:
        InvalidArgument: a layer to keep does not exist.
        QuantizationError: nothing can be quantized, or the result gives NaN.
        ExportError: there is no C++ compiler, or the model cannot be compiled.
        Unsupported: a package is missing, or the processor lacks the recipe's arithmetic.
    """
    runner, config = job.runner, job.config
    progress(f"Quantizing the program by {recipe.name}")
    made = _make(job, graph.read(program), recipe)
    progress("Compiling, which may take minutes")
    packed = aoti.pack(made.program, job.blobs, freeze=True)
    path = job.blobs.path(packed.graph)
    with contextlib.closing(
        load_engine(EngineSpec(path, format="aoti", device="cpu", threads=config.threads, allow_code=True))
    ) as engine:
        progress("Measuring")
        comparison, outputs = runner.compare(engine)
        goldens = tuple(Golden(golden.inputs, engine.run(golden.inputs)) for golden in job.parent.goldens())
    models = ((job.parent.path(), job.parent.serving.format), (path, "aoti"))
    race = Race(models, job.parent.signature, example=runner.example, batches=runner.batches, threads=config.threads)
    baseline, latency = race.run()
    evidence = Evidence(
        machine=devices.describe(),
        baseline=baseline,
        latency=latency,
        agreement=outputs,
        holds=within(comparison.drop.value, config.max_drop),
        metric=packing.metric_evidence(job, comparison),
    )
    return Attempt(made, packed, comparison=comparison, evidence=evidence, goldens=goldens)


def add(job: Job, program: Variant, recipe: Recipe, found: Attempt, reason: str) -> tuple[Report, Archive]:
    """Add the compiled variant to the archive; return the report too.

    Args:
        job: the quantization.
        program: the original variant.
        recipe: the recipe.
        found: the result.
        reason: the faults of a forced result. A result without faults becomes the archive's preferred variant.

    Raises:
        InvalidArgument: the archive has such a variant already.
    """
    made, packed = found.made, found.packed
    name = packing.free_name(job.archive, name_of(recipe))
    made_with = ("torch", *(("torchao",) if isinstance(recipe, PT2EInt8) else ()))
    measured = words.uncertainty(found.evidence.latency)
    notes = (*job.notes, *measured, *packed.notes, f"native code for processors of this kind and PyTorch {release()}")
    head = packing.head(job, name, found.comparison, made_with)
    summary = head.model_copy(update={**_findings(recipe, found), "notes": notes, "reason": reason})
    operators = made.audit.quantized if made.audit else {}
    serving = Serving(
        name=job.archive.name,
        variant=name,
        format=packed.format,
        precision=recipe.precision,
        signature=job.parent.signature,
        padding=job.parent.serving.padding,
        defaults=job.parent.serving.defaults,
        requires=packed.requires,
        recipe={**recipe.record(), "quantized_ops": sum(operators.values()), "operators": operators},
        parents=(program.descriptor.digest,),
        golden_tolerance=_GOLDEN_TOLERANCE,
        batchable=not getattr(recipe, "dynamic", False),
        provenance=packing.provenance(job.parent, notes, made_with),
        evidence=found.evidence,
    )
    added = add_variant(job.blobs, serving, packed.graph, packed.weights, found.goldens, packing.documents(summary))
    others = [variant.descriptor for variant in job.archive.variants]
    return summary, Archive.create(job.blobs, [*others, added] if reason else [added, *others])


def _make(job: Job, program: Program, recipe: Recipe) -> Made:
    keep = (*job.config.keep, *recipe.keep)
    if isinstance(recipe, HalfRecipe):
        return Made(half.convert(program, _half(recipe), keep=keep))
    if not isinstance(recipe, PT2EInt8):
        raise InvalidArgument(f"the recipe '{recipe.name}' cannot be compiled")
    samples = job.runner.calibration or job.runner.evaluation
    made = pt2e.quantize(program, samples, keep=keep, dynamic=recipe.dynamic)
    scheme = "dynamic int8" if recipe.dynamic else "static int8"
    layers = tuple(
        Layer(
            name=name,
            operator=str(node.target.name()).partition("::")[2].partition(".")[0],  # type: ignore[union-attr]
            scheme=scheme if name in made.layers else "float",
        )
        for name, node in graph.find(exported.unguarded(program.exported).graph).items()
    )
    return Made(made.program, layers, Audit(quantized=made.operators))


def _half(recipe: HalfRecipe) -> torch.dtype:
    """Return a recipe's type.

    Raises:
        Unsupported: this processor has no instructions for it, and would emulate it.
    """
    if recipe.precision == "bf16":
        return torch.bfloat16
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise Unsupported(
            "this processor does not compute in float16, which needs AVX512-FP16 or AMX-FP16; use bf16 (--recipe bf16)"
        )
    return torch.float16


def _findings(recipe: Recipe, found: Attempt) -> dict[str, Any]:
    """Return the result's fields of a report."""
    evidence, made = found.evidence, found.made
    candidate = Candidate(
        name=f"{recipe.name}, compiled",
        recipe=recipe.record(),
        size=found.packed.graph.size,
        latency=evidence.latency,
        speedups=evidence.speedups(),
        score=Score.of(found.comparison.after),
        drop=Score.of(found.comparison.drop),
        holds=bool(evidence.holds),
        chosen=True,
    )
    return {
        "baseline": evidence.baseline,
        "candidates": (candidate,),
        "layers": made.layers,
        "audit": made.audit,
        "outputs": evidence.agreement,
    }
