"""A model of a GPU: streams as queues in virtual time, and a check that every use of memory is ordered.

Work runs as late as its streams and events allow: when the host waits for it. Each piece of work has a vector clock:
the work that is ordered before it by its stream, by events and by waits of the host. It may read memory only if all
writes to it are ordered before, and write it only if all uses are.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np

from ingot.errors import EngineLost, TooLarge
from ingot.runtime.gpu.pipeline import OnDevice
from ingot.tensors import Array, DType

Clock = dict[int, int]
Span = tuple[int, int]
"""An address and a number of bytes."""


class UnorderedAccess(AssertionError):
    """Memory is used while other work may use it."""


@dataclass
class _Use:
    span: Span
    stream: int
    number: int
    writes: bool


@dataclass
class _Stream:
    work: list[Callable[[], None]] = field(default_factory=list)
    ran: int = 0
    clock: Clock = field(default_factory=dict)
    end: float = 0.0


Recorded = list[tuple[Sequence[Span], Sequence[Span], float, Callable[[], None]]]
"""The work of a graph: what each piece reads and writes, how long it takes, and what it does."""


@dataclass(frozen=True)
class _Mark:
    """What an event was recorded after."""

    stream: int
    number: int
    clock: Clock
    end: float


class FakeDevice:
    """A :class:`ingot.runtime.gpu.device.Device`.

    Args:
        copy_seconds: virtual duration of each copy, in and out.
        memory: bytes of the device.
        pinnable: bytes of the host that can be pinned.

    Attributes:
        now: virtual time of the host, in seconds.
        stalls: calls that wait for the whole device on a real one.
        acrosses: copies within the device.
        shared: memory of other processes, by its address.
        early: for each unmapping of such memory that work may still use, why.
    """

    def __init__(
        self, copy_seconds: tuple[float, float] = (1, 1), memory: int = 1 << 30, pinnable: int = 1 << 30
    ) -> None:
        self.name = "fake:0"
        self.lost = ""
        self.now = 0.0
        self.stalls = 0
        self.memory = memory
        self.pinnable = pinnable
        self.acrosses = 0
        self.shared: dict[int, Array] = {}
        self.early: list[str] = []
        self.blocks: dict[int, Array] = {}
        self.pinned: dict[int, Array] = {}
        self._copy_seconds = copy_seconds
        self._freed: list[Array] = []
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Mark | None] = {}
        self._host: Clock = {}
        self._uses: list[_Use] = []
        self._number = 0
        self._lock = RLock()
        self._recorded: dict[int, Recorded] = {}

    # The interface.

    def stream(self) -> int:
        self._number += 1
        self._streams[self._number] = _Stream()
        return self._number

    def close_stream(self, stream: int) -> None:
        with self._lock:
            event = self.event()
            self.record(event, stream)
            self.synchronize(event)
            self.close_event(event)
            del self._streams[stream]

    def event(self) -> int:
        self._number += 1
        self._events[self._number] = None
        return self._number

    def close_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._check_alive()
            assert stream not in self._recorded, "an event is recorded during a capture"
            found = self._streams[stream]
            self._events[event] = _Mark(stream, len(found.work), dict(found.clock), found.end)

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._check_alive()
            mark = self._events[event]
            if mark is not None:  # like CUDA, which does not wait for an event that was never recorded
                found = self._streams[stream]
                _join(found.clock, mark.clock)
                found.end = max(found.end, mark.end)
                found.work.append(lambda: self._run(mark))

    def synchronize(self, event: int) -> None:
        with self._lock:
            self._check_alive()
            mark = self._events[event]
            if mark is not None:
                self._run(mark)
                _join(self._host, mark.clock)
                self.now = max(self.now, mark.end)
                self._uses = [use for use in self._uses if not self._known(use)]

    def pin(self, nbytes: int) -> int | None:
        with self._lock:
            self.stalls += 1
            if nbytes > self.pinnable:
                return None
            self.pinnable -= nbytes
            return _kept(self.pinned, nbytes)

    def unpin(self, address: int) -> None:
        with self._lock:
            self.stalls += 1
            self.pinnable += len(self.pinned[address])
            self.touch((address, len(self.pinned[address])), writes=True)
            del self.pinned[address]

    def allocate(self, nbytes: int, stream: int) -> int:
        with self._lock:
            self._check_alive()
            if nbytes > self.memory:
                raise TooLarge("the fake device has too little memory left")
            self.memory -= nbytes
            return _kept(self.blocks, nbytes)

    def free(self, address: int, stream: int) -> None:
        with self._lock:
            block = self.blocks.pop(address)
            self.memory += len(block)
            self._freed.append(block)  # kept, so that its address is not used again
            self.work(stream, (), [(address, len(block))], 0, lambda: block.fill(0xDD))

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._check_device((target, nbytes))
        self.work(
            stream, [(source, nbytes)], [(target, nbytes)], self._copy_seconds[0], lambda: move(target, source, nbytes)
        )

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._check_device((source, nbytes))
        self.work(
            stream, [(source, nbytes)], [(target, nbytes)], self._copy_seconds[1], lambda: move(target, source, nbytes)
        )

    def copy_across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        for address in (target, source):
            self._check_device((address, nbytes))
        self.acrosses += 1
        self.work(stream, [(source, nbytes)], [(target, nbytes)], 0, lambda: move(target, source, nbytes))

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        address = int.from_bytes(handle, "little")
        self.blocks[address] = self.shared[address]
        return address, len(self.shared[address])

    def close_shared(self, address: int) -> None:
        with self._lock:
            del self.blocks[address]
            try:
                self.touch((address, len(self.shared[address])), writes=True)
            except UnorderedAccess as error:  # garbage collection, which unmaps memory, must not raise
                self.early.append(str(error))

    # For tests.

    def share(self, array: Array) -> bytes:
        """Let another process have an array in memory of the device; return the handle."""
        block = np.frombuffer(bytearray(array.tobytes()), np.uint8)
        self.shared[block.ctypes.data] = block
        return block.ctypes.data.to_bytes(8, "little")

    def fail(self, reason: str) -> None:
        """Let the device fail for good: its work ends, and all later calls fail."""
        with self._lock:
            self.lost, self._uses = reason, []

    def work(
        self, stream: int, reads: Sequence[Span], writes: Sequence[Span], seconds: float, action: Callable[[], None]
    ) -> None:
        """Enqueue work that reads and writes memory, in its order, and takes a virtual time."""
        with self._lock:
            self._check_alive()
            if stream in self._recorded:
                self._recorded[stream].append((reads, writes, seconds, action))
                return
            found = self._streams[stream]
            _join(found.clock, self._host)
            number = found.clock[stream] = found.clock.get(stream, 0) + 1
            found.end = max(found.end, self.now) + seconds
            for spans, written in ((reads, False), (writes, True)):
                for span in spans:
                    self._check(span, found.clock, writes=written)
            self._uses += [_Use(span, stream, number, False) for span in reads]
            self._uses += [_Use(span, stream, number, True) for span in writes]
            found.work.append(action)

    def begin_capture(self, stream: int) -> None:
        """Record the work of a stream from now on instead of running it."""
        self._recorded[stream] = []

    def end_capture(self, stream: int) -> Recorded:
        """Return the work that was recorded."""
        return self._recorded.pop(stream)

    def replay(self, recorded: Recorded, stream: int) -> None:
        """Enqueue recorded work: at the addresses that it had, whatever is there now."""
        for reads, writes, seconds, action in recorded:
            self.work(stream, reads, writes, seconds, action)

    def holds(self, address: int) -> bool:
        """Return whether an address is in memory of the device."""
        return any(start <= address < start + len(block) for start, block in list(self.blocks.items()))

    def touch(self, span: Span, *, writes: bool) -> None:
        """Let the host use memory now."""
        with self._lock:
            self._check(span, self._host, writes=writes)

    def run_stream(self, stream: int) -> None:
        """Run what is in a stream now; nothing is ordered by that."""
        with self._lock:
            found = self._streams[stream]
            self._run(_Mark(stream, len(found.work), {}, 0))

    def _run(self, mark: _Mark) -> None:
        found = self._streams.get(mark.stream)
        while found is not None and found.ran < mark.number:
            action = found.work[found.ran]
            found.ran += 1
            action()

    def _check(self, span: Span, clock: Clock, *, writes: bool) -> None:
        for use in self._uses:
            if (writes or use.writes) and _overlap(span, use.span) and clock.get(use.stream, 0) < use.number:
                verb = "written" if writes else "read"
                raise UnorderedAccess(f"{span} is {verb} while work {use.number} of stream {use.stream} may use it")

    def _known(self, use: _Use) -> bool:
        return self._host.get(use.stream, 0) >= use.number

    def _check_device(self, span: Span) -> None:
        if not any(start <= span[0] and sum(span) <= start + len(block) for start, block in list(self.blocks.items())):
            raise UnorderedAccess(f"{span} is not memory of the device, or was freed")

    def _check_alive(self) -> None:
        if self.lost:
            raise EngineLost(f"the device {self.name} failed: {self.lost}")


class Arena:
    """The arena of an engine: memory of the device that is free for later work in the same stream at once."""

    def __init__(self, device: FakeDevice):
        self._device = device
        self._free: dict[int, deque[int]] = {}

    def output(self, shape: tuple[int, ...], dtype: DType, stream: int) -> OnDevice:
        """Allocate an output, whose owner frees it."""
        nbytes = int(np.prod(shape)) * dtype.numpy.itemsize
        free = self._free.setdefault(nbytes, deque())
        address = free.popleft() if free else self._device.allocate(nbytes, stream)
        owner = np.empty(0)
        weakref.finalize(owner, free.append, address).atexit = False
        return OnDevice(address, shape, dtype, owner)


class Doubling:
    """A launch whose output ``y`` is twice its input ``x``; ``seconds`` is how long it takes."""

    def __init__(self, device: FakeDevice, stream: int, seconds: float = 1):
        self.device = device
        self.seconds = seconds
        self.arena = Arena(device)
        self.failing: Exception | None = None
        self._stream = stream

    def __call__(self, inputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[OnDevice]:
        array = inputs["x"]
        source, shape, dtype, nbytes = addresses["x"], array.shape, array.dtype, array.nbytes
        output = self.arena.output(shape, DType.of(array), self._stream)
        target = output.address
        del array  # which the work must not keep

        def double() -> None:
            view(target, shape, dtype)[...] = 2 * view(source, shape, dtype)

        reads, writes = [(source, nbytes)], [(target, nbytes)]
        self.device.work(self._stream, reads, writes, self.seconds, double)
        if self.failing is not None:  # after a part of the work was enqueued
            raise self.failing
        return [output]


def view(address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return memory as an array."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    array: Array = np.frombuffer(memory, dtype).reshape(shape)
    return array


def span_of(array: Array) -> Span:
    """Return where an array lies."""
    return array.ctypes.data, array.nbytes


def move(target: int, source: int, nbytes: int) -> None:
    """Copy memory."""
    ctypes.memmove(target, source, nbytes)


def _kept(blocks: dict[int, Array], nbytes: int) -> int:
    block = np.full(nbytes, 0xAA, np.uint8)
    blocks[block.ctypes.data] = block
    return block.ctypes.data


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
