"""The one interface that every engine has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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

    @property
    def settings(self) -> Mapping[str, str]:
        """How it runs, for people to read, such as the number of its ``threads``."""
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
