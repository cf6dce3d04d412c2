"""A request to a handler in one value of bytes: its parts, headers and id, and the row that the handler reads.

The value is a magic word, the length of a JSON header (4 bytes, little-endian), the header and the contents of the
parts. Any other value is the body of a request without headers.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

PLATFORM = "python_torchserve"
"""The platform of models that are handlers."""
REQUEST, BODY, HEAD = "data", "body", "head"
"""Their input, and their outputs: the body of an answer, and its status and headers as JSON, empty for a plain 200."""

EXPLAIN, EXPLAINS = "explain", "True"
"""The header by which handlers know that an explanation is asked for, and its value."""

_MAGIC = b"\x00torchserve\x00"
_LENGTH = struct.Struct("<I")


class Part(NamedTuple):
    """A value of a request: a part of a form, a parameter, or the body.

    Attributes:
        name: ``body`` for the whole body.
        content: as it was sent; a text in forms that are URL-encoded.
        media_type: in lower case, without parameters; empty if none was sent.
    """

    name: str
    content: bytes | str
    media_type: str = ""

    @property
    def raw(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class HandlerRequest:
    """A request as a handler reads it: a row of values by name, its headers in lower case, and its id."""

    row: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


def packed(parts: Sequence[Part], headers: Mapping[str, str]) -> bytes:
    """Return a request in one value."""
    contents = [part.raw for part in parts]
    listed = [(part.name, part.media_type, len(raw)) for part, raw in zip(parts, contents, strict=True)]
    header = orjson.dumps({"parts": listed, "headers": dict(headers)})
    return b"".join((_MAGIC, _LENGTH.pack(len(header)), header, *contents))


def unpacked(value: bytes, *, raw: bool = False) -> HandlerRequest:
    """Return the request of a value.

    Args:
        value: see above.
        raw: values are bytes, whatever their type.

    Raises:
        ValueError: it is cut, or its header is not valid.
    """
    parts, headers = parts_of(value)
    row = {part.name: _value(part.raw, "" if raw else part.media_type) for part in parts}
    return HandlerRequest(row, headers)


def parts_of(value: bytes) -> tuple[list[Part], dict[str, str]]:
    """Return the parts and the headers of a request in one value.

    Raises:
        ValueError: it is cut, or its header is not valid.
    """
    if not value.startswith(_MAGIC):
        return [Part(BODY, value)], {}
    start = len(_MAGIC) + _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(value, len(_MAGIC))
        header = orjson.loads(value[start : start + length])
        parts, at = list[Part](), start + length
        for name, media_type, size in header["parts"]:
            parts.append(Part(str(name), value[at : at + size], str(media_type)))
            at += size
        headers = {str(name).lower(): str(text) for name, text in header["headers"].items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the request is not valid: {error}") from error
    if at != len(value):
        raise ValueError(f"the parts of the request have {at} bytes, but {len(value)} were sent")
    return parts, headers


def _value(content: bytes, media_type: str) -> Any:
    """Return a value as TorchServe's workers read it; one that is not of its type stays bytes."""
    try:
        if media_type == "application/json":
            return json.loads(content)
        if media_type.startswith("text"):
            return content.decode()
    except (ValueError, RecursionError):
        pass
    return bytearray(content)
