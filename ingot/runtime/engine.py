"""The one interface that every engine has, and the choice of an engine for a model file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ingot.errors import Unsupported
from ingot.tensors import Array, Signature


class Engine(Protocol):
    """One loaded model on one device. ``run`` may be called from any one thread at a time."""

    @property
    def signature(self) -> Signature:
        """What the loaded file takes and gives, as the engine itself reads it."""
        ...

    @property
    def platform(self) -> str:
        """The engine's name in the Open Inference Protocol, such as ``onnxruntime_onnx``."""
        ...

    @property
    def device(self) -> str:
        """Where it really runs: ``cpu`` or ``cuda``."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch.

        Raises:
            InvalidArgument: the model rejects these values, such as an index out of range.
            InternalError: the engine failed.
        """
        ...

    def close(self) -> None:
        """Free the model's memory; the engine cannot be used afterwards."""
        ...


def load_engine(path: Path, *, format: str = "onnx", device: str = "auto", threads: int | None = None) -> Engine:  # noqa: A002
    """Load a model file.

    Args:
        path: the graph; its external data lies beside it.
        format: what kind of file it is, since blobs have no suffix: ``onnx``.
        device: ``cpu``, ``cuda``, or ``auto``: the GPU where there is one.
        threads: CPU threads for one call; by default one a core that this process may use.

    Raises:
        Unsupported: no engine runs the format, it is not installed, or the device is asked for and not there.
        InvalidArgument: the file is not a model that the engine can run.
    """
    if format != "onnx":
        raise Unsupported(f"no engine of this version runs models of format '{format}'")
    from ingot.runtime.engines.ort import OrtEngine  # an engine's package is imported only when it is used

    return OrtEngine(path, device=device, threads=threads)
