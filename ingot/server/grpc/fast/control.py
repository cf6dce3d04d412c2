"""The frames that steer a connection, from SETTINGS to GOAWAY, and patience with floods of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ingot.server.grpc.fast.frames import (
    ACK,
    DEFAULT_FRAME,
    ENABLE_PUSH,
    GOAWAY,
    INITIAL_WINDOW_SIZE,
    LARGEST_FRAME,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Fault,
    frame,
    goaway,
    reset,
    window_update,
)
from ingot.server.grpc.fast.outlet import FrameWriter
from ingot.server.grpc.fast.stream import Stream

# What a client may send that brings no call forward: so much at once, so much a second, and some more for each call.
_PATIENCE = 1000
_PATIENCE_A_SECOND = 100
_PATIENCE_A_CALL = 4
# Ending a call before its answer costs more, as work was done for it.
_COST_OF_RESET = 2
# A refusal counts as an answer, which earns patience. So a call that its headers alone refuse costs more than that.
COST_OF_REFUSAL = _PATIENCE_A_CALL + 1
# HTTP/2 has about ten settings. A new first window is held against every open call; so many of them cost one frame.
_MOST_SETTINGS = 64
_CALLS_A_FRAME = 16
# Messages of some MiB flow at full speed through this; what all may hold together is bounded by the server's budget.
STREAM_WINDOW = 4 << 20
# A window that grows by less than this is not worth its frame.
_SMALL_UPDATE = 1024
_DRAINING = b"draining"


class Control(FrameWriter):
    """The half of a connection that holds both sides to the protocol.

    ``last_id`` is the highest stream that the client opened; ``leaving`` says that either side takes no new ones,
    ``quiet`` counts the looks of :meth:`look` since the client was last heard of, and ``stuck`` those since it last
    took some of the answers that wait for it.
    """

    __slots__ = ("_credited", "_moved", "_patience", "_since", "last_id", "leaving", "quiet", "settled", "stuck")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        super().__init__(loop)
        self._patience = _PATIENCE
        self._since = loop.time()
        self._credited = 0
        self.last_id = 0
        self.leaving = False
        self.settled = False
        self.quiet = self.stuck = self._moved = 0

    def failed(self, code: ErrorCode) -> None:
        """Note that the client broke the protocol."""

    def handle_control_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a frame that is neither DATA nor a part of headers.

        Raises:
            Fault: it breaks the protocol.
        """
        handle = _HANDLERS.get(kind)
        if handle is None:
            if kind <= 9:
                raise Fault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} has no place here")
            self.spend(1)  # of an extension that we do not know
        else:
            handle(self, flags, stream_id, payload)

    def spend(self, cost: int, what: str = "too many frames that bring no call forward") -> None:
        """Lose patience with a client.

        Raises:
            Fault: there is none left.
        """
        self._patience -= cost
        if self._patience < 0:
            now = self.loop.time()
            self._patience += int((now - self._since) * _PATIENCE_A_SECOND)
            self._patience += (self.progress - self._credited) * _PATIENCE_A_CALL
            self._patience = min(self._patience, _PATIENCE)
            self._since, self._credited = now, self.progress
            # Calls that are open may have brought their frames already; gRPC's core sends two with each that it opens.
            if self._patience + len(self.streams) * _PATIENCE_A_CALL < 0:
                raise Fault(ErrorCode.ENHANCE_YOUR_CALM, what)

    def turn_away(self, stream: Stream, status: int, text: str) -> None:
        """Answer a call that its headers alone refuse.

        Raises:
            Fault: there were too many of them.
        """
        self.fail(stream, status, text)
        self.spend(COST_OF_REFUSAL, "too many calls that cannot be answered")

    def fail_with(self, fault: Fault) -> None:
        """End the stream that a fault is about, or else the connection."""
        self.failed(fault.code)
        try:
            self.spend(_COST_OF_RESET)
        except Fault as flood:
            fault = flood
        if fault.stream_id:
            stream = self.streams.get(fault.stream_id)
            if stream is not None:
                self.reset(stream, fault.code)
            else:
                self.write(reset(fault.stream_id, fault.code))
                self.remember(fault.stream_id)
            return
        self.write(goaway(self.last_id, fault.code, str(fault)))
        self.close()

    def close(self) -> None:
        """Send what is due, and close."""
        self.leaving = True
        self.flush()
        self.over = True
        if self.transport is not None:
            self.transport.close()
        self.abandon()

    def abandon(self) -> None:
        """End the calls that are open, as the connection is over."""

    def leave(self) -> None:
        """Ask the client to go elsewhere: calls that it has begun, or has on their way, are answered."""
        if not self.settled:
            self.close()
        elif not self.leaving:
            self.write(goaway(LARGEST_WINDOW, ErrorCode.NO_ERROR, "the server stops"))
            self.write(frame(PING, 0, 0, _DRAINING))  # whatever comes before its answer was sent before the GOAWAY

    def refill(self, stream: Stream) -> None:
        """Let the client send more to a stream, whose data is wanted."""
        if stream.received >= STREAM_WINDOW // 2 and not stream.ended and not stream.closed:
            self.write(window_update(stream.id, stream.received))
            stream.received = 0

    def look(self, warn: int, end: int) -> None:
        """Ask a client that was not heard of for ``warn`` looks for a sign of life; end it after ``end``.

        One that is alive, but has taken nothing of what waits for it for ``warn`` looks, is ended too.
        """
        self.quiet += 1
        self.stuck = self.stuck + 1 if self.queued and self.moved == self._moved else 0
        self._moved = self.moved
        if self.quiet >= end and self.transport is not None:
            self.transport.abort()
        elif self.stuck >= warn and not self.paused:
            self.fail_with(Fault(ErrorCode.ENHANCE_YOUR_CALM, "answers wait, and the windows for them stay shut"))
        elif self.quiet == warn and self.settled:
            self.write(frame(PING, 0, 0, b"are you?"))

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "SETTINGS came on a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self.spend(1)
        if flags & ACK:
            return
        if len(payload) > _MOST_SETTINGS * SETTING.size:
            raise Fault(ErrorCode.ENHANCE_YOUR_CALM, f"SETTINGS of {len(payload) // SETTING.size} values")
        values: dict[int, int] = {}
        for key, value in SETTING.iter_unpack(payload):
            _check_setting(key, value)
            values[key] = value  # the last of each is what the client means
        self.max_frame = values.get(MAX_FRAME_SIZE, self.max_frame)
        self._set_initial(values.get(INITIAL_WINDOW_SIZE, self.initial))
        self.settled = True
        self.write(frame(SETTINGS, ACK, 0))

    def _set_initial(self, window: int) -> None:
        """Change the first window of all calls, also of those that are open."""
        if window == self.initial:
            return
        self.spend(len(self.streams) // _CALLS_A_FRAME)
        if any(window + stream.credit > LARGEST_WINDOW for stream in self.streams.values()):
            raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE makes a window too large")
        self.initial = window
        for stream in self.streams.values():
            self.ready(stream)

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "PING came on a stream")
        if len(payload) != 8:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self.spend(1, "too_many_pings")
        if not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif payload == _DRAINING and not self.leaving:
            self.leaving = True
            self.write(goaway(self.last_id, ErrorCode.NO_ERROR, "the server stops"))
            if not self.streams:
                self.loop.call_soon(self.close)

    def _window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        if stream_id > self.last_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that was never opened")
        size = int.from_bytes(payload) & LARGEST_WINDOW
        if size == 0:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing", stream_id)
        if not self.queued or size < _SMALL_UPDATE:
            self.spend(1)
        if stream_id == 0:
            if self.window + size > LARGEST_WINDOW:
                raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
            self.window += size
            self.write(b"")
        elif (stream := self.streams.get(stream_id)) is not None:
            if self.initial + stream.credit + size > LARGEST_WINDOW:
                raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is too large", stream_id)
            stream.credit += size
            self.ready(stream)

    def _rst_stream(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        if stream_id == 0 or stream_id > self.last_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that was never opened")
        stream = self.streams.get(stream_id)
        self.spend(1 if stream is None else _COST_OF_RESET, "too many calls that were cancelled")
        if stream is not None:
            self.forget(stream)

    def _priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "PRIORITY came on no stream")
        if len(payload) != 5:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes", stream_id)
        self.spend(1)
        check_dependency(stream_id, stream_id, payload)

    def _goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "GOAWAY came on a stream")
        if len(payload) < 8:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self.spend(1)  # we open no streams; the client closes the connection when its own are answered


def _check_setting(key: int, value: int) -> None:
    if key == ENABLE_PUSH and value > 1:
        raise Fault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
    if key == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
        raise Fault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
    if key == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
        raise Fault(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")


def check_dependency(blamed: int, stream_id: int, payload: bytes) -> None:
    """Check the first bytes of a priority, which means nothing to us.

    Raises:
        Fault: the stream depends on itself; ``blamed`` is what ends.
    """
    if int.from_bytes(payload[:4]) & LARGEST_WINDOW == stream_id:
        raise Fault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself", blamed)


_HANDLERS: dict[int, Callable[[Control, int, int, bytes], None]] = {
    PRIORITY: Control._priority,
    RST_STREAM: Control._rst_stream,
    SETTINGS: Control._settings,
    PING: Control._ping,
    GOAWAY: Control._goaway,
    WINDOW_UPDATE: Control._window_update,
}
