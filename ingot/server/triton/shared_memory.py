"""Shared memory that clients register, so that tensors need not be sent: Triton's extensions for it.

Regions of system_shared_memory are here, those of cuda_shared_memory in cuda_memory.py. System shared memory is read
and written by system calls and never mapped: an access to a mapping of memory that its client has shrunk would end the
process by SIGBUS. Such an input is copied before it is checked, so no client can change it afterwards.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import threading
from collections.abc import Hashable, Iterable
from typing import Any

from ingot.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied, TooManyRequests
from ingot.protocol.regions import Place, Read
from ingot.server.net.limits import check_size
from ingot.server.triton.cuda_memory import CudaRegion
from ingot.tensors import DType, arrays

_FOLDER = "/dev/shm"
# shm_open(3): a slash and a name.
_KEY = re.compile(r"/?(?!\.{1,2}$)[^/\0]{1,255}")
# Each region holds a file descriptor. A client is the holder of a key; all without one count as one.
_MOST_REGIONS, _MOST_OF_CLIENT = 256, 64
_UNNAMED = ""

# Texts of errors name neither regions nor keys: those of other clients, or of other programs, are secret.
_UNKNOWN = "is in a region of shared memory that is not registered; register it first"
_OUTSIDE = "does not lie within its region of shared memory"
_SHRUNK = "lies in shared memory that is now smaller than it was when it was registered"


class Region:
    """A part of one shared memory object.

    Args:
        key: the object's name.
        offset: where the region begins in it, in bytes.
        size: of the region, in bytes.
        handle: the object's file descriptor, which the region closes.
    """

    def __init__(self, key: str, offset: int, size: int, handle: int):
        self.key = key
        self.offset = offset
        self.size = size
        self._handle = handle
        self._closed = False
        # Between a check and its use, another thread must not close the descriptor, whose number may be used again.
        self._lock = threading.Lock()

    @property
    def described(self) -> dict[str, Any]:
        """The region that a client registered, as Triton describes it."""
        return {"key": self.key, "offset": self.offset, "byte_size": self.size}

    def read(self, where: str, place: Place) -> bytes:
        """Return a tensor's bytes.

        Raises:
            InvalidArgument: the tensor does not lie within the region, or not within the memory any more.
        """
        with self._lock:
            self._check(where, place)
            content = os.pread(self._handle, place.size, self.offset + place.offset)
        if len(content) != place.size:
            raise InvalidArgument(f"{where} {_SHRUNK}")
        return content

    def write(self, where: str, place: Place, content: bytes) -> None:
        """Write a tensor's bytes to the beginning of its place.

        Raises:
            InvalidArgument: the bytes are more than the place has, the place does not lie within the region, or not
                within the memory any more.
        """
        place.check_room(where, len(content))
        with self._lock:
            self._check(where, place)
            start = self.offset + place.offset
            if os.fstat(self._handle).st_size < start + place.size:  # otherwise writing would make it larger
                raise InvalidArgument(f"{where} {_SHRUNK}")
            try:
                written = os.pwrite(self._handle, content, start)
            except OSError as error:
                raise InvalidArgument(f"{where} cannot be written to shared memory: {error.strerror}") from error
        if written != len(content):
            raise InvalidArgument(f"{where} cannot be written to shared memory: it is full")

    def close(self) -> None:
        """Close the file descriptor. The memory remains the client's."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._handle)

    def _check(self, where: str, place: Place) -> None:
        if self._closed:
            raise InvalidArgument(f"{where} {_UNKNOWN}")
        if place.offset + place.size > self.size:
            raise InvalidArgument(f"{where} {_OUTSIDE}")


Kind = type[Region] | type[CudaRegion]


class SharedMemory:
    """The regions that clients have registered. A client with a key sees and uses only its own.

    Args:
        allowed: shell patterns of the names of system shared memory that may be registered.
        limit: the most bytes that the inputs of one request may have in shared memory.
    """

    def __init__(self, allowed: Iterable[str], limit: int):
        self._allowed = tuple(allowed)
        self._limit = limit
        self._regions: dict[tuple[str, str], Region | CudaRegion] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, client: Hashable, name: str, key: str, offset: int, size: int) -> None:
        """Register a region of system shared memory.

        Args:
            client: who registers it, as in :class:`ingot.protocol.requests.InferRequest`.
            name: by which requests refer to it.
            key: the name of a POSIX shared memory object.
            offset: where the region begins in it, in bytes.
            size: of the region, in bytes.

        Raises:
            AlreadyExists: the client has a region of this name.
            InvalidArgument: the key is not a name, there is no such memory, or it has fewer bytes.
            PermissionDenied: the key is not among those that the server allows.
            TooManyRequests: there are too many regions.
        """
        owner = self._admit(client, name)
        if _KEY.fullmatch(key) is None:
            raise InvalidArgument("'key' is not the name of a POSIX shared memory object, such as '/input'")
        file = key.removeprefix("/")
        if not any(fnmatch.fnmatchcase(file, pattern) for pattern in self._allowed):
            raise PermissionDenied("'key' is not among the names that this server's --shared-memory allows")
        self._regions[owner, name] = Region(key, offset, size, _opened(file, offset, size))

    def register_cuda(self, client: Hashable, name: str, handle: bytes, device: int, size: int) -> None:
        """Register a region of CUDA memory.

        Args:
            client: as for :meth:`register`.
            name: by which requests refer to it; no region of either kind may have it.
            handle: a ``cudaIpcMemHandle_t``.
            device: the GPU's number.
            size: of the region, in bytes.

        Raises:
            AlreadyExists: the client has a region of this name.
            InvalidArgument: there is no such GPU, the handle cannot be opened, or its memory has fewer bytes.
            TooManyRequests: there are too many regions.
            Unsupported: this machine has no GPU.
        """
        owner = self._admit(client, name)
        self._regions[owner, name] = CudaRegion(handle, device, size)

    def unregister(self, client: Hashable, name: str = "", kind: Kind = Region) -> None:
        """Forget a region of a client, or all of them without a name; one that is not registered is ignored."""
        owner = _owner(client)
        for each in [name] if name else list(self._of(owner, kind)):
            if isinstance(self._regions.get((owner, each)), kind):
                self._regions.pop((owner, each)).close()

    def status(self, client: Hashable, name: str = "", kind: Kind = Region) -> list[dict[str, Any]]:
        """Describe a region of a client, or all of them without a name.

        Raises:
            NotFound: it is not registered.
        """
        regions = self._of(_owner(client), kind)
        if name and name not in regions:
            raise NotFound("there is no region of this name; register it first")
        return [{"name": each, **region.described} for each, region in sorted(regions.items()) if name in ("", each)]

    def _admit(self, client: Hashable, name: str) -> str:
        """Return the owner of a new region, if it may have one of this name."""
        owner = _owner(client)
        if not name:
            raise InvalidArgument("a region of shared memory must have a name")
        if (owner, name) in self._regions:
            raise AlreadyExists("a region of this name is already registered; unregister it first")
        if len(self) >= _MOST_REGIONS or len(self._of(owner)) >= (_MOST_OF_CLIENT if owner else _MOST_REGIONS):
            raise TooManyRequests("too many regions of shared memory are registered; unregister some")
        return owner

    def find(self, client: Hashable, where: str, place: Place) -> Region | CudaRegion:
        """Return the region of a tensor.

        Raises:
            InvalidArgument: it is not registered, or the tensor does not lie within it.
        """
        region = self._regions.get((_owner(client), place.region))
        if region is None:
            raise InvalidArgument(f"{where} {_UNKNOWN}")
        if place.offset + place.size > region.size:
            raise InvalidArgument(f"{where} {_OUTSIDE}")
        return region

    def reader(self, client: Hashable) -> Read:
        """Return how the inputs of one request are read."""
        total = 0

        def read(name: str, place: Place, dtype: DType, shape: tuple[int, ...]) -> Any:
            nonlocal total
            where = f"tensor '{name}'"
            region = self.find(client, where, place)
            total += place.size
            check_size(total, self._limit)
            if isinstance(region, CudaRegion) and (array := region.array(place, dtype, shape)) is not None:
                return array
            return arrays.from_bytes(name, dtype, shape, region.read(where, place))

        return read

    def close(self) -> None:
        """Forget all regions."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def _of(self, owner: str, kind: Kind | None = None) -> dict[str, Region | CudaRegion]:
        """Return the regions of a client by name: of both kinds, or of one."""
        return {
            name: region
            for (whose, name), region in self._regions.items()
            if whose == owner and isinstance(region, kind or (Region, CudaRegion))
        }


def _owner(client: Hashable) -> str:
    """Return the name of a client; one without a name is a number, of its connection."""
    return client if isinstance(client, str) else _UNNAMED


def _opened(file: str, offset: int, size: int) -> int:
    """Open a shared memory object that has at least ``offset + size`` bytes, and return its file descriptor."""
    if size < 0 or offset < 0:
        raise InvalidArgument("'byte_size' and 'offset' must be at least 0")
    try:
        handle = os.open(f"{_FOLDER}/{file}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:  # the same text for all causes: names of other programs are secret
        raise InvalidArgument("there is no shared memory of this key that the server may read and write") from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size < offset + size:
        os.close(handle)
        raise InvalidArgument("the shared memory of this key has fewer bytes than 'offset' and 'byte_size' name")
    return handle
