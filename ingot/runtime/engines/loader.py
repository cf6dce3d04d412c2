"""Loads a model file, in this process or in an engine process, and answers what is known before: engine, precision.

opening.py chooses the engine's class.
"""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from ingot.errors import Unsupported
from ingot.model_store import Variant
from ingot.model_store.store.derived import DerivedCache
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.isolation.engine import Isolation, ProcessEngine
from ingot.runtime.engines.isolation.policy import PYTHON
from ingot.runtime.engines.opening import ENGINES, open_engine
from ingot.runtime.engines.ort import ort_session
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.machine import devices
from ingot.runtime.settings.settings import Settings

log = logging.getLogger(__name__)


def load_engine(spec: EngineSpec, isolation: Isolation | None = None) -> Engine:
    """Load a model file.

    Args:
        spec: the file, and how an engine opens it.
        isolation: why and how it runs in a separate process; by default it runs in this one.

    Raises:
        Unsupported: no engine runs the format, it is not installed, the requested device is missing, or the format
            needs ``allow_code``.
        InvalidArgument: the file is not a model that the engine can run.
        EngineLost: its process ended.
        DeadlineExceeded: its process was not ready within the limit of ``isolation``.
    """
    if isolation is None and spec.format == "python":
        isolation = Isolation(why=PYTHON, required=True)
    if isolation is None:
        return open_engine(spec)
    try:
        return ProcessEngine(spec, isolation)
    except Unsupported as error:
        if isolation.required:
            raise
        engine = open_engine(spec)  # which fails alike unless this program defines what is missing there
        log.warning("%s runs in this process, since an engine process cannot open it: %s", spec.path.name, error)
        return engine


def engine_of(variant: Variant, configured: str | None = None) -> str:
    """Return which engine runs a variant of format ``onnx``: the configured one, or else that of its measurements."""
    return configured or variant.serving.requires.get("engine") or ENGINES[0]


def spec_of(variant: Variant, **options: Any) -> EngineSpec:
    """Return how the engine of an unpacked variant's measurements opens it in this process.

    Args:
        variant: the variant.
        options: further fields, such as ``device`` and ``threads``.
    """
    form, precision = variant.serving.format, precision_of(variant)
    return EngineSpec(variant.path(), format=form, engine=engine_of(variant), precision=precision, **options)


def measured_with(variant: Variant, configured: str | None) -> bool:
    """Return whether the engine that runs a variant is the one in which it was measured."""
    return engine_of(variant, configured) == engine_of(variant)


def check_engine_runs(form: str, engine: str | None) -> None:
    """Check that a configured engine can run a format.

    Raises:
        Unsupported: it runs only graphs of format ``onnx``.
    """
    if engine is not None and form != "onnx":
        raise Unsupported(
            f"the engine '{engine}' (--engine) runs variants of format 'onnx', not of format '{form}'; leave out "
            "--engine, or set 'engine' in ingot.toml for the models that need it"
        )


def uses_cuda(form: str, engine: str) -> bool:
    """Return whether an engine can use the NVIDIA GPUs of this machine, as far as that is known before it is opened.

    Args:
        form: the format of its file. The device of a compiled package (``aoti``) is known once it is open.
        engine: for graphs of format ``onnx``.

    Raises:
        Unsupported: the package of the engine is not installed.
    """
    if form == "onnx":
        if engine not in ("onnxruntime", "tensorrt") or not devices.has_cuda():
            return False
        return ort_session.CUDA in ort_session.package().get_available_providers()
    return form in ("pt2", "partitioned") and devices.has_cuda() and "+cpu" not in metadata.version("torch")


def precision_of(variant: Variant) -> str:
    """Return the floating-point precision in which a variant was measured and so runs: usually f32."""
    return variant.serving.requires.get("inference_precision") or "f32"


def graphs_for(form: str, batch: str | None, settings: Settings, *, padded: bool = False) -> GraphOptions | None:
    """Return which batches of a model are to be captured as CUDA graphs; None for none.

    Args:
        form: the format of its file.
        batch: the dimension of samples, if it is known.
        settings: ``cuda_graphs``, and the size of batches.
        padded: whether batches may be enlarged.
    """
    if settings.cuda_graphs == "off" or (settings.cuda_graphs == "auto" and form not in ("pt2", "aoti")):
        return None
    return GraphOptions(most=settings.limits.max_batch, batch=batch, padded=padded)


def tensorrt_cache(variant: Variant, settings: Settings) -> Path | None:
    """Return the folder for what TensorRT compiles of a variant; None without a store or its derived cache.

    It is hidden from the cache, whose entries are complete and never change, and is removed with the archive's.
    """
    cache = DerivedCache.for_blobs(variant.blobs) if settings.derived_cache else None
    return None if cache is None else cache.root / variant.descriptor.hex / ".tensorrt"
