"""The interface of every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ingot.tensors import Array, Signature


class Engine(Protocol):
    """A loaded model on one device. ``run`` may be called from any thread, but from one at a time."""

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of the loaded file, as the engine reads them."""
        ...

    @property
    def platform(self) -> str:
        """The engine's name in the Open Inference Protocol, such as ``onnxruntime_onnx``."""
        ...

    @property
    def device(self) -> str:
        """The device it runs on: ``cpu``, or a kind and an index, such as ``cuda:0``."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """How it runs, for display, such as the number of its ``threads``."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch.

        Raises:
            InvalidArgument: the model rejects these values, such as an index out of range.
            InternalError: the engine failed.
            EngineTimeout: :meth:`terminate` ended the call.
        """
        ...

    def terminate(self) -> None:
        """End the call of :meth:`run` that is running, from any other thread, and return at once.

        The call raises EngineTimeout as soon as the engine can stop: some stop between two operators, some not at all.
        A call that ends meanwhile may return normally. Without a running call this has no effect on later ones; if the
        running call ends and the next begins at the same moment, either may be ended.
        """
        ...

    def close(self) -> None:
        """Free the model's memory; the engine cannot be used afterwards."""
        ...


def lanes_of(engine: Engine, count: int) -> list[Engine]:
    """Return up to ``count`` engines that share one's copy of the model, itself first; only some have others."""
    more_lanes: Callable[[int], list[Engine]] | None = getattr(engine, "more_lanes", None)
    return [engine] if more_lanes is None or count == 1 else [engine, *more_lanes(count - 1)]
