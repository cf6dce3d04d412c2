"""The connection between a server and one engine process: one call at a time, with tensors in shared memory."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np

from ingot.errors import IngotError, SamplesFailed, TooLarge
from ingot.runtime.engines.ipc.arena import THRESHOLD, Incoming, Outgoing
from ingot.runtime.engines.ipc.records import (
    HEADER,
    INLINE,
    NUMBER,
    Splitter,
    TensorLayout,
    decode_error,
    encode_error,
)
from ingot.tensors import Array, DType, arrays

_ARENA = 1 << 30
# Part of a limited address space (`ulimit -v`) for one direction of one engine: many engines share it.
_ARENA_PART = 32

# Largest record. Tensors that do not fit into the arena go through the socket.
_MOST = 1 << 30
_CHUNK = 1 << 16
# Layouts that either end remembers; with more, both start again with an empty list.
_MAX_LAYOUTS = 1024
_LAYOUT = struct.Struct("<I")
_FAILED = struct.Struct("<II")  # the index of a sample, and the bytes of its error
# Name, datatype, numpy's datatype, shape, and the numbers of elements and bytes.
_Tensor = tuple[str, DType, np.dtype[Any], tuple[int, ...], int, int]


class Kind(IntEnum):
    """The kind of a record. Comments give the sender and the body."""

    OPEN = 0  # server: how to open the engine, as JSON
    OPENED = 1  # engine process: its Description, as JSON
    LAYOUT = 2  # both: names, datatypes and shapes of tensors, as JSON; their layout gets the next number
    RUN = 3  # server: blocks of the engine process's arena that are free again, tensors
    OUTPUTS = 4  # engine process: tensors
    ERROR = 5  # engine process: code, text
    PARTIAL = 6  # engine process: the number and errors of samples that failed, tensors
    LOG = 7  # engine process: records of the log, as JSON, before the answer of a call
    RETIRE = 8  # engine process: why another one should follow it, before the answer of a call
    CALL = 9  # engine process: a call of another model while a batch runs: its number, timeout, name, tensors
    ANSWER = 10  # server: the number of such a call, tensors or an error


HEALTH = b"\0"
"""What precedes the health of an engine, empty if it is good, on the socket of control."""
STREAMS = b"\xff"
"""What precedes the numbers of streams that are over, as 64-bit numbers, in the other direction: no lane has this."""


def arena_size() -> int:
    """Return the most bytes of shared memory in each direction; only pages that were written use memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _ARENA if limit == resource.RLIM_INFINITY else min(_ARENA, limit // _ARENA_PART)


class Link:
    """One end of the connection.

    Args:
        connection: a connected stream socket, which blocks.
        outgoing: the arena that this end writes.
        incoming: the arena that the other end writes.
    """

    def __init__(self, connection: socket.socket, outgoing: Outgoing, incoming: Incoming):
        self.connection = connection
        self._outgoing = outgoing
        self._incoming = incoming
        self._splitter = Splitter(_MOST)
        self._received: deque[tuple[int, memoryview]] = deque()
        self._sent: dict[tuple[Any, ...], tuple[int, TensorLayout]] = {}
        self._known: list[list[_Tensor]] = []

    def send(self, kind: Kind, *body: bytes) -> None:
        """Send a record.

        Raises:
            OSError: the connection has ended.
        """
        self.connection.sendall(b"".join((HEADER.pack(sum(map(len, body)), kind), *body)))

    def send_tensors(self, kind: Kind, head: bytes, values: Mapping[str, Array]) -> list[int]:
        """Send a record that ends with tensors; large ones are copied to the arena unless they are there already.

        Returns:
            The blocks of the arena that were allocated for it.

        Raises:
            TooLarge: the tensors fit neither into the arena nor into a record.
            OSError: the connection has ended.
        """
        news, number, layout = self._layout(values)
        offsets: list[int] = []
        inline: list[bytes] = []
        taken: list[int] = []
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.free, taken)
            for name, dtype, _ in layout.tensors:
                start = None
                if dtype is not DType.BYTES and (array := values[name]).nbytes >= THRESHOLD:
                    start = self._outgoing.offset_of(array)
                    if start is None and (start := self._outgoing.take(array.nbytes)) is not None:
                        taken.append(start)
                        place = self._outgoing.block(start)[: array.nbytes]
                        np.copyto(place.view(array.dtype).reshape(array.shape), array)
                offsets.append(INLINE if start is None else start)
                if start is None:
                    if values[name].nbytes > _MOST:  # before it is copied
                        self.connection.sendall(b"".join(news))
                        raise _too_large(values[name].nbytes)
                    inline += _dump(dtype, values[name])
            body = (head, _LAYOUT.pack(number), struct.pack(f"<{len(offsets)}Q", *offsets), *inline)
            size = sum(map(len, body))
            if size > _MOST:
                self.connection.sendall(b"".join(news))  # which later records rely on
                raise _too_large(size)
            self.connection.sendall(b"".join((*news, HEADER.pack(size, kind), *body)))
            on_error.pop_all()
        return taken

    def send_partial(self, failed: SamplesFailed) -> None:
        """Send the outputs of a batch of which some samples failed."""
        errors = [(at, encode_error(error)) for at, error in failed.errors.items()]
        head = b"".join(_FAILED.pack(at, len(text)) + text for at, text in errors)
        self.send_tensors(Kind.PARTIAL, _LAYOUT.pack(len(errors)) + head, failed.outputs)

    def partial(self, body: memoryview) -> tuple[dict[str, Array], dict[int, IngotError]]:
        """Return the tensors and errors of :meth:`send_partial`; see :meth:`tensors`."""
        errors: dict[int, IngotError] = {}
        (count,) = _LAYOUT.unpack_from(body)
        at = _LAYOUT.size
        for _ in range(count):
            sample, size = _FAILED.unpack_from(body, at)
            at += _FAILED.size + size
            errors[sample] = decode_error(body[at - size : at])
        return self.tensors(body[at:]), errors

    @property
    def received(self) -> bool:
        """Whether :meth:`receive` returns a record without waiting."""
        return bool(self._received)

    def free(self, starts: list[int]) -> None:
        """Free blocks of the arena that this end writes."""
        for start in starts:
            self._outgoing.free(start)

    def receive(self) -> tuple[int, memoryview]:
        """Wait for a record; return its kind and body.

        Raises:
            EOFError: the other end has closed the connection.
            OSError: the connection failed, or its timeout passed.
            ValueError: the other end sent something invalid.
            IngotError: it sent a shape that cannot be.
        """
        while True:
            while not self._received:
                data = self.connection.recv(_CHUNK)
                if not data:
                    raise EOFError
                self._received.extend(self._splitter.feed(data))
            kind, body = self._received.popleft()
            if kind != Kind.LAYOUT:
                return kind, body
            if body[0]:
                self._known = []
            if len(self._known) >= _MAX_LAYOUTS:
                raise ValueError("too many layouts")
            self._known.append(_checked(TensorLayout.decode(bytes(body[1:]))))

    def tensors(self, body: memoryview) -> dict[str, Array]:
        """Return the tensors at the end of a record. The other end is not trusted.

        Raises:
            Exception: of several types, if the record is invalid.
        """
        (number,) = _LAYOUT.unpack_from(body)
        layout = self._known[number]
        at = _LAYOUT.size + 8 * len(layout)
        values: dict[str, Array] = {}
        for index, (name, dtype, kind, shape, count, size) in enumerate(layout):
            (start,) = NUMBER.unpack_from(body, _LAYOUT.size + 8 * index)
            if start != INLINE:
                values[name] = self._incoming.block(start, size).view(kind).reshape(shape)
                continue
            if dtype is DType.BYTES:
                (size,) = NUMBER.unpack_from(body, at)
                at += NUMBER.size
            if dtype in (DType.BYTES, DType.BOOL):
                values[name] = arrays.from_bytes(name, dtype, shape, body[at : at + size])
            else:
                values[name] = np.frombuffer(body, kind, count, at).reshape(shape)
            at += size
        return values

    def _layout(self, values: Mapping[str, Array]) -> tuple[list[bytes], int, TensorLayout]:
        """Return the records that must precede one with these tensors, the layout's number, and the layout."""
        key = tuple((name, array.dtype, array.shape) for name, array in values.items())
        found = self._sent.get(key)
        if found is not None:
            return [], *found
        full = len(self._sent) >= _MAX_LAYOUTS
        if full:
            self._sent = {}
        layout = TensorLayout.of_arrays(values)
        found = self._sent[key] = len(self._sent), layout
        body = (b"\1" if full else b"\0") + layout.encode()
        return [HEADER.pack(len(body), Kind.LAYOUT), body], *found


def _checked(layout: TensorLayout) -> list[_Tensor]:
    """Return a layout that the other end sent, for reading.

    Raises:
        InvalidArgument: it has shapes that cannot be.
    """
    tensors = []
    for name, dtype, shape in layout.tensors:
        count = prod(arrays.check_shape(name, shape))
        tensors.append((name, dtype, dtype.numpy, shape, count, count * dtype.numpy.itemsize))
    return tensors


def _dump(dtype: DType, array: Array) -> Iterator[bytes]:
    if dtype is DType.BYTES:
        raw = arrays.to_bytes(array)
        yield NUMBER.pack(len(raw))
        yield raw
    else:
        yield array.tobytes()


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"tensors of {size} bytes are too large to pass between processes")
