"""ONNX Runtime sessions: the package, options, execution providers, and the meaning of errors."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from ingot.errors import InvalidArgument, Unsupported, missing_package
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.runtime.machine import devices, nvml

log = logging.getLogger(__name__)

# Failures reach the caller as exceptions; printing them would also fill the log with clients' mistakes.
_LOG_FATAL_ONLY = 4
CUDA = "CUDAExecutionProvider"
_NO_CUDA = "this onnxruntime lacks CUDA; ingot-serve[gpu] has it"
_preloading = Lock()
OPENED: Mapping[str, Any] = MappingProxyType(
    {
        # On a damaged file ONNX Runtime would print to stdout and retry.
        "enable_fallback": 0,
        # It makes a slice of a gather at consecutive positions: a slice ends with the table, where a gather refuses.
        "disabled_optimizers": ["GatherToSliceFusion"],
    }
)
"""How every session of a model is opened, in addition to its options."""


def save_prepacked(path: Path, folder: Path, library: Path | None = None) -> Path:
    """Write a model in the form of ONNX Runtime's CPU kernels: graph optimized, weights packed.

    The result is specific to this version of ONNX Runtime and this type of processor. It holds the weights twice: in
    their original order, by which kernels find the packed ones, and packed.

    Args:
        path: the graph, with its external data in the same folder.
        folder: the destination.
        library: custom operators, as for :class:`~ingot.runtime.engines.ort.ort_engine.OrtEngine`.

    Returns:
        The graph, ``model.onnx``, which the engine loads with ``optimized``.

    Raises:
        InvalidArgument: ONNX Runtime cannot save this model, or the folder cannot be written.
    """
    ort = package()
    options = options_of(ort, path, library)
    options.intra_op_num_threads = 1
    graph = folder / "model.onnx"
    options.optimized_model_filepath = str(graph)
    for name, value in (
        ("optimized_model_external_initializers_file_name", "weights"),
        ("optimized_model_external_initializers_min_size_in_bytes", str(1 << 16)),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{name}", value)
    try:
        create(ort, path, options, ["CPUExecutionProvider"])
    except errors_of(ort) as error:
        raise InvalidArgument(f"ONNX Runtime cannot save {path.name} optimized: {reason_of(error)}") from error
    return graph


def version() -> str:
    """Return an identifier of the installed build of ONNX Runtime."""
    ort = package()
    return f"{ort.__version__} {ort.get_build_info()}"


def options_of(ort: Any, path: Path, library: Path | None) -> Any:
    """Return the options of every session.

    Raises:
        InvalidArgument: there is no such file, or ``library`` is not a library of custom operators.
    """
    if not path.is_file():
        raise InvalidArgument(f"there is no model file {path}")
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_FATAL_ONLY
    options.inter_op_num_threads = 1
    # Threads spin between calls by default (https://github.com/microsoft/onnxruntime/pull/11841), which took 103 % of a
    # core at 200 requests/s, against 5 % without.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Without VNNI, sums of products of 8 bits saturate, and an archive would answer otherwise than where it was made.
    # This chooses the slower kernels without saturation; processors with VNNI need none.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if library is not None:
        _register(ort, options, library)
    return options


def create(ort: Any, path: Path, options: Any, providers: Sequence[Provider]) -> Any:
    """Return a session.

    Raises:
        Exception: one of :func:`errors_of`: ONNX Runtime cannot run the file.
    """
    try:
        return ort.InferenceSession(str(path), options, providers=providers, **OPENED)
    except errors_of(ort) as error:
        if "Attempt to replace the existing tensor" not in str(error):
            raise
    # The kernels without saturation replace 8-bit weights, and fail where two products share their weights.
    log.warning("%s: sums of its 8-bit products may saturate, since this processor lacks VNNI", path.name)
    options.add_session_config_entry("session.x64quantprecision", "0")
    return ort.InferenceSession(str(path), options, providers=providers, **OPENED)


def package() -> Any:
    """Return ONNX Runtime's package; every use of it in Ingot comes through here.

    Raises:
        Unsupported: it is not installed.
    """
    # Its packages report their use to Microsoft unless this is set before they are loaded. A server must not call out
    # unasked; users who want the reports set the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise missing_package(
            "onnxruntime", "running ONNX models", "cpu' or, with an NVIDIA GPU, 'ingot-serve[gpu]"
        ) from error
    return onnxruntime


def _register(ort: Any, options: Any, library: Path) -> None:
    try:
        options.register_custom_ops_library(str(library.resolve()))
    except errors_of(ort) as error:
        raise InvalidArgument(f"{library} is not a library of custom operators: {reason_of(error)}") from error


def errors_of(ort: Any) -> tuple[type[Exception], ...]:
    """Return the exception types of ONNX Runtime."""
    # ONNX Runtime's exceptions have no common base class.
    state = ort.capi.onnxruntime_pybind11_state
    names = (
        "Fail",
        "InvalidArgument",
        "NoSuchFile",
        "NoModel",
        "EngineError",
        "RuntimeException",
        "InvalidProtobuf",
        "ModelLoaded",
        "NotImplemented",
        "InvalidGraph",
        "EPFail",
    )
    return (RuntimeError, ValueError, *(getattr(state, name) for name in names if hasattr(state, name)))


def pick_device(ort: Any, device: str, provider: str = CUDA) -> str:
    """Return the device to load to: ``cpu``, or a GPU, such as ``cuda:0``.

    Args:
        ort: the package.
        device: the request.
        provider: the execution provider for GPUs; without it, ``auto`` is the CPU.

    Raises:
        InvalidArgument: there is no such device.
        Unsupported: it is not available.
    """
    kind, _, index = device.partition(":")
    if device != "cpu" and not re.fullmatch(r"(auto|cuda)(:\d+)?", device):
        raise InvalidArgument(
            f"ONNX Runtime has no device '{device}'; use auto, cpu, cuda, or cuda:1 for the second GPU, or name the "
            "engine that runs on a plug-in's device (--engine)"
        )
    if device == "cpu":
        return device
    providers = ort.get_available_providers()
    built = provider in providers
    usable = built and devices.has_cuda()
    if kind == "cuda" and not usable:
        lacking = (devices.driver_fault() or "no NVIDIA driver or GPU found") if built else _NO_CUDA
        raise Unsupported(f"device '{device}' is not available: {lacking}")
    if not usable:
        devices.warn_of_unused_gpus("" if CUDA in providers else _NO_CUDA)
        return "cpu"
    return f"cuda:{index or nvml.roomiest()}"


Provider = str | tuple[str, dict[str, str]]


def providers_of(
    ort: Any,
    device: str,
    pipeline: Pipeline | None,
    *,
    tf32: bool = False,
    graphs: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
) -> list[Provider]:
    """Return the execution providers of a session, first choice first.

    Args:
        ort: the package.
        device: the result of :func:`pick_device`.
        pipeline: in whose stream a GPU's kernels are to run; None for one of the session's.
        tf32: whether factors of 32-bit products may be rounded to 10 bits: faster, but not the numerics that the export
            proved. Without it, convolutions of 16-bit floats do not use tensor cores either.
        graphs: whether runs with a ``gpu_graph_id`` are captured and replayed.
        more: further options of the provider for GPUs.
    """
    if device == "cpu":
        return ["CPUExecutionProvider"]
    if hasattr(ort, "preload_dlls"):
        _preload(ort)
    options = gpu_options(device, pipeline) | {"use_tf32": str(int(tf32)), **more}
    if graphs:
        options["enable_cuda_graph"] = "1"
    return [(CUDA, options), "CPUExecutionProvider"]


@cache
def _preload(ort: Any) -> str:
    """Load the libraries of CUDA and cuDNN of NVIDIA's packages; return what ONNX Runtime prints of those it lacks."""
    printed: list[str] = []
    with _preloading:
        # Its module prints, in front of what a command prints, which may be JSON. The module's name is replaced instead
        # of standard output, which other threads use.
        vars(ort)["print"] = lambda *values: printed.append(" ".join(map(str, values)))
        try:
            ort.preload_dlls()
            if printed:  # it has looked in its own folder of packages, and NVIDIA's may be in another one
                for folder in _nvidia_folders():
                    ort.preload_dlls(directory=str(folder))
                printed.clear()
                ort.preload_dlls()
        finally:
            del vars(ort)["print"]
    return " ".join(printed)


def _nvidia_folders() -> list[Path]:
    """Return the folders of libraries of NVIDIA's packages, wherever modules are imported from."""
    spec = importlib.util.find_spec("nvidia")
    roots = None if spec is None else spec.submodule_search_locations
    return [folder for root in roots or () for folder in sorted(Path(root).glob("*/lib"))]


def missing_libraries() -> str:
    """Return which libraries a session on a GPU lacks, to append to a message; empty if none or unknown."""
    ort = package()
    missing = _preload(ort) if hasattr(ort, "preload_dlls") else ""
    return f": {missing}" if missing else ""


def gpu_options(device: str, pipeline: Pipeline | None) -> dict[str, str]:
    """Return the options of every provider for GPUs."""
    options = {"device_id": str(devices.index_of(device))}
    if pipeline is not None:
        options |= {"has_user_compute_stream": "1", "user_compute_stream": str(pipeline.compute)}
    return options


def reason_of(error: Exception) -> str:
    """Return the meaningful part of an ONNX Runtime message, without source locations."""
    text = str(error)
    text = text.rpartition("Status Message: ")[2] or text
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from .*? failed: ?", "", text)  # the caller names the file
    # Source locations: by path with the function signature, or by name alone; and the failed check.
    text = re.sub(r"/\S+\.(cc|h):\d+ ([^()]*\([^()]*\)( const)?|\S+) ?", "", text)
    text = re.sub(r"\b\w+\.(cc|h):\d+ \S+ ?", "", text)
    return re.sub(r"^[\w \[\]().:<>=!&|+*/-]+ was false\. ", "", text).strip()
