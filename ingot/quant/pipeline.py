"""The quantization pipeline: check the data, apply the recipe, measure, add the result to the archive."""

from __future__ import annotations

import os
from collections.abc import Callable

from ingot.errors import InvalidArgument, ParityError
from ingot.model_store import (
    Archive,
    BlobFolder,
    Evidence,
    Golden,
    Provenance,
    Serving,
    Variant,
    add_variant,
    onnx_graph,
)
from ingot.quant.agreement import agreement
from ingot.quant.calibrate import Calibration, Data
from ingot.quant.config import QuantConfig, StaticInt8
from ingot.quant.recipes import static_int8
from ingot.runtime import Engine, devices, load_engine, profile

Progress = Callable[[str], None]

# Integer kernels round differently from one CPU family to the next; a damaged model departs by far more than this.
_GOLDEN_TOLERANCE = 0.1


def quantize(
    archive: Archive | str | os.PathLike[str],
    data: Data,
    config: QuantConfig | None = None,
    *,
    progress: Progress = lambda step: None,
) -> Archive:
    """Add a quantized variant to an archive; it becomes the preferred one, and the others stay.

    The new variant's evidence holds its agreement with the original on the calibration data (``cosine``, ``top1``), and
    its latency by batch; the original's latency is measured again beside it, so that the two can be compared.

    Args:
        archive: an archive, or the path of one.
        data: real inputs by name with all samples along the batch dimension, or the path of such an ``.npz``. Some
            hundred samples do.
        config: the recipe; by default static int8.
        progress: called with what begins now.

    Raises:
        InvalidArgument: the data does not fit the model, or the model cannot be quantized.
        ParityError: the quantized model gives NaN or infinity.
    """
    config = config or StaticInt8()
    original = archive if isinstance(archive, Archive) else Archive.open(archive)
    blobs = BlobFolder.scratch()
    local = original.copy_to(blobs)
    parent = _parent(local, config)
    calibration = Calibration(parent.signature, data)
    progress(f"Calibrating on {calibration.rows} samples")
    model = static_int8.apply(config, parent.path(), calibration)
    count = static_int8.quantized_ops(model)
    graph, weights = onnx_graph.pack(model, blobs)
    progress("Measuring")
    before = load_engine(parent.path(), device="cpu")
    after = load_engine(blobs.path(blobs.put(graph, "")), device="cpu")
    serving = Serving(
        name=local.name,
        variant=config.precision,
        format="onnx",
        precision=config.precision,
        signature=parent.signature,
        requires=parent.serving.requires,
        recipe={**config.record(), "quantized_ops": count},
        parents=(parent.descriptor.digest,),
        golden_tolerance=_GOLDEN_TOLERANCE,
        provenance=Provenance.of(
            parent.serving.provenance.source,
            ("ingot", _onnxruntime_package(), "onnx"),
            (f"calibrated on {calibration.rows} samples",),
        ),
        evidence=_evidence(parent, before, after, calibration),
    )
    goldens = [Golden(golden.inputs, after.run(golden.inputs)) for golden in parent.goldens()]
    for engine in (before, after):
        engine.close()
    added = add_variant(blobs, serving, graph, weights, goldens)
    return Archive.create(blobs, [added, *(variant.descriptor for variant in local.variants)])


def _parent(archive: Archive, config: QuantConfig) -> Variant:
    for variant in archive.variants:
        if variant.name == config.precision:
            raise InvalidArgument(
                f"'{archive.name}' has a variant '{config.precision}' already; "
                "quantize the archive that it was made from"
            )
    floats = [variant for variant in archive.variants if variant.serving.recipe is None]
    if not floats:
        raise InvalidArgument(f"'{archive.name}' has no floating-point variant to quantize")
    return floats[0]


def _evidence(parent: Variant, before: Engine, after: Engine, calibration: Calibration) -> Evidence:
    batches = list(calibration.batches())
    expected, actual = [before.run(batch) for batch in batches], [after.run(batch) for batch in batches]
    metrics = agreement(expected, actual)
    if any(value != value for value in metrics.values()):  # NaN is the one value that differs from itself
        raise ParityError("the quantized model gives NaN; calibrate with data that is like what it will be asked")
    example = batches[0]
    originals = profile.measure(before, parent.signature, example)
    latency = profile.measure(after, parent.signature, example)
    speedups = {
        f"speedup_batch_{now.rows}": was.seconds / now.seconds for was, now in zip(originals, latency, strict=True)
    }
    return Evidence(machine=devices.describe(), latency=latency, metrics={**metrics, **speedups})


def _onnxruntime_package() -> str:
    from importlib.metadata import packages_distributions

    return packages_distributions()["onnxruntime"][0]
