"""Control frames of HTTP/2, from SETTINGS to GOAWAY, and the connection's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from ingot.server.http2.abuse_budget import COST_OF_RESET, AbuseBudget
from ingot.server.http2.frames import (
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
)
from ingot.server.http2.sender import Sender
from ingot.server.http2.stream import Handler, S

# HTTP/2 defines about ten settings. A new initial window is checked against every open stream: so many cost one frame.
_MOST_SETTINGS = 64
_STREAMS_PER_FRAME = 16
# A WINDOW_UPDATE below this many bytes is charged.
_SMALL_UPDATE = 1024
_DRAINING = b"draining"
_ALIVE = b"alive?  "


class Control(Generic[S]):
    """Handles control frames and ends streams and connections that break the protocol.

    ``last_id``: the highest stream that the client opened. ``leaving``: no new streams are accepted. ``settled``: the
    client's first SETTINGS have arrived. ``stops``: it is asked to leave when they do. ``over``: the connection is
    closed.
    """

    __slots__ = ("_abuse_budget", "_handler", "_sender", "last_id", "leaving", "over", "settled", "stops")

    def __init__(self, handler: Handler[S], sender: Sender[S], abuse_budget: AbuseBudget):
        self._handler = handler
        self._sender = sender
        self._abuse_budget = abuse_budget
        self.last_id = 0
        self.leaving = self.settled = self.stops = self.over = False

    def handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame other than DATA, HEADERS and CONTINUATION.

        Raises:
            Fault: it breaks the protocol.
        """
        handle = _HANDLERS.get(kind)
        if handle is None:
            if kind <= 9:
                raise Fault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} is not allowed here")
            self._abuse_budget.spend(1)  # an unknown extension
        else:
            handle(self, flags, stream_id, payload)

    def fail(self, fault: Fault) -> None:
        """End the stream that a fault names, otherwise the connection."""
        self._handler.faulted(fault.code)
        sender = self._sender
        try:
            self._abuse_budget.spend(COST_OF_RESET)
        except Fault as flood:
            fault = flood
        if fault.stream_id:
            stream = sender.streams.get(fault.stream_id)
            if stream is not None:
                sender.reset(stream, fault.code)
            else:
                sender.write(reset(fault.stream_id, fault.code))
                sender.remember(fault.stream_id)
            return
        sender.write(goaway(self.last_id, fault.code, str(fault)))
        self._handler.close()

    def leave(self) -> None:
        """Ask the client to open no more streams; those already open or on their way are answered."""
        self.stops = True
        if self.settled and not self.leaving:
            self._sender.write(goaway(LARGEST_WINDOW, ErrorCode.NO_ERROR, "the server stops"))
            self._sender.write(frame(PING, 0, 0, _DRAINING))  # frames before its ACK were sent before the GOAWAY

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self._sender.write(frame(PING, 0, 0, _ALIVE))

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "SETTINGS came on a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._abuse_budget.spend(1)
        if flags & ACK:
            return
        if len(payload) > _MOST_SETTINGS * SETTING.size:
            raise Fault(ErrorCode.ENHANCE_YOUR_CALM, f"SETTINGS of {len(payload) // SETTING.size} values")
        values: dict[int, int] = {}
        for key, value in SETTING.iter_unpack(payload):
            _check_setting(key, value)
            values[key] = value  # the last value of each counts
        self._sender.max_frame = values.get(MAX_FRAME_SIZE, self._sender.max_frame)
        self._set_initial(values.get(INITIAL_WINDOW_SIZE, self._sender.initial))
        self._sender.write(frame(SETTINGS, ACK, 0))
        if not self.settled:
            self.settled = True
            if self.stops:
                self.leave()

    def _set_initial(self, window: int) -> None:
        """Change the initial window, also for open streams."""
        if window == self._sender.initial:
            return
        self._abuse_budget.spend(len(self._sender.streams) // _STREAMS_PER_FRAME)
        if any(window + stream.credit > LARGEST_WINDOW for stream in self._sender.streams.values()):
            raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE makes a window too large")
        self._sender.initial = window
        for stream in self._sender.streams.values():
            self._sender.ready(stream)

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "PING came on a stream")
        if len(payload) != 8:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self._abuse_budget.spend(1, "too_many_pings")
        if not flags & ACK:
            self._sender.write(frame(PING, ACK, 0, payload))
        elif payload == _DRAINING and not self.leaving:
            self.leaving = True
            self._sender.write(goaway(self.last_id, ErrorCode.NO_ERROR, "the server stops"))
            if not self._sender.streams:
                self._handler.drained()

    def _window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        if stream_id > self.last_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that was never opened")
        size = int.from_bytes(payload) & LARGEST_WINDOW
        if size == 0:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing", stream_id)
        if not self._sender.queued or size < _SMALL_UPDATE:
            self._abuse_budget.spend(1)
        if stream_id == 0:
            if self._sender.window + size > LARGEST_WINDOW:
                raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
            self._sender.window += size
            self._sender.write(b"")
        elif (stream := self._sender.streams.get(stream_id)) is not None:
            if self._sender.initial + stream.credit + size > LARGEST_WINDOW:
                raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is too large", stream_id)
            stream.credit += size
            self._sender.ready(stream)

    def _rst_stream(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        if stream_id == 0 or stream_id > self.last_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that was never opened")
        stream = self._sender.streams.get(stream_id)
        self._abuse_budget.spend(1 if stream is None else COST_OF_RESET, "too many calls that were cancelled")
        if stream is not None:
            self._sender.forget(stream)

    def _priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "PRIORITY came on stream 0")
        if len(payload) != 5:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes", stream_id)
        self._abuse_budget.spend(1)
        check_dependency(stream_id, stream_id, payload)

    def _goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "GOAWAY came on a stream")
        if len(payload) < 8:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._abuse_budget.spend(1)  # the client closes the connection once its streams are answered


def _check_setting(key: int, value: int) -> None:
    if key == ENABLE_PUSH and value > 1:
        raise Fault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
    if key == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
        raise Fault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
    if key == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
        raise Fault(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")


def check_dependency(blamed: int, stream_id: int, payload: bytes) -> None:
    """Check the first bytes of a priority, which is otherwise ignored.

    Raises:
        Fault: the stream depends on itself; names the stream ``blamed``, or the connection if that is 0.
    """
    if int.from_bytes(payload[:4]) & LARGEST_WINDOW == stream_id:
        raise Fault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself", blamed)


_HANDLERS: dict[int, Callable[[Control[Any], int, int, bytes], None]] = {
    PRIORITY: Control._priority,
    RST_STREAM: Control._rst_stream,
    SETTINGS: Control._settings,
    PING: Control._ping,
    GOAWAY: Control._goaway,
    WINDOW_UPDATE: Control._window_update,
}
