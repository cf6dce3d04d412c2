"""Opening a model file with the engine for its format, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from ingot import foreign
from ingot.errors import ALLOW_CODE, IngotError, InvalidArgument, Unsupported, missing_package
from ingot.model_store.format.manifest import Division
from ingot.runtime import devices, plugins
from ingot.runtime.engine import BaseEngine, Engine
from ingot.runtime.gpu.graphs import GraphOptions

ENGINES = ("onnxruntime", "openvino", "tensorrt")
"""Engines for graphs of format ``onnx``; the first is the default."""


class EngineOptions(TypedDict, total=False):
    """The options of :func:`open_engine`."""

    format: str
    device: str
    threads: int | None
    allow_code: bool
    ort_library: Path | None
    engine: str
    precision: str
    optimized: bool
    packed: bool
    graphs: GraphOptions | None
    cache: Path | None
    max_batch: int
    shards: int
    plan: Mapping[str, Division] | None
    batchable: bool


def open_engine(
    path: Path,
    *,
    format: str = "onnx",  # noqa: A002 - as the documents of an archive call it
    device: str = "auto",
    threads: int | None = None,
    allow_code: bool = False,
    ort_library: Path | None = None,
    engine: str = "onnxruntime",
    precision: str = "f32",
    optimized: bool = False,
    packed: bool = True,
    graphs: GraphOptions | None = None,
    cache: Path | None = None,
    max_batch: int = 64,
    shards: int = 1,
    plan: Mapping[str, Division] | None = None,
    batchable: bool = True,
) -> Engine:
    """Load a model file.

    Args:
        path: the graph, with its external data or parts next to it.
        format: the kind of file, since blobs have no suffix; see :data:`ingot.model_store.format.manifest.Format`.
        device: ``cpu``, ``cuda``, ``cuda:1`` for the second GPU, ``auto`` for a GPU if there is one, ``auto:1`` for the
            second if it can be used, or a plug-in's.
        threads: CPU threads per call; by default one per usable core, or PyTorch's own default.
        allow_code: load formats that can run their author's code: all but ``onnx``.
        ort_library: native library of custom operators, which ONNX Runtime loads for every graph.
        engine: one of :data:`ENGINES`, or a plug-in's, for a graph of format ``onnx``; other formats have one each.
        precision: of the computation: ``f32``; on a GPU also ``tf32``, in OpenVINO ``bf16``, in TensorRT ``fp16``.
        optimized: as for :class:`~ingot.runtime.engines.ort.OrtEngine`.
        packed: as for the same.
        graphs: batches that are to be captured as CUDA graphs on a GPU; None for none.
        cache: a folder in which TensorRT keeps what it compiled; None for none.
        max_batch: samples of the largest batch, for which TensorRT compiles the graph.
        shards: number of processes over which the model is divided, this one included; more than one needs the format
            ``pt2``, and :func:`ingot.runtime.engines.sharded.join` in each of them.
        plan: as for :class:`~ingot.runtime.engines.sharded.ShardedEngine`.
        batchable: as for the same.

    Raises:
        Unsupported: no engine runs the format, it is not installed, the requested device is missing, or the format
            needs ``allow_code``.
        InvalidArgument: the file is not a model that the engine can run.
    """
    # An engine's package is imported only when it is used.
    if format == "onnx":
        if engine == "onnxruntime" and precision in ("f32", "tf32"):
            from ingot.runtime.engines.ort import OrtEngine

            return OrtEngine(
                path,
                device=device,
                threads=threads,
                library=ort_library,
                optimized=optimized,
                packed=packed,
                precision=precision,
                graphs=graphs,
            )
        if engine == "tensorrt" and precision in ("f32", "tf32", "fp16"):
            from ingot.runtime.engines.tensorrt import TensorRtEngine

            return TensorRtEngine(
                path,
                device=device,
                threads=threads,
                library=ort_library,
                precision=precision,
                cache=cache,
                max_batch=max_batch,
            )
        if (plugin := _plugin(engine)) is not None:
            return plugin(path, device=device, threads=threads)
        return _open_openvino(path, engine, precision, device, threads)
    plugin = None if format in ("aoti", "pt2", "partitioned") else _plugin(format)
    if plugin is None and format not in ("aoti", "pt2", "partitioned"):
        raise Unsupported(f"no engine of this version runs models of format '{format}'")
    if not allow_code:
        raise Unsupported(
            f"a model of format '{format}' can run its author's code; {ALLOW_CODE}, or use a variant of format 'onnx'"
        )
    if plugin is not None:
        return plugin(path, device=device, threads=threads)
    if format == "partitioned":
        from ingot.runtime.engines.partitioned import PartitionedEngine

        return PartitionedEngine(
            path,
            lambda part, kind: open_engine(
                part, format=kind, device=device, threads=threads, allow_code=True, ort_library=ort_library
            ),
        )
    try:
        if format == "aoti":
            from ingot.runtime.engines.aoti import AotiEngine

            return AotiEngine(path, device=device, threads=threads, graphs=graphs, precision=precision)
        if shards > 1:
            from ingot.runtime.engines.sharded import ShardedEngine

            return ShardedEngine(
                path, device=device, threads=threads, precision=precision, plan=plan or {}, batchable=batchable
            )
        from ingot.runtime.engines.torch_program import TorchProgramEngine

        return TorchProgramEngine(path, device=device, threads=threads, graphs=graphs, precision=precision)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing_package("torch", f"running models of format '{format}'", "export") from error


def check_engine(name: str) -> None:
    """Check that there is an engine of a name for graphs of format ``onnx``.

    Raises:
        Unsupported: neither this package nor a plug-in has it.
    """
    if name not in ENGINES and name not in (others := plugins.names("ingot.engines")):
        raise Unsupported(f"unknown engine '{name}'; there are {', '.join((*ENGINES, *others))}")


def _plugin(name: str) -> Callable[..., Engine] | None:
    """Return what opens files with another package's engine; None if there is no such engine."""
    opener = None if name in ENGINES else plugins.find("ingot.engines", name)
    if opener is None:
        return None

    def opened(path: Path, *, device: str, threads: int | None) -> Engine:
        with foreign.reported_as(InvalidArgument, f"the engine '{name}' cannot load {path.name}", keep=IngotError):
            engine: Engine = opener(path, device=device, threads=threads)
        if not isinstance(engine, BaseEngine):
            raise Unsupported(
                f"the engine '{name}' opens an object of the class {type(engine).__name__}, which is not an engine: "
                "derive the class from ingot.runtime.engine.BaseEngine"
            )
        return engine

    return opened


def _open_openvino(path: Path, engine: str, precision: str, device: str, threads: int | None) -> Engine:
    if precision != "f32" and (engine, precision) != ("openvino", "bf16"):
        raise Unsupported(f"no engine of this version supports precision '{precision}' with '{engine}'")
    check_engine(engine)
    if devices.kind_of(device) not in ("auto", "cpu", "cuda"):
        raise InvalidArgument(f"unknown device '{device}'; use auto, cpu or cuda")
    if device not in ("auto", "cpu"):
        raise Unsupported(f"device '{device}' is not available: OpenVINO runs models on the CPU only; use cpu or auto")
    from ingot.runtime.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(path, threads=threads, precision=precision)
