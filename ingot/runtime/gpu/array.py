"""Arrays in a device's memory that others own: in regions that another process shares, or tensors of other libraries.

Where an engine copies its inputs to the device, it copies such an array within the device instead. Everything else sees
its shape and datatype; numpy.asarray copies the values to the host.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import IngotError, InvalidArgument
from ingot.runtime.gpu.device import Device
from ingot.tensors import Array


class _Described:
    """The attributes that describe an array, named as numpy's. All arrays are contiguous."""

    __slots__ = ()
    flags = np.empty(0).flags
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]


class DeviceArray(_Described):
    """An array in a device's memory, of at least one number.

    Args:
        device: where it is.
        address: of its first element.
        shape: of the array.
        dtype: of the array.
        owner: keeps the memory; it may be used for other things as soon as nothing refers to the owner.
        ready: an event after which the values are there; 0 if they are. The owner closes it.
    """

    __slots__ = ("address", "device", "dtype", "owner", "ready", "shape")

    def __init__(
        self,
        device: Device,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        owner: object,
        ready: int = 0,
    ):
        self.device = device
        self.address = address
        self.shape = tuple(shape)
        self.dtype = dtype
        self.owner = owner
        self.ready = ready

    def __getitem__(self, key: tuple[slice, ...]) -> DeviceArray:
        """Return a range of samples; ``key`` is a slice of the first dimension."""
        (samples,) = key if isinstance(key, tuple) else (key,)
        start, stop, _ = samples.indices(len(self))
        address = self.address + start * self.nbytes // len(self)
        return DeviceArray(self.device, address, (stop - start, *self.shape[1:]), self.dtype, self.owner, self.ready)

    def copy_to(self, address: int, device: Device, stream: int) -> None:
        """Enqueue a copy of the values to other memory of the device, which is that of the array."""
        self._wait(stream)
        device.copy_across(address, self.address, self.nbytes, stream)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Copy the values to the host, and wait for that."""
        copied = to_host(self.device, self.address, self.nbytes, self._wait).view(self.dtype).reshape(self.shape)
        return copied if dtype is None else copied.astype(dtype, copy=False)

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Join arrays for a batch: numpy calls this only for arguments that include such an array."""
        return JoinedArray(args[0], kwargs["out"]) if function is np.concatenate else NotImplemented

    def _wait(self, stream: int) -> None:
        if self.ready:
            self.device.wait(stream, self.ready)


class JoinedArray(_Described):
    """The arrays of a batch's requests, some on a device and some on the host, joined along the first dimension.

    Args:
        arrays: in their order.
        out: of the host, for all of them; those of the host are copied to their places in it.
    """

    __slots__ = ("_parts", "dtype", "shape")

    def __init__(self, arrays: Sequence[Array | DeviceArray], out: Array):
        self.shape, self.dtype = out.shape, out.dtype
        self._parts: list[Array | DeviceArray] = []
        start = 0
        for array in arrays:
            stop = start + len(array)
            if isinstance(array, DeviceArray):
                self._parts.append(array)
            else:
                place = out[start:stop]
                place[...] = array
                self._parts.append(place)
            start = stop

    def copy_to(self, address: int, device: Device, stream: int) -> None:
        """Enqueue the copies of all parts to memory of their device."""
        for part in self._parts:
            if isinstance(part, DeviceArray):
                part.copy_to(address, device, stream)
            else:
                device.copy_in(address, part.ctypes.data, part.nbytes, stream)
            address += part.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Copy all parts to the host, and wait for that."""
        return np.concatenate([np.asarray(part) for part in self._parts])


class Direct(NamedTuple):
    """The tensors of a model that need not leave a device: the device's name, by the name of the tensor."""

    inputs: Mapping[str, str] = {}
    outputs: Mapping[str, str] = {}


@dataclass
class Target:
    """A place on a device to which an output of a request is to be copied.

    Attributes:
        done: whether it was.
    """

    device: Device
    address: int
    nbytes: int
    owner: object = field(repr=False)
    done: bool = False


class Range(NamedTuple):
    """A target for some samples of a batch's output; ``stop`` is None for all."""

    start: int
    stop: int | None
    target: Target

    def copy_from(self, address: int, shape: Sequence[int], nbytes: int, stream: int) -> bool:
        """Enqueue the copy from an output of a batch; return False if it lacks the samples, or the target the room."""
        if self.stop is not None:
            if not shape or self.stop > shape[0]:
                return False
            sample = nbytes // shape[0]
            address, nbytes = address + self.start * sample, (self.stop - self.start) * sample
        if nbytes > self.target.nbytes:
            return False
        if nbytes:
            self.target.device.copy_across(self.target.address, address, nbytes, stream)
        return True


class TargetedInputs(dict[str, Any]):
    """The inputs of a request, with targets for some of its outputs."""

    def __init__(self, inputs: Mapping[str, Any], targets: Mapping[str, Target]):
        super().__init__(inputs)
        self.targets = targets


def reachable(inputs: Mapping[str, Any], direct: Mapping[str, str]) -> dict[str, Any]:
    """Return inputs, with copies on the host of arrays on other devices than an engine reads them from.

    Args:
        inputs: arrays of both kinds.
        direct: the name of the device from which each is read; others are read from the host.
    """
    return {
        name: np.asarray(array) if isinstance(array, DeviceArray) and array.device.name != direct.get(name) else array
        for name, array in inputs.items()
    }


class SharedBlock:
    """Memory of a device that another process shares. It stays mapped as long as something refers to this object.

    Args:
        device: where the memory is.
        handle: as the other process has exported it.
        nbytes: bytes of it that are used, from its beginning.

    Raises:
        InvalidArgument: the handle cannot be opened, or the memory has fewer bytes.
    """

    def __init__(self, device: Device, handle: bytes, nbytes: int):
        self.device = device
        self.address, room = device.open_shared(handle)
        unmap = weakref.finalize(self, _unmap, device, self.address)
        unmap.atexit = False
        if nbytes > room:
            unmap()
            raise InvalidArgument(f"the memory of this handle has {room} bytes, fewer than the {nbytes} of 'byte_size'")

    def array(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceArray:
        """Return a part as an array."""
        return DeviceArray(self.device, self.address + offset, shape, dtype, self)

    def read(self, offset: int, nbytes: int) -> Array:
        """Return a copy of a part in the host's memory, as bytes."""
        return to_host(self.device, self.address + offset, nbytes)

    def write(self, offset: int, content: bytes) -> None:
        """Copy bytes from the host into a part, and wait until they are there."""
        source = np.frombuffer(content, np.uint8)
        if len(source):
            with _stream(self.device) as stream:
                self.device.copy_in(self.address + offset, source.ctypes.data, len(source), stream)


def to_host(device: Device, address: int, nbytes: int, wait: Callable[[int], None] = lambda _: None) -> Array:
    """Return a copy of memory of a device, as bytes; wait until it is complete.

    Args:
        device: where the memory is.
        address: of the memory.
        nbytes: of the memory.
        wait: lets a stream wait for the values.
    """
    copy = np.empty(nbytes, np.uint8)
    if nbytes:
        with _stream(device) as stream:
            wait(stream)
            device.copy_out(copy.ctypes.data, address, nbytes, stream)
    return copy


@contextlib.contextmanager
def _stream(device: Device) -> Iterator[int]:
    """Yield a stream, and wait for its work at the end."""
    stream = device.stream()
    try:
        yield stream
    finally:
        device.close_stream(stream)


def _unmap(device: Device, address: int) -> None:
    with contextlib.suppress(IngotError):  # the device has failed, and its memory is lost
        device.close_shared(address)
