"""An engine in a separate process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.errors import EngineLost, EngineTimeout
from ingot.runtime.engines.engine import BaseEngine, Capabilities
from ingot.runtime.engines.isolation.process import Ended
from ingot.runtime.engines.isolation.spec import ProcessSpec
from ingot.runtime.engines.isolation.supervisor import Supervision, Supervisor
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.machine import devices
from ingot.tensors import Array, DType, Signature, TensorSpec

_LATE = "was killed, since a call did not end at its time limit"


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Why an engine runs in its own process, and its limits.

    ``memory_mb`` is the most private memory of the process, and ``load_timeout`` the seconds in which it must be ready.
    ``required`` is whether the engine may not be opened in this process if no other can, such as for operators that
    only this program defines.
    ``call_mb`` is the most that a call may add to what the process holds once it is ready, if ``memory_mb`` is None.
    ``lanes`` is how many calls may run at a time on a GPU, and ``call_timeout`` the seconds after which a call that has
    not ended is ended with its process, if nothing else watches its duration.
    """

    why: str
    required: bool = False
    memory_mb: int | None = None
    load_timeout: float | None = None
    call_mb: int | None = None
    lanes: int = 1
    call_timeout: float | None = None


class ProcessEngine(BaseEngine):
    """An :class:`~ingot.runtime.engines.engine.Engine` in an engine process.

    Until :meth:`supervise` is called, the engine ends with its process. After that, another process is started, tested
    and used in its place.

    Args:
        spec: the model file, and how the engine opens it.
        isolation: why, and the limits.

    Raises:
        IngotError: the engine cannot be opened.
        EngineLost: the process ended.
        DeadlineExceeded: opening takes longer than the limit.
    """

    def __init__(self, spec: EngineSpec, isolation: Isolation):
        self.isolation = isolation
        gpu = devices.has_cuda() if devices.kind_of(spec.device) == "auto" else spec.device != "cpu"
        lanes = isolation.lanes if gpu and spec.shards == 1 else 1
        memory_mb, call_mb = isolation.memory_mb, isolation.call_mb
        process = ProcessSpec(engine=spec, gpu=gpu, lanes=lanes, memory_mb=memory_mb, call_mb=call_mb)
        if process.cache is not None:
            process.cache.mkdir(parents=True, exist_ok=True)  # the process may write there, but create no folder
        self._supervisor = Supervisor(process, isolation.load_timeout)
        self._supervisor.start()
        described = self._supervisor.description
        self.signature: Signature = described.signature
        self.platform = described.platform
        self.device = described.device
        self.measures = described.measures
        self.settings: Mapping[str, str] = {**described.settings, "process": "own"}
        self._example = described.inputs
        self._capabilities = dataclasses.replace(described.capabilities, allocates=True, isolated=True)
        self._lanes = min(described.lanes, lanes)
        self._lane = 0
        self._users = [self]  # of the process

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def example(self) -> Mapping[str, Array]:
        return self._example

    def more_lanes(self, count: int) -> list[ProcessEngine]:
        """Return up to ``count`` engines that share this one's process: each can have a batch in flight."""
        others: list[ProcessEngine] = []
        for lane in range(1, min(count + 1, self._lanes)):
            other = copy.copy(self)
            other._lane = lane
            others.append(other)
        self._users += others
        return others

    @property
    def down(self) -> str:
        """How the last process ended, while no other is ready; empty otherwise."""
        return self._supervisor.down

    @property
    def failed(self) -> bool:
        """Whether processes ended so often that restarts are delayed."""
        return self._supervisor.failed

    def supervise(self, supervision: Supervision) -> None:
        """Restart the process from now on when it ends."""
        self._supervisor.supervise(supervision)

    def allocate(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        """Return an uninitialized array for an input, in shared memory if there is room."""
        arena = self._supervisor.inputs[self._lane]
        made = None if spec.dtype is DType.BYTES else arena.allocate(shape, spec.dtype.numpy)
        return np.empty(shape, spec.dtype.numpy) if made is None else made

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; outputs are read-only.

        Raises:
            EngineLost: the process ended during the call.
            Unavailable: none can be started.
            EngineTimeout: :meth:`terminate` or :meth:`kill` ended the call.
            IngotError: that of the engine.
        """
        supervisor = self._supervisor
        process = supervisor.running()
        try:
            return process.run(inputs, supervisor.left or self.isolation.call_timeout, self._lane)
        except Ended as error:
            supervisor.lose(process)
            if process.ending == _LATE:
                raise EngineTimeout(f"{supervisor.name} {_LATE}") from error
            raise EngineLost(
                f"{supervisor.name} {error}; the request may have caused it. It is being restarted"
            ) from error
        finally:
            if process.retiring:
                supervisor.retire(process)

    def terminate(self) -> None:
        self._supervisor.terminate(self._lane)

    def end_streams(self, numbers: Sequence[int]) -> bool:
        return self._supervisor.end_streams(numbers)

    def kill(self) -> None:
        """End the process, since its call does not end; another is started. Calls of other lanes end with it."""
        self._supervisor.kill(_LATE)

    def close(self) -> None:
        if self in self._users:
            self._users.remove(self)
        if not self._users:
            self._supervisor.close()
