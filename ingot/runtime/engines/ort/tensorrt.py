"""ONNX Runtime with TensorRT, which compiles a graph for the GPU that it runs on."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from ingot import foreign
from ingot.errors import Unsupported
from ingot.runtime.engines.ort import ort_session
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.gpu.graphs import obstacle

_REMEDY = "it needs an NVIDIA GPU, ingot-serve[gpu], and TensorRT: pip install tensorrt"


class TensorRtEngine(OrtEngine):
    """A session whose graph TensorRT compiles as far as it can; CUDA kernels of ONNX Runtime compute the rest.

    Compiling takes minutes. It happens when the model is loaded if all sizes but the batch's are fixed, and otherwise
    again whenever a size is outside of the range of earlier ones.

    Args:
        path: the graph, with its external data in the same folder.
        device: ``cuda``, ``cuda:1`` for the second GPU, or ``auto``.
        threads: CPU threads per call.
        library: as for :class:`OrtEngine`.
        precision: ``f32``, ``tf32``, or ``fp16``: in which layers may be computed.
        cache: a folder for what was compiled, which later loads then use; None for none.
        max_batch: samples of the largest batch.

    Raises:
        Unsupported: TensorRT is not available.
        InvalidArgument: ONNX Runtime cannot run the file.
    """

    platform = "onnxruntime_tensorrt"
    provider = "TensorrtExecutionProvider"

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        library: Path | None = None,
        precision: str = "f32",
        cache: Path | None = None,
        max_batch: int = 64,
    ):
        ort = ort_session.package()
        if device == "cpu" or ort_session.pick_device(ort, device, self.provider) == "cpu":
            raise Unsupported(f"the engine 'tensorrt' is not available on device '{device}': {_REMEDY}")
        self._options = {"trt_fp16_enable": str(int(precision == "fp16"))}
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            for kind in ("engine", "timing"):
                self._options |= {f"trt_{kind}_cache_enable": "1", f"trt_{kind}_cache_path": str(cache)}
        self._options |= _profile(path, library, max_batch)
        # Its package loads its libraries, which ONNX Runtime would otherwise look for in the system's folders.
        foreign.attempt(functools.partial(importlib.import_module, "tensorrt"))
        super().__init__(path, device=device, threads=threads, library=library, precision=precision)

    def _providers(self, ort: Any, *, graphs: bool) -> list[ort_session.Provider]:
        others = super()._providers(ort, graphs=graphs)
        return [(self.provider, ort_session.gpu_options(self.device, self._pipeline) | self._options), *others]

    def _lacks_providers(self) -> None:
        raise Unsupported(f"ONNX Runtime could not load TensorRT: {_REMEDY}")


def _profile(path: Path, library: Path | None, max_batch: int) -> dict[str, str]:
    """Return the range of sizes for which the graph is compiled; empty if it is not known."""
    plain = OrtEngine(path, device="cpu", threads=1, library=library, packed=False)
    signature = plain.signature
    plain.close()
    if signature.batch is None or obstacle(signature):
        return {}

    def shapes(samples: int) -> str:
        sizes = [(spec.name, [samples if isinstance(dim, str) else dim for dim in spec.shape]) for spec in inputs]
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in sizes)

    inputs = signature.inputs
    ends = {"min": 1, "opt": max_batch, "max": max_batch}
    return {f"trt_profile_{end}_shapes": shapes(samples) for end, samples in ends.items()}
