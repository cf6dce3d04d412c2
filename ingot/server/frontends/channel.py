"""One end of the connection between a front process and the main process: one write per tick of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import cast

from ingot.ipc.arena import THRESHOLD, Incoming, Outgoing
from ingot.ipc.records import HEADER, INLINE, NUMBER, Splitter, TensorLayout
from ingot.runtime import InputKey, key_of
from ingot.server.frontends.kinds import TENSORS, Kind
from ingot.tensors import Array

# Layouts that either end remembers; with more, both start again with an empty list.
_MAX_LAYOUTS = 1024

Receive = Callable[[int, memoryview], None]


class Channel(asyncio.Protocol):
    """Records and tensors to and from another process.

    Args:
        outgoing: the file descriptor of the arena that this end writes.
        incoming: that of the arena that the other end writes.
        receive: called with the kind and body of each record that the channel does not handle itself.
        lost: called once when the other end has gone.
    """

    def __init__(self, outgoing: int, incoming: int, receive: Receive, lost: Callable[[], None]):
        self._outgoing = Outgoing(outgoing)
        self._incoming = Incoming(incoming, self._release)
        self._receive = receive
        self._lost = lost
        self._splitter = Splitter()
        self._out: list[bytes] = []
        self._sent: dict[InputKey, tuple[int, TensorLayout]] = {}
        self._known: list[tuple[TensorLayout, InputKey]] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._over = False

    async def connect(self, connection: socket.socket) -> None:
        """Use a connected socket, which the channel closes; records sent before go first."""
        await self._loop.create_unix_connection(lambda: self, sock=connection)

    def close(self) -> None:
        """Send the queued records, and close the connection."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def send(self, kind: Kind, *body: bytes) -> None:
        """Send a record, together with all others of this tick."""
        if self._over:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(HEADER.pack(sum(map(len, body)), kind))
        self._out += body

    def send_tensors(self, kind: Kind, head: bytes, values: Mapping[str, Array], key: InputKey | None = None) -> None:
        """Send a record that ends with tensors; ``key`` is :func:`ingot.runtime.key_of` the tensors, if it is known."""
        if self._over:
            return
        number, layout = self._layout(key or key_of(values), values)
        if layout.size >= THRESHOLD and (start := self._outgoing.take(layout.size)) is not None:
            layout.write(values, self._outgoing.block(start))
            self.send(kind, head, TENSORS.pack(number, start))
        else:
            self.send(kind, head, TENSORS.pack(number, INLINE), *layout.dump(values))

    def tensors(self, body: memoryview) -> tuple[dict[str, Array], InputKey]:
        """Return the tensors at the end of a record, and their key."""
        number, start = TENSORS.unpack_from(body)
        layout, key = self._known[number]
        if start == INLINE:
            values = layout.read(body[TENSORS.size :])
        else:
            values = layout.map(self._incoming.block(start, layout.size))
        if not key:
            key = key_of(values)
            self._known[number] = layout, key
        return values, key

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        for kind, body in self._splitter.feed(data):
            if kind == Kind.LAYOUT:
                if body[0]:
                    self._known = []
                self._known.append((TensorLayout.loads(bytes(body[1:])), ()))
            elif kind == Kind.FREE:
                self._outgoing.free(*NUMBER.unpack(body))
            else:
                self._receive(kind, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._over = True
        self._out = []
        # At once: this end is part of reference cycles, which only the garbage collector frees.
        del self._outgoing, self._incoming
        self._lost()

    def _layout(self, key: InputKey, values: Mapping[str, Array]) -> tuple[int, TensorLayout]:
        found = self._sent.get(key)
        if found is None:
            full = len(self._sent) >= _MAX_LAYOUTS
            if full:
                self._sent = {}
            layout = TensorLayout.of_arrays(values)
            found = self._sent[key] = len(self._sent), layout
            self.send(Kind.LAYOUT, b"\1" if full else b"\0", layout.dumps())
        return found

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            out, self._out = self._out, []
            self._transport.write(b"".join(out))

    def _release(self, start: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the other process with it
            self._loop.call_soon_threadsafe(self.send, Kind.FREE, NUMBER.pack(start))
