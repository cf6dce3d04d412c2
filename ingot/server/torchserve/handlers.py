"""Requests to handlers and their answers: all that was sent goes to the handler, whose process is not trusted."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from ingot import foreign
from ingot.errors import ModelFailed
from ingot.protocol.requests import InferResponse
from ingot.runtime.engines.python.torchserve.rows import BODY, HEAD, REQUEST, Part, packed
from ingot.server.http.responses import HttpResponse
from ingot.server.torchserve.errors import pretty
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes

_TOKEN, _TEXT = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"), re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# Headers of the connection, and those by which clients prove who they are.
_OWN = {"connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "date", "server"}
_SECRET = {"authorization", "cookie", "proxy-authorization"}


def inputs(parts: Sequence[Part], headers: Mapping[str, str], query: str) -> dict[str, Array]:
    """Return the input of a handler.

    Args:
        parts: of the body.
        headers: of the request, by names in lower case; those with credentials are left out.
        query: the parameters of the URL, which are values of the row, too.
    """
    parameters = [Part(name, value) for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True)]
    shown = {name: value for name, value in headers.items() if name not in _SECRET}
    return {REQUEST: as_bytes([packed([*parameters, *parts], shown)])}


def answer(found: InferResponse) -> HttpResponse:
    """Return the answer of a workflow: that of its last node, or an object with those of several.

    Raises:
        ModelFailed: a status or header is not valid.
    """
    if HEAD in found.arrays:
        answered = response(found)
        answered.media_type = answered.media_type or "application/json"
        return answered
    return HttpResponse(200, pretty({name: _parsed(array[0]) for name, array in found.arrays.items()}) + b"\n")


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")


def response(answer: InferResponse) -> HttpResponse:
    """Return the answer of a handler, which has no content type unless the handler set one.

    Raises:
        ModelFailed: its status or a header is not valid.
    """
    body, head = (answer.arrays[name][0] for name in (BODY, HEAD))
    if not head:
        return HttpResponse(200, body, media_type="")
    with foreign.reported_as(ModelFailed, "the head of the handler's answer is not valid"):
        found = orjson.loads(head)
        status, headers = found["status"], {str(name).lower(): str(value) for name, value in found["headers"].items()}
        if not 200 <= status <= 599:
            raise ValueError(f"the status {status}")
        for name, value in headers.items():
            if not _TOKEN.fullmatch(name) or not _TEXT.fullmatch(value):
                raise ValueError(f"the header {name[:100]!r}")
    media_type = headers.pop("content-type", "")
    kept = tuple((name, value) for name, value in headers.items() if name not in _OWN)
    return HttpResponse(status, body, kept, media_type)
