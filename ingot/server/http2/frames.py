"""HTTP/2's frames as bytes: types, flags, settings and error codes (RFC 9113, sections 6 and 7)."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65535
DEFAULT_FRAME: Final = 16384
LARGEST_FRAME: Final = (1 << 24) - 1
LARGEST_WINDOW: Final = (1 << 31) - 1

# The length (24 bits) and the type share a word, as struct has no number of three bytes.
HEAD = struct.Struct(">IBI")
WORD = struct.Struct(">I")
SETTING = struct.Struct(">HI")


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Fault(Exception):
    """The peer broke the protocol: its connection ends, or only the stream ``stream_id`` if that is not 0."""

    def __init__(self, code: ErrorCode, text: str, stream_id: int = 0):
        super().__init__(text)
        self.code = code
        self.stream_id = stream_id


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*item) for item in values.items()))


def window_update(stream_id: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return HEAD.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id) + WORD.pack(size)


def reset(stream_id: int, code: ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return HEAD.pack(4 << 8 | RST_STREAM, 0, stream_id) + WORD.pack(code)


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """Return a GOAWAY frame; ``text`` helps to debug the client."""
    return frame(GOAWAY, 0, 0, WORD.pack(last_stream_id) + WORD.pack(code) + text.encode())


def unpadded(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Return where the content of a padded payload begins and ends.

    Raises:
        Fault: the padding is longer than the payload.
    """
    if start == stop or data[start] >= stop - start:
        raise Fault(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its frame")
    return start + 1, stop - data[start]
