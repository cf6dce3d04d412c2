"""Chooses the engine for a model file, and opens the file with it in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingot import foreign
from ingot.errors import ALLOW_CODE, IngotError, InternalError, InvalidArgument, Unsupported, missing_package
from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.engines.engine import BaseEngine, Engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.gpu.precision import released_on_failure
from ingot.runtime.machine import devices, plugins

_PRECISIONS = {"onnxruntime": ("f32", "tf32"), "openvino": ("f32", "bf16"), "tensorrt": ("f32", "tf32", "fp16")}
ENGINES = tuple(_PRECISIONS)
"""Engines for graphs of format ``onnx``; the first is the default."""
_TORCH_FORMATS = ("aoti", "pt2", "partitioned")


def open_engine(spec: EngineSpec, *, confined: bool = False) -> Engine:
    """Load a model file.

    Args:
        spec: the file, and how it is opened.
        confined: whether this is an engine process. Code in Python runs in no other.

    Raises:
        Unsupported: no engine runs the format, it is not installed, the requested device is missing, or the format
            needs ``allow_code``.
        InvalidArgument: the file is not a model that the engine can run.
    """
    with released_on_failure():
        return _open(spec, confined=confined)


def _open(spec: EngineSpec, *, confined: bool) -> Engine:
    path, device, threads = spec.path, spec.device, spec.threads
    # An engine's package is imported only when it is used.
    if spec.format == "onnx":
        return _open_onnx(spec)
    if spec.format == "step":
        from ingot.runtime.engines.step_engine import StepEngine

        return StepEngine(spec.step)
    own = (*_TORCH_FORMATS, "python")
    plugin = None if spec.format in own else _plugin(spec.format)
    if plugin is None and spec.format not in own:
        raise Unsupported(f"no engine of this version runs models of format '{spec.format}'")
    if not spec.allow_code:
        raise Unsupported(
            f"a model of format '{spec.format}' can run its author's code; {ALLOW_CODE}, or use a variant of format "
            "'onnx'"
        )
    if spec.format == "python":
        if not confined:
            raise InternalError("a model in Python runs in an engine process only")
        from ingot.runtime.engines.python.engine import PythonEngine

        return PythonEngine(path, device=device, settings=spec.settings, permissions=spec.permissions)
    if plugin is not None:
        return plugin(path, device=device, threads=threads)
    if spec.format == "partitioned":
        from ingot.runtime.engines.partitioned import PartitionedEngine

        def open_part(part: Path, kind: str) -> Engine:
            library = spec.ort_library
            return open_engine(
                EngineSpec(part, format=kind, device=device, threads=threads, allow_code=True, ort_library=library)
            )

        return PartitionedEngine(path, open_part)
    try:
        return _open_torch(spec)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing_package("torch", f"running models of format '{spec.format}'", "export") from error


def _open_onnx(spec: EngineSpec) -> Engine:
    path, device, threads, precision = spec.path, spec.device, spec.threads, spec.precision
    if spec.decoder is not None:
        return _open_decoder(spec, spec.decoder)
    if (plugin := _plugin(spec.engine)) is not None:
        return plugin(path, device=device, threads=threads)
    check_engine(spec.engine)
    if precision not in _PRECISIONS[spec.engine]:
        raise Unsupported(f"no engine of this version supports precision '{precision}' with '{spec.engine}'")
    if spec.engine == "onnxruntime":
        from ingot.runtime.engines.ort.ort_engine import OrtEngine

        return OrtEngine(
            path,
            device=device,
            threads=threads,
            library=spec.ort_library,
            optimized=spec.optimized,
            packed=spec.packed,
            precision=precision,
            graphs=spec.graphs,
            convolutions=spec.convolutions,
            gpu_arena=spec.gpu_arena,
            max_batch=spec.max_batch if spec.batchable else 1,
        )
    if spec.engine == "tensorrt":
        from ingot.runtime.engines.ort.tensorrt import TensorRtEngine

        return TensorRtEngine(
            path,
            device=device,
            threads=threads,
            library=spec.ort_library,
            precision=precision,
            cache=spec.cache,
            max_batch=spec.max_batch,
        )
    return _open_openvino(path, precision, device, threads)


def _open_decoder(spec: EngineSpec, options: DecoderOptions) -> Engine:
    if spec.engine != "onnxruntime":
        raise Unsupported(
            f"the engine '{spec.engine}' (--engine) cannot run a model that generates tokens; leave out --engine"
        )
    from ingot.runtime.engines.decoder.engine import DecoderEngine

    return DecoderEngine(spec.path, options, device=spec.device, threads=spec.threads, library=spec.ort_library)


def _open_torch(spec: EngineSpec) -> Engine:
    path, device, threads, precision = spec.path, spec.device, spec.threads, spec.precision
    if spec.format == "aoti":
        from ingot.runtime.engines.pytorch.aoti import AotiEngine

        return AotiEngine(path, device=device, threads=threads, graphs=spec.graphs, precision=precision)
    if spec.shards > 1:
        from ingot.runtime.engines.sharding.sharded import ShardedEngine

        plan = spec.plan or {}
        return ShardedEngine(
            path, device=device, threads=threads, precision=precision, plan=plan, batchable=spec.batchable
        )
    from ingot.runtime.engines.pytorch.torch_program import TorchProgramEngine

    return TorchProgramEngine(path, device=device, threads=threads, graphs=spec.graphs, precision=precision)


def check_engine(name: str) -> None:
    """Check that there is an engine of a name for graphs of format ``onnx``.

    Raises:
        Unsupported: neither this package nor a plug-in has it.
    """
    if name not in ENGINES and name not in (others := plugins.names("ingot.engines")):
        raise Unsupported(f"unknown engine '{name}'; there are {', '.join((*ENGINES, *others))}")


def _plugin(name: str) -> Callable[..., Engine] | None:
    """Return the function that opens files with another package's engine; None if there is no such engine."""
    opener = None if name in ENGINES else plugins.find("ingot.engines", name)
    if opener is None:
        return None

    def opened(path: Path, *, device: str, threads: int | None) -> Engine:
        with foreign.reported_as(InvalidArgument, f"the engine '{name}' cannot load {path.name}", keep=IngotError):
            engine: Engine = opener(path, device=device, threads=threads)
        if not isinstance(engine, BaseEngine):
            raise Unsupported(
                f"the engine '{name}' opens an object of the class {type(engine).__name__}, which is not an engine: "
                "derive the class from ingot.runtime.engines.engine.BaseEngine"
            )
        return engine

    return opened


def _open_openvino(path: Path, precision: str, device: str, threads: int | None) -> Engine:
    if devices.kind_of(device) not in ("auto", "cpu", "cuda"):
        raise InvalidArgument(f"unknown device '{device}'; use auto, cpu or cuda")
    if device not in ("auto", "cpu"):
        raise Unsupported(f"device '{device}' is not available: OpenVINO runs models on the CPU only; use cpu or auto")
    from ingot.runtime.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(path, threads=threads, precision=precision)
