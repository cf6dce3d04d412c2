"""A PyTorch program in several processes, each of which holds a part of its weights."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export.passes import move_to_device_pass

from ingot import foreign
from ingot.errors import IngotError, InternalError
from ingot.model_store.format.manifest import Division
from ingot.runtime.engines.ipc.records import decode_error, encode_error
from ingot.runtime.engines.pytorch.torch_arrays import torch_dtype
from ingot.runtime.engines.pytorch.torch_engine import TorchEngine, pick_device
from ingot.runtime.engines.pytorch.torch_program import flat, read_header, read_program, tensors_of
from ingot.runtime.engines.sharding import tensor_parallel
from ingot.runtime.engines.sharding.collectives import OutOfStep, broadcast
from ingot.runtime.engines.sharding.stages import RunningStage, Stage, stages_of
from ingot.runtime.engines.sharding.tensor_parallel import DividedProgram
from ingot.runtime.machine import devices
from ingot.tensors import Range

log = logging.getLogger(__name__)

# A process waits for the next request without limit; the server ends calls that take too long.
_FOREVER = timedelta(days=365)
# Seconds in which torchrun notices the process that ended first, before others end because of it.
_NOTICE_SECONDS = 1.0


def join(store: str, rank: int, count: int, device: str) -> None:
    """Connect this process with the other processes of its engine, over the loopback interface.

    Args:
        store: a file that all of them can write, empty at first.
        rank: of this process, from 0.
        count: of the processes.
        device: as for :class:`ShardedEngine`.
    """
    own = _device_of(device, rank)
    if own != "cpu":
        torch.cuda.set_device(own)
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo" if own == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, count),  # type: ignore[attr-defined]
        rank=rank,
        world_size=count,
        timeout=_FOREVER,
    )
    _send_at_once()


def _send_at_once() -> None:
    """Send short messages at once: otherwise the system holds one back, up to 40 ms, until the last arrived."""
    for path in Path("/proc/self/fd").iterdir():
        # Others have no owner yet if the constructor fails: a duplicate would stay open.
        if path.is_socket():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _device_of(device: str, rank: int) -> str:
    """Return the device of a process: the one of its number among those named, or among all."""
    named = devices.spread(device)
    if len(named) > 1:
        return pick_device(named[rank])
    picked = pick_device(device)
    return f"cuda:{rank}" if devices.kind_of(picked) == "cuda" else picked


class ShardedEngine(TorchEngine):
    """The part of an engine that runs in this process, which has called :func:`join`.

    The first process answers :meth:`run`; all others call :meth:`follow`. If the processes can no longer work together,
    each of them ends.

    Args:
        path: of an ``ExportedProgram`` saved by :mod:`ingot.export.lower.program`.
        device: ``cpu``, ``cuda`` or ``auto``, for the GPU of the process's number; or ``cuda:2,3``, one for each.
        threads: CPU threads of each process.
        precision: as for :class:`.TorchEngine`.
        plan: how the weights of modules are divided; without one, the program is cut into stages.
        batchable: whether the samples of a batch do not influence each other, so that stages may work on parts of it.

    Raises:
        IngotError: a process cannot load its part; the same in all processes.
    """

    platform = "torch_export"

    def __init__(
        self,
        path: Path,
        *,
        device: str,
        threads: int | None,
        precision: str,
        plan: Mapping[str, Division],
        batchable: bool,
    ):
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        super().__init__(read_header(path).signature, _device_of(device, self._rank), threads, precision)
        self._batchable = batchable
        self._forms = [(len(spec.shape), torch_dtype(spec.dtype)) for spec in self._signature.inputs]
        self._divided: DividedProgram | None = None
        self._stage: RunningStage | None = None
        failures: list[bytes | None] = []
        failure: bytes | None = None
        for turn in range(self._count):  # one after the other, since each needs memory for all weights while it loads
            if turn == self._rank:
                outcome = foreign.outcome(lambda: self._load(path, plan))
                if isinstance(outcome, Exception):
                    failure = encode_error(_loading_error(outcome))
            failures = [None] * self._count
            dist.all_gather_object(failures, failure)
        for found in failures:
            if found is not None:
                raise decode_error(memoryview(found))

    @property
    def settings(self) -> Mapping[str, str]:
        split = "stages" if self._divided is None else "tensor-parallel plan"
        return {**super().settings, "shards": str(self._count), "split": split}

    def call(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            if self._divided is not None:
                return self._divided.call(broadcast(values, self._forms, self._device))
            if self._stage is not None:
                parts = self._stage.lead(self._parts(values))
                return parts[0] if len(parts) == 1 else self._joined(parts)
            raise InternalError("the engine is closed")
        except OutOfStep as error:
            self._end(error)

    def follow(self) -> NoReturn:
        """Take part in the calls of the first process, until one of the processes ends."""
        torch.set_num_threads(self._threads or torch.get_num_threads())
        with torch.no_grad():
            while True:
                try:
                    self._follow_call()
                except OutOfStep as error:
                    self._end(error)

    def _follow_call(self) -> None:
        if self._stage is not None:
            self._stage.follow()
        elif self._divided is not None:
            values = broadcast(None, self._forms, self._device)
            divided = self._divided
            outcome = foreign.outcome(lambda: divided.call(values))  # any other error is that of all processes
            if isinstance(outcome, OutOfStep):
                raise outcome

    def _release(self) -> None:
        self._divided = self._stage = None

    def _end(self, error: OutOfStep) -> NoReturn:
        log.error("process %d of %d ends, since it is out of step: %s", self._rank, self._count, error)
        time.sleep(_NOTICE_SECONDS)
        os._exit(1)

    def _load(self, path: Path, plan: Mapping[str, Division]) -> None:
        """Load the program, keep this process's part of the weights, and move that to its device."""
        _, program = read_program(path)
        program = _functional(program)
        stages: list[Stage] = []
        if plan:
            dims = tensor_parallel.divided_weights(program, plan)
            tensor_parallel.divide(program, dims, self._rank, self._count)
        else:
            stages = stages_of(flat(program), self._count)
            for name in set(program.state_dict) - stages[self._rank].weights:
                kept = isinstance(program.state_dict[name], nn.Parameter)
                nothing = torch.empty(0)
                program.state_dict[name] = nn.Parameter(nothing, requires_grad=False) if kept else nothing
        if self._device != "cpu":
            program = move_to_device_pass(program, self._device)
        module = flat(program)
        if plan:
            # Of the group that join() made: where there are GPUs, init_device_mesh would connect another one.
            group: Any = dist.group.WORLD
            mesh = DeviceMesh.from_group(group, devices.kind_of(self._device))
            self._divided = DividedProgram(module, dims, mesh)
        else:
            module = stages[self._rank].module(module)
            self._stage = RunningStage(module, stages, self._device)
        self._keep_to_itself(tensors_of(module))

    def _parts(self, values: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Divide a batch into as many parts as there are stages, if samples may be separated."""
        batch = self._signature.batch
        found = self._signature.ranges.get(batch, Range()) if batch is not None else Range(2)
        at = [spec.shape.index(batch) if batch in spec.shape else None for spec in self._signature.inputs]
        size = next((value.shape[dim] for value, dim in zip(values, at, strict=True) if dim is not None), 1)
        if not self._batchable or found.low > 1 or found.step > 1 or size < 2:
            return [values]
        most = ceil(size / self._count)
        cut = [
            [value] * ceil(size / most) if dim is None else torch.split(value, most, dim)
            for value, dim in zip(values, at, strict=True)
        ]
        return [list(part) for part in zip(*cut, strict=True)]

    def _joined(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        batch = self._signature.batch
        return [
            torch.cat(pieces, spec.shape.index(batch))
            for spec, pieces in zip(self._signature.outputs, map(list, zip(*parts, strict=True)), strict=True)
        ]


def _functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program in which no operator changes a tensor, which may be divided or in another process."""
    changing = any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for node in program.graph.nodes
    )
    return program.run_decompositions({}) if changing else program


def _loading_error(error: Exception) -> IngotError:
    return error if isinstance(error, IngotError) else InternalError(f"the engine failed: {foreign.typed(error)}")
