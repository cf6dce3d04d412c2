"""The choice of an engine for a model file."""

from __future__ import annotations

from pathlib import Path

from ingot.errors import ALLOW_CODE, InvalidArgument, Unsupported, missing_package
from ingot.model_store import Variant
from ingot.runtime.engine import Engine

ENGINES = ("onnxruntime", "openvino")
"""Engines for graphs of format ``onnx``; the first is the default."""


def load_engine(
    path: Path,
    *,
    format: str = "onnx",  # noqa: A002 - as the documents of an archive call it
    device: str = "auto",
    threads: int | None = None,
    allow_code: bool = False,
    ort_library: Path | None = None,
    engine: str = "onnxruntime",
    precision: str = "f32",
) -> Engine:
    """Load a model file.

    Args:
        path: the graph, with its external data or parts next to it.
        format: the kind of file, since blobs have no suffix; see :data:`ingot.model_store.format.manifest.Format`.
        device: ``cpu``, ``cuda``, or ``auto``: the GPU if there is one.
        threads: CPU threads per call; by default one per usable core, or PyTorch's own default.
        allow_code: load formats that can run their author's code: all but ``onnx``.
        ort_library: native library of custom operators, which ONNX Runtime loads for every graph.
        engine: one of :data:`ENGINES` for a graph of format ``onnx``; other formats have one engine each.
        precision: floating-point precision in OpenVINO: ``f32`` or ``bf16``.

    Raises:
        Unsupported: no engine runs the format, it is not installed, the requested device is missing, or the format
            needs ``allow_code``.
        InvalidArgument: the file is not a model that the engine can run.
    """
    # An engine's package is imported only when it is used.
    if format == "onnx":
        return _load_onnx(path, engine, precision, device, threads, ort_library)
    if format not in ("aoti", "pt2", "partitioned"):
        raise Unsupported(f"no engine of this version runs models of format '{format}'")
    if not allow_code:
        raise Unsupported(
            f"a model of format '{format}' can run its author's code; {ALLOW_CODE}, or use a variant of format 'onnx'"
        )
    if format == "partitioned":
        from ingot.runtime.engines.partitioned import PartitionedEngine

        return PartitionedEngine(
            path,
            lambda part, kind: load_engine(
                part, format=kind, device=device, threads=threads, allow_code=True, ort_library=ort_library
            ),
        )
    try:
        if format == "aoti":
            from ingot.runtime.engines.aoti import AotiEngine

            return AotiEngine(path, device=device, threads=threads)
        from ingot.runtime.engines.torch_program import TorchProgramEngine

        return TorchProgramEngine(path, device=device, threads=threads)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing_package("torch", f"running models of format '{format}'", "export") from error


def engine_of(variant: Variant) -> str:
    """Return which of :data:`ENGINES` runs a variant of format ``onnx``: the one in which it was measured."""
    return variant.serving.requires.get("engine") or ENGINES[0]


def precision_of(variant: Variant) -> str:
    """Return the floating-point precision in which a variant was measured and so runs: usually f32."""
    return variant.serving.requires.get("inference_precision") or "f32"


def _load_onnx(
    path: Path, engine: str, precision: str, device: str, threads: int | None, ort_library: Path | None
) -> Engine:
    if precision != "f32" and (engine, precision) != ("openvino", "bf16"):
        raise Unsupported(f"no engine of this version supports precision '{precision}' with '{engine}'")
    if engine == "onnxruntime":
        from ingot.runtime.engines.ort import OrtEngine

        return OrtEngine(path, device=device, threads=threads, library=ort_library)
    if engine != "openvino":
        raise Unsupported(f"unknown engine '{engine}'; this version has {' and '.join(ENGINES)}")
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidArgument(f"unknown device '{device}'; use auto, cpu or cuda")
    if device == "cuda":
        raise Unsupported("device 'cuda' is not available: OpenVINO runs models on the CPU only; use cpu or auto")
    from ingot.runtime.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(path, threads=threads, precision=precision)
