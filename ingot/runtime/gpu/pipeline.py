"""Several batches in flight on a GPU, so that one is copied in while another is computed and a third is copied out.

Three streams of the device run one kind of work each, in the order in which batches were launched. Events order the
three steps of a batch, and only its own thread waits for its end::

    copy in      1 2 3 4          a batch's copy may begin while earlier batches are computed
    compute        1 2 3 4        waits for the event after the batch's copy in
    copy out         1 2 3 4      waits for the event after the batch's computation

"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType

import numpy as np

from ingot.errors import IngotError
from ingot.runtime.gpu.array import DeviceArray, JoinedArray, Range
from ingot.runtime.gpu.device import Device
from ingot.runtime.gpu.pinned import PinnedPool
from ingot.runtime.gpu.turns import Turn, turns_of
from ingot.tensors import Array, DType

POOL_LIMIT = 1 << 30
"""Most bytes of pinned memory of one pipeline."""

NO_TARGETS: Mapping[int, Sequence[Range]] = MappingProxyType({})

# Bytes by which addresses of inputs are aligned: no kernel expects more.
_ALIGNED = 256


@dataclass(frozen=True)
class OnDevice:
    """An output that work in the compute stream writes to the device's memory.

    ``owner`` keeps that memory: it is free for other work in the compute stream as soon as nothing refers to the owner.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    owner: object


Launch = Callable[[Mapping[str, Array], Mapping[str, int]], Sequence[OnDevice | Array]]
"""Enqueues a batch's computation in the compute stream without waiting for it, and returns the outputs.

It receives the inputs and the addresses of those that are copied to the device. An output that is an array is complete
already. One batch is launched at a time.
"""


class Pipeline:
    """The streams, events and pinned memory that the lanes of one engine share; call :meth:`close` after the lanes'.

    Args:
        device: where batches are computed.
        limit: most bytes of pinned memory for inputs and outputs, replies that are being sent included.
    """

    def __init__(self, device: Device, limit: int = POOL_LIMIT):
        self.device = device
        self.pool = PinnedPool(device, limit)
        self.copy_in, self.compute, self.copy_out = (device.stream() for _ in range(3))
        self.order = Lock()
        self.turns = turns_of(device)
        self.share = self.turns.join()

    @property
    def streams(self) -> tuple[int, int, int]:
        """The streams for copies in, for computation and for copies out."""
        return self.copy_in, self.compute, self.copy_out

    def close(self) -> None:
        """Return the memory to the device and the system; pinned memory of outputs when nothing refers to them."""
        self.turns.leave(self.share)
        self.pool.close()
        with contextlib.suppress(IngotError):  # the device has failed, and its memory is lost
            for stream in self.streams:
                self.device.close_stream(stream)


class Lane:
    """One of the batches that a pipeline has in flight, with its place in the device's memory.

    :meth:`start` and :meth:`finish` alternate, in one thread at a time.

    Args:
        pipeline: shared with the other lanes.
        launch: enqueues the computation.
        copied: names of the inputs that are copied to the device.
        rooms: least bytes for an input on the device. Inputs that fit have the same addresses in every batch, until one
            that does not fit moves all of them.
    """

    def __init__(
        self, pipeline: Pipeline, launch: Launch, copied: Sequence[str], rooms: Mapping[str, int] = MappingProxyType({})
    ):
        self._pipeline = pipeline
        self._device = device = pipeline.device
        self._launch = launch
        self._copied = copied
        self._rooms = rooms
        self._events = [device.event() for _ in range(3)]
        self._block, self._size = 0, 0
        self._inputs: Mapping[str, Array] = {}
        self._outputs: Sequence[OnDevice | Array] = ()
        self._results: list[Array] = []
        self._delivered: list[Range] = []
        self._slow: list[tuple[int, Array]] = []  # outputs to copy to ordinary memory
        self._turn: Turn | None = None  # while several engines share the device

    def run(self, inputs: Mapping[str, Array], targets: Mapping[int, Sequence[Range]] = NO_TARGETS) -> list[Array]:
        """Compute a batch; see :meth:`start`."""
        self.start(inputs, targets)
        return self.finish()

    def start(self, inputs: Mapping[str, Array], targets: Mapping[int, Sequence[Range]] = NO_TARGETS) -> None:
        """Enqueue a batch: copies in, computation and copies out.

        Args:
            inputs: an array for each; they must not change until :meth:`finish` returns. Those that are not pinned
                are copied to pinned memory first; those on the device are copied there.
            targets: places on the device for samples of outputs, by the outputs' order.

        Raises:
            TooLarge: the device has not enough memory for it. Later batches are not affected.
            EngineLost: the device has failed.
            Exception: errors of the launch.
        """
        pipeline, device = self._pipeline, self._device
        copied, computed, done = self._events
        for ranges in targets.values():
            for each in ranges:
                each.target.done = False  # of a batch that failed, and runs in parts
        self._inputs = {**inputs, **{name: pipeline.pool.placed(inputs[name]) for name in self._copied}}
        try:
            addresses = self._copy_in()
            device.record(copied, pipeline.copy_in)
            if pipeline.turns.shared:
                self._turn = pipeline.turns.enter(pipeline.share)
            with pipeline.order:
                device.wait(pipeline.compute, copied)
                self._outputs = self._launch(self._inputs, addresses)
                device.record(computed, pipeline.compute)
                device.wait(pipeline.copy_out, computed)
                self._results = [
                    self._copy_out(output, targets.get(index, ())) for index, output in enumerate(self._outputs)
                ]
                slow, self._slow = self._slow, []
                if not slow:
                    device.record(done, pipeline.copy_out)  # before copies of other lanes
            # A copy to ordinary memory waits for the batch; other lanes may launch theirs meanwhile.
            for address, array in slow:
                device.copy_out(array.ctypes.data, address, array.nbytes, pipeline.copy_out)
            if slow:
                device.record(done, pipeline.copy_out)
        except BaseException:  # whatever ends the launch, its work still uses the memory
            self._settle()
            raise

    def finish(self) -> list[Array]:
        """Wait for the batch of :meth:`start`, and return its outputs in the order of the launch.

        An output of which all samples have been copied to targets has its shape, but not its values.

        Raises:
            EngineLost: the device has failed.
        """
        try:
            self._device.synchronize(self._events[2])
        finally:
            self._end_turn()
        for each in self._delivered:
            each.target.done = True
        results, self._results, self._delivered = self._results, [], []
        self._inputs, self._outputs = {}, ()
        return results

    def close(self) -> None:
        """Free the lane's memory of the device, and drop the launch; no batch may be in flight."""
        # It refers to what owns this lane, and so to the model: a cycle, whose memory of the device would stay, since a
        # server excludes what is there after loading from garbage collection.
        del self._launch
        with contextlib.suppress(IngotError):  # the device has failed, and its memory is lost
            self._free()
            for event in self._events:
                self._device.close_event(event)

    def _copy_in(self) -> dict[str, int]:
        """Enqueue the copies of inputs, and return their addresses on the device."""
        offsets, size = {}, 0
        for name in self._copied:
            offsets[name] = size
            size += -(-max(self._inputs[name].nbytes, self._rooms.get(name, 0)) // _ALIGNED) * _ALIGNED
        if size > self._size:
            self._free()
            block = 1 << (size - 1).bit_length()
            self._block, self._size = self._device.allocate(block, self._pipeline.copy_in), block
        addresses = {name: self._block + offset for name, offset in offsets.items()}
        for name, address in addresses.items():
            array: Array | DeviceArray | JoinedArray = self._inputs[name]
            if isinstance(array, DeviceArray | JoinedArray):
                array.copy_to(address, self._device, self._pipeline.copy_in)
            elif array.nbytes:
                self._device.copy_in(address, array.ctypes.data, array.nbytes, self._pipeline.copy_in)
        return addresses

    def _copy_out(self, output: OnDevice | Array, targets: Sequence[Range]) -> Array:
        """Enqueue the copies of an output, and return the array that it will be in."""
        if not isinstance(output, OnDevice):
            return output
        if targets and self._deliver(output, targets):
            return np.broadcast_to(np.zeros((), output.dtype.numpy), output.shape)
        array = self._pipeline.pool.empty(output.shape, output.dtype.numpy)
        if array.nbytes and not self._pipeline.pool.holds(array):
            self._slow.append((output.address, array))
        elif array.nbytes:
            self._device.copy_out(array.ctypes.data, output.address, array.nbytes, self._pipeline.copy_out)
        return array

    def _deliver(self, output: OnDevice, targets: Sequence[Range]) -> bool:
        """Enqueue the copies of an output's samples to targets; return whether they are all of its samples."""
        stream, nbytes = self._pipeline.copy_out, math.prod(output.shape) * output.dtype.numpy.itemsize
        delivered = [each for each in targets if each.copy_from(output.address, output.shape, nbytes, stream)]
        self._delivered += delivered
        if len(delivered) < len(targets):
            return False
        samples = [each.stop - each.start for each in delivered if each.stop is not None]
        return len(samples) < len(delivered) or sum(samples) == output.shape[0]

    def _settle(self) -> None:
        """Wait for what a batch that failed has enqueued, since its memory is used again."""
        with contextlib.suppress(IngotError):  # the device has failed, and uses no memory any more
            for event, stream in zip(self._events, self._pipeline.streams, strict=True):
                self._device.record(event, stream)
            for event in self._events:
                self._device.synchronize(event)
        self._inputs, self._outputs, self._results, self._delivered, self._slow = {}, (), [], [], []
        self._end_turn()

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._pipeline.turns.finish(self._turn)
            self._turn = None

    def _free(self) -> None:
        # The lane's last batch is finished, so nothing but work of the copy stream can use the block.
        if self._block:
            self._device.free(self._block, self._pipeline.copy_in)
        self._block, self._size = 0, 0
