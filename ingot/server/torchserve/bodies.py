"""Bodies of predictions as TorchServe's front end reads them: parts of forms by name, or else one value."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping
from email.message import Message
from typing import Any

import orjson

from ingot.errors import InvalidArgument, shortened
from ingot.protocol import json_large
from ingot.runtime.engines.python.torchserve.rows import BODY, Part

Row = dict[str, Any]
"""The values of a request by name: bytes, texts, or what JSON holds."""
DATA = "data"

_FORM, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_PARTS = 64
# Bytes of the headers of a part, and of the type of a body; the standard library takes quadratic time for their
# parameters.
_MOST_HEAD = 4096


def parts_of(body: bytes, media_type: str) -> list[Part]:
    """Return the parts of a body.

    curl states the type of a form for any body unless the user names another, so one without a named value is not
    read as a form.

    Args:
        body: decompressed.
        media_type: the value of ``Content-Type``; empty without.

    Raises:
        InvalidArgument: the body is a form that is not valid, or its type is too long.
    """
    if len(media_type) > _MOST_HEAD:
        raise InvalidArgument(f"the Content-Type has {len(media_type)} characters; the most are {_MOST_HEAD}")
    header = Message()
    header["content-type"] = media_type or "application/octet-stream"
    kind = header.get_content_type()
    if kind == _MULTIPART:
        return _multipart(body, str(header.get_param("boundary", "")))
    if kind == _FORM:
        return _form(body) or [Part(BODY, body)]
    return [Part(BODY, body, kind)]


def row_of(parts: Iterable[Part]) -> Row:
    """Return the values of parts by their names.

    Raises:
        InvalidArgument: one is not of its type.
    """
    return {part.name: _value(part) for part in parts}


def parsed(body: bytes) -> Any:
    """Return JSON.

    Raises:
        InvalidArgument: it is not JSON.
        TooLarge: it has too many values.
    """
    json_large.check(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not JSON: {error}; send JSON, or another Content-Type") from error


def _value(part: Part) -> Any:
    if part.media_type == "application/json":
        return parsed(part.raw)
    if not part.media_type.startswith("text/"):
        return part.content
    try:
        return part.raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the body is {part.media_type}, but not UTF-8: {error}") from error


def _form(body: bytes) -> list[Part]:
    try:
        pairs = urllib.parse.parse_qsl(body.decode(), strict_parsing=True, max_num_fields=_MOST_PARTS, errors="strict")
    except ValueError:
        return []
    return [Part(name, value) for name, value in pairs]


def _multipart(body: bytes, boundary: str) -> list[Part]:
    if not boundary:
        raise InvalidArgument("the Content-Type multipart/form-data has no boundary; let the client's library set it")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), _MOST_PARTS + 2)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        problem = f"more than {_MOST_PARTS} parts" if len(parts) > _MOST_PARTS + 2 else "no end, or another boundary"
        raise InvalidArgument(f"the form has {problem}")
    return [*map(_part, parts[1:-1])]


def _part(part: bytes) -> Part:
    head, gap, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if len(head) > _MOST_HEAD:
        raise InvalidArgument(f"the headers of a part of the form have {len(head)} bytes; the most are {_MOST_HEAD}")
    header = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        header[name.strip().lower()] = value.strip()
    named = header.get_param("name", header="content-disposition")
    if not gap or not isinstance(named, str):
        raise InvalidArgument("a part of the form has no header 'Content-Disposition: form-data; name=\"...\"'")
    # TorchServe reads the type of files only.
    typed = "content-type" in header and header.get_param("filename", header="content-disposition") is not None
    return Part(named, content, header.get_content_type() if typed else "")


def merged(row: Mapping[str, Any]) -> Row:
    """Return a row in which a JSON object, sent alone as the body, stands for the values in it.

    Raises:
        InvalidArgument: two values have one name.
    """
    found = dict(row)
    for name in (BODY, DATA):
        if isinstance(inner := found.get(name), dict):
            del found[name]
            if twice := found.keys() & inner.keys():
                raise InvalidArgument(f"the value '{shortened(min(twice))}' is sent twice; leave one of them out")
            found |= inner
    return found
