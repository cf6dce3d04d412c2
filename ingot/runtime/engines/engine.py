"""The interface of every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.runtime.gpu.array import Direct, Range
from ingot.tensors import Array, Signature, TensorSpec

STREAM = "ingot.stream"
"""The input INT64[batch,2] with the number of each sample's stream, and the index of the answer, from 0."""
MORE = "ingot.more"
"""The output BOOL[batch]: false where a stream has ended, so that the other outputs have no meaning."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """How loading and batching treat an engine; the defaults are those of a plain one.

    Attributes:
        load_seconds: how long loading took; None if the number of CPU threads cannot be tuned by loading again.
        compiles: whether the first call with a new batch size is slow.
        compiles_shapes: whether the first call with any new shape of inputs is slow.
        packed: whether weights are packed in the order of the processor's kernels.
        captured: sizes of batches that become CUDA graphs when they first run, in samples.
        allocates: whether :meth:`Engine.allocate` returns memory from which ``run`` reads faster than from any other.
        isolated: whether the engine runs in an engine process, which :meth:`Engine.kill` can end.
        accepts_zeros: whether the engine may be timed with generated inputs; code could fail on them.
        reports_health: whether :meth:`Engine.health` is to be asked.
        streams: whether samples get several answers. A call with :data:`STREAM` returns the next one of each, and
            :data:`MORE`; one without returns the first ones.
    """

    load_seconds: float | None = None
    compiles: bool = False
    compiles_shapes: bool = False
    packed: bool = False
    captured: tuple[int, ...] = ()
    allocates: bool = False
    isolated: bool = False
    accepts_zeros: bool = True
    reports_health: bool = False
    streams: bool = False


class Engine(Protocol):
    """A loaded model on one device. ``run`` may be called from any thread, but from one at a time.

    :class:`BaseEngine` has the members that few engines need.
    """

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
        """Run one batch, and return arrays that no later call writes to: responses are sent while the next batch runs.

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

    @property
    def capabilities(self) -> Capabilities:
        """How loading and batching treat the engine."""
        ...

    @property
    def example(self) -> Mapping[str, Array]:
        """Inputs that the model states itself, by which it can be timed; empty if there are none."""
        ...

    @property
    def direct(self) -> Direct:
        """The tensors that a call reads from a device or writes there."""
        ...

    @property
    def down(self) -> str:
        """Why its device has failed, or how its process ended while no other is ready; empty while it works."""
        ...

    def deliver(self, inputs: Mapping[str, Array], targets: Mapping[str, Sequence[Range]]) -> dict[str, Array]:
        """Run one batch, and copy samples of outputs in :attr:`direct` to places on the device; see :meth:`run`."""
        ...

    def allocate(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        """Return an uninitialized array for an input."""
        ...

    def more_lanes(self, count: int) -> Sequence[Engine]:
        """Return up to ``count`` engines that share this one's copy of the model: each can have a batch in flight."""
        ...

    def health(self) -> str:
        """Return why the engine is unfit for requests now; empty if it is fit. It is not called during a call."""
        ...

    @property
    def streams(self) -> int:
        """How many streams are open."""
        ...

    def end_streams(self, numbers: Sequence[int]) -> bool:
        """Forget streams, of which no call runs; return False if that has to be repeated later."""
        ...

    def kill(self) -> None:
        """End the engine's process, as a call does not end; only isolated engines have one."""
        ...


class BaseEngine(ABC):
    """The base of engines, with the members of :class:`Engine` that a plain one does not need to define."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See :meth:`Engine.run`."""

    @abstractmethod
    def terminate(self) -> None:
        """See :meth:`Engine.terminate`."""

    @abstractmethod
    def close(self) -> None:
        """See :meth:`Engine.close`."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def example(self) -> Mapping[str, Array]:
        return {}

    @property
    def direct(self) -> Direct:
        return Direct()

    @property
    def down(self) -> str:
        return ""

    def deliver(self, inputs: Mapping[str, Array], targets: Mapping[str, Sequence[Range]]) -> dict[str, Array]:
        """Run one batch; the caller copies what is not delivered."""
        return self.run(inputs)

    def allocate(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        return np.empty(shape, spec.dtype.numpy)

    def more_lanes(self, count: int) -> Sequence[Any]:
        return []

    def health(self) -> str:
        return ""

    @property
    def streams(self) -> int:
        return 0

    def end_streams(self, numbers: Sequence[int]) -> bool:
        return True

    def kill(self) -> None:  # noqa: B027 - most engines run in this process and have none to end
        """Have no effect."""


def lanes_of(engine: Engine, count: int) -> list[Engine]:
    """Return up to ``count`` engines that share one's copy of the model, itself first; only some have others."""
    return [engine] if count == 1 else [engine, *engine.more_lanes(count - 1)]


def direct_of(engines: Sequence[Engine], signature: Signature) -> Direct:
    """Return the tensors that all engines read from the same device or write there, if requests can be joined there."""
    first, *others = [engine.direct for engine in engines]
    if any(other != first for other in others):
        return Direct()

    axis = None if signature.batch is None else 0

    def kept(specs: Sequence[TensorSpec], devices: Mapping[str, str]) -> dict[str, str]:
        # Values are checked on the host, and those of inputs that all samples share are compared there.
        return {
            spec.name: devices[spec.name]
            for spec in specs
            if spec.name in devices and spec.values is None and spec.axis(signature.batch) == axis
        }

    return Direct(kept(signature.inputs, first.inputs), kept(signature.outputs, first.outputs))
