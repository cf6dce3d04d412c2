"""Bodies that are like one that was decoded before: only their tensors' values are read, the rest is looked up."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson

from ingot.runtime import key_of
from ingot.server.http import data
from ingot.server.memo import MAX_BYTES, Memo, Pattern
from ingot.server.requests import InferRequest, Template
from ingot.tensors import DType

# Lists of more values are converted piece by piece, which is not done here.
_MOST_VALUES = 1 << 14
# An id before all else, where most clients write it, whose text is its bytes; and the member behind it.
_ID = re.compile(rb'\{ ?"id": ?"([^"\\\x00-\x1f]+)", ?(?=")')
# Stands for the values of a tensor when it is found out whether what stands there are its values.
_MARK = 123454321


class ResponseFormat(NamedTuple):
    """Which outputs the client wants as raw buffers."""

    default: bool = False
    by_name: Mapping[str, bool] = MappingProxyType({})

    def binary(self, name: str) -> bool:
        return self.by_name.get(name, self.default)


Decoded = tuple[InferRequest, ResponseFormat]


class _Text(NamedTuple):
    """A JSON text in which the values of the one tensor are a flat list, or one row of a nested one."""

    template: Template
    layout: ResponseFormat
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packing: struct.Struct


class Plans:
    """The bodies that are known of one server; each is learnt when the like of it comes for the second time."""

    def __init__(self) -> None:
        self._raws: Memo[tuple[str, str, bytes], tuple[Pattern, ResponseFormat]] = Memo()
        self._texts: Memo[tuple[str, str, bytes, bytes], _Text] = Memo()

    def read_raw(self, model: str, version: str, header: bytes, body: bytes) -> Decoded | None:
        """Return the request of a body that begins with ``header``; None if its header is not known."""
        identifier, rest = _cut_id(header)
        known = self._raws.get((model, version, rest))
        if known is None:
            return None
        pattern, layout = known
        start = len(header)
        if len(body) - start != pattern.size:
            return None
        return pattern.request(body, start, identifier), layout

    def learn_raw(self, raw: bytes, header: Mapping[str, Any], request: InferRequest, layout: ResponseFormat) -> None:
        """Remember what a header means, if nothing else is needed to read requests that begin with it."""
        identifier, rest = _cut_id(raw)
        key = request.template.model, request.template.version, rest
        if len(raw) > MAX_BYTES or request.id != identifier or self._raws.is_new(key):
            return
        if identifier and "id" in orjson.loads(b"{" + rest):  # a second id
            return
        if any("data" in item for item in header["inputs"]):
            return
        pattern = Pattern.of(request)
        if pattern is not None:
            self._raws.keep(key, (pattern, layout))

    def read_text(self, model: str, version: str, body: bytes) -> Decoded | None:
        """Return the request that a JSON text is; None if nothing like it is known, or it is not as it should be."""
        start, stop = _values(body)
        identifier, before = _cut_id(body[:start])
        plan = self._texts.get((model, version, before, body[stop:]))
        if plan is None:
            return None
        text = body[start:stop]
        if b"t" in text or b"f" in text:  # true and false, which would pass for numbers
            return None
        try:
            packed = plan.packing.pack(*orjson.loads(text))
        except (orjson.JSONDecodeError, struct.error, OverflowError):
            return None
        inputs = {plan.name: np.ndarray(plan.shape, plan.dtype, packed)}
        return InferRequest(plan.template, inputs, identifier), plan.layout

    def learn_text(self, body: bytes, header: dict[str, Any], request: InferRequest, layout: ResponseFormat) -> None:
        """Remember what a JSON text means beside its values, if it has one tensor. ``header`` is used up."""
        if len(request.inputs) != 1:
            return
        [(name, array)] = request.inputs.items()
        code = data.FORMATS.get(DType.of(array))
        start, stop = _values(body)
        if code is None or not 0 < array.size <= _MOST_VALUES or len(body) - (stop - start) > MAX_BYTES:
            return
        identifier, before = _cut_id(body[:start])
        template = request.template
        if request.id != identifier or not template.light:
            return
        key = template.model, template.version, before, body[stop:]
        if self._texts.is_new(key) or body.count(b",", start, stop) != array.size - 1:
            return
        if identifier:
            del header["id"]
            before = b"{" + before
        if _is_data(before, key[3], header):
            template.key = key_of(request.inputs)
            packing = struct.Struct(f"={array.size}{code}")
            self._texts.keep(key, _Text(template, layout, name, array.shape, array.dtype, packing))


def _cut_id(text: bytes) -> tuple[str, bytes]:
    """Return the id with which a JSON object begins and what follows it; if it begins otherwise, no id and all of it.

    What follows an id begins with a quotation mark, and so is never taken for a whole text.
    """
    found = _ID.match(text)
    if found is None:
        return "", text
    try:
        return found[1].decode(), text[found.end() :]
    except UnicodeDecodeError:
        return "", text


def _values(body: bytes) -> tuple[int, int]:
    """Return where what seems to be a tensor's innermost list begins and ends."""
    named = body.find(b'"data"')
    stop = body.find(b"]", named) + 1
    return max(body.rfind(b"[", named, stop), 0), stop


def _is_data(before: bytes, after: bytes, header: dict[str, Any]) -> bool:
    """Tell whether what stands between two parts of a JSON text are the values of its tensor, and nothing else.

    A text could have the same bytes in a name, or say everything twice; so another list is put there, and is to be
    found at the right place.
    """
    try:
        marked = orjson.loads(b"%b[%d]%b" % (before, _MARK, after))
        found = marked["inputs"][0].pop("data")
        header["inputs"][0].pop("data")
        while isinstance(found, list) and len(found) == 1:
            found = found[0]
        return bool(found == _MARK) and marked == header
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError, RecursionError):
        return False
