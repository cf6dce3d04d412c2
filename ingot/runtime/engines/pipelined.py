"""The common part of the engines that run in pipelines on GPUs: lanes with one copy of the model, and pinned memory."""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

from ingot.errors import Unsupported
from ingot.runtime.engines.engine import BaseEngine, Capabilities
from ingot.runtime.gpu.graphs import Graphs
from ingot.runtime.gpu.opening import open_device
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.tensors import Array, TensorSpec

log = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


class PipelinedEngine(BaseEngine):
    """An engine that may be one of the lanes of a pipeline; without one, it runs one batch at a time."""

    _pipeline: Pipeline | None = None
    _lane: _Closable | None = None
    _graphs: Graphs | None = None
    _users: list[Any]  # the engines that share this one's model and pipeline

    @property
    def capabilities(self) -> Capabilities:
        captured = () if self._graphs is None or self._graphs.failure else tuple(self._graphs.sizes)
        return Capabilities(captured=captured, allocates=True)

    @abstractmethod
    def _enter(self, pipeline: Pipeline) -> None:
        """Make a lane of the pipeline for this engine."""

    @abstractmethod
    def _release(self) -> None:
        """Drop the model, which other lanes may still use."""

    def more_lanes(self, count: int) -> list[Self]:
        """Return up to ``count`` engines that share this one's model: each can have a batch in flight.

        On the CPU there is nothing to overlap, so there are none.
        """
        lanes: list[Self] = []
        while self._lane is not None and self._pipeline is not None and len(lanes) < count:
            other = copy.copy(self)
            other._enter(self._pipeline)
            self._users.append(other)
            lanes.append(other)
        return lanes

    @property
    def down(self) -> str:
        """Why its device has failed for good; empty while it works."""
        return "" if self._pipeline is None else self._pipeline.device.lost

    def allocate(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        """Return an uninitialized array for an input, in the memory from which ``run`` reads it fastest.

        On a GPU that is pinned memory, on the CPU ordinary memory.
        """
        if self._lane is None or self._pipeline is None:
            return np.empty(shape, spec.dtype.numpy)
        return self._pipeline.pool.empty(shape, spec.dtype.numpy)

    def close(self) -> None:
        """Free the lane's memory, and after the last lane the model's and the pipeline's."""
        if self._lane is not None:
            self._lane.close()
        self._lane = None
        self._release()
        self._users.remove(self)
        if self._pipeline is not None and not self._users:
            self._pipeline.close()  # after the model, whose kernels are in its streams


def pipeline_of(device: str) -> Pipeline | None:
    """Return a pipeline on a GPU; None, which a warning explains, if its driver is too old for that."""
    try:
        return Pipeline(open_device(device))
    except Unsupported as error:
        log.warning("models on %s have one batch in flight: %s", device, error)
        return None
