"""The quantization pipeline: check the data, apply the recipe, measure, add the result to the archive."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np

from ingot.errors import InvalidArgument, QuantizationError
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
from ingot.quant.config import StaticInt8
from ingot.quant.recipes import static_int8
from ingot.runtime import Engine, devices, load_engine, profile
from ingot.tensors import Array, DType

Progress = Callable[[str], None]

# Integer kernels round differently from one CPU family to the next; a damaged model departs by far more than this.
_GOLDEN_TOLERANCE = 0.1


def quantize(
    archive: Archive | str | os.PathLike[str],
    data: Data,
    *,
    config: StaticInt8 | None = None,
    progress: Progress = lambda step: None,
) -> Archive:
    """Add a quantized variant to an archive; it becomes the preferred one, and the others stay.

    The new variant's evidence holds the agreement of each output with the original's on the calibration data, and the
    latency by batch of both, measured in the same run.

    Args:
        archive: an archive, or the path of one.
        data: real inputs by name with all samples along the batch dimension, or the path of such an ``.npz``. Some
            hundred samples do.
        config: the recipe; by default static int8.
        progress: called with what begins now.

    Raises:
        InvalidArgument: the data does not fit the model, or the archive is quantized already.
        QuantizationError: the model cannot be quantized, or the result gives NaN or infinity.
    """
    config = config or StaticInt8()
    original = archive if isinstance(archive, Archive) else Archive.open(archive)
    blobs = BlobFolder.scratch()
    local = original.copy_to(blobs)
    parent = _parent(local, config)
    calibration = Calibration(parent.signature, data)
    with contextlib.closing(load_engine(parent.path(), device="cpu")) as before:
        expected = [before.run(batch) for batch in calibration.batches()]  # also proves that the model takes the data
        progress(f"Calibrating on {calibration.rows} samples")
        model = static_int8.apply(config, parent.path(), calibration)
        count = static_int8.quantized_ops(model)
        graph, weights = onnx_graph.pack(model, blobs)
        progress("Measuring")
        with contextlib.closing(load_engine(blobs.path(graph), device="cpu")) as after:
            evidence = _evidence(parent, before, after, calibration, expected)
            goldens = [Golden(golden.inputs, after.run(golden.inputs)) for golden in parent.goldens()]
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
        evidence=evidence,
    )
    added = add_variant(blobs, serving, graph, weights, goldens)
    return Archive.create(blobs, [added, *(variant.descriptor for variant in local.variants)])


def _parent(archive: Archive, config: StaticInt8) -> Variant:
    for variant in archive.variants:
        if variant.name == config.precision:
            raise InvalidArgument(
                f"'{archive.name}' has a variant '{config.precision}' already; "
                "quantize the archive that it was made from"
            )
    floats = [item for item in archive.variants if item.serving.recipe is None and item.serving.format == "onnx"]
    if not floats:
        raise InvalidArgument(f"'{archive.name}' has no floating-point variant of format 'onnx' to quantize")
    return floats[0]


def _evidence(
    parent: Variant, before: Engine, after: Engine, calibration: Calibration, expected: list[dict[str, Array]]
) -> Evidence:
    batches = list(calibration.batches())
    actual = [after.run(batch) for batch in batches]
    for name in expected[0]:
        if any(_broken(left[name], right[name]) for left, right in zip(expected, actual, strict=True)):
            raise QuantizationError(
                f"the quantized model gives NaN or infinity in '{name}' where the original does not; "
                "calibrate with data that is like what it will be asked"
            )
    baseline, latency = profile.measure_together([before, after], parent.signature, batches[0])
    return Evidence(
        machine=devices.describe(),
        baseline=baseline,
        latency=latency,
        agreement=agreement(expected, actual),
    )


def _broken(expected: Array, actual: Array) -> bool:
    if not DType.of(expected).is_float:
        return False
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    return bool(np.isfinite(left).all() and not np.isfinite(right).all())


def _onnxruntime_package() -> str:
    from importlib.metadata import packages_distributions

    return packages_distributions()["onnxruntime"][0]
