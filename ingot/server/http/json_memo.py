"""Decodes request bodies. If a body differs from an earlier one only in the tensors' values, only these are read."""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from ingot.protocol import json_codec, json_data
from ingot.protocol.json_codec import ResponseFormat
from ingot.protocol.keys import MEMO_BYTES, Memo, key_of
from ingot.protocol.regions import Reader, refuse
from ingot.protocol.requests import InferRequest, Pattern, Template
from ingot.tensors import DType

# Longer lists are converted in pieces, by json_codec.py.
_MOST_VALUES: Final = 1 << 14
# An id at the beginning, where most clients write it, without escapes; and the member behind it.
_ID = re.compile(rb'\{ ?"id": ?"([^"\\\x00-\x1f]+)", ?(?=")')
_ID_BEGINS: Final = (b'{"id"', b'{ "id"')
# Replaces the values of a tensor in the check that they are its values.
_MARK = 123454321


Decoded = tuple[InferRequest, ResponseFormat]


@dataclass(frozen=True)
class _Text:
    """A JSON text with one tensor, whose values are a flat list or one nested list."""

    template: Template
    layout: ResponseFormat
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packing: struct.Struct


class Decoder:
    """Decodes the bodies of one server, and learns those that repeat.

    Args:
        reader: of inputs in shared memory; None if there is none.
    """

    def __init__(self, reader: Reader | None = None) -> None:
        self.reader = reader
        self._raws: Memo[tuple[str, str, bytes], tuple[Pattern, ResponseFormat]] = Memo()
        self._texts: Memo[tuple[str, str, bytes, bytes], _Text] = Memo()

    def decode(
        self, model: str, version: str, body: bytes, header_length: int | None, client: Hashable = None
    ) -> Decoded:
        """Return the request of a client's body; see :func:`ingot.protocol.json_codec.decode_request`.

        Raises:
            InvalidArgument: the body is not of the protocol; the message names the tensor.
        """
        if header_length is None:
            known = self._read_text(model, version, body)
        elif header_length <= len(body):
            known = self._read_raw(model, version, body[:header_length], body)
        else:
            known = None
        if known is not None:
            return known
        read = refuse if self.reader is None else self.reader(client)
        request, layout, header = json_codec.decode_request(model, version, body, header_length, orjson.loads, read)
        if header_length is None:
            self._learn_text(body, header, request, layout)
        else:
            self._learn_raw(body[:header_length], header, request, layout)
        return request, layout

    def _read_raw(self, model: str, version: str, header: bytes, body: bytes) -> Decoded | None:
        """Return the request of a body that begins with ``header``; None if its header is not known."""
        identifier, rest = _cut_id(header)
        known = self._raws.get((model, version, rest))
        if known is None:
            return None
        pattern, layout = known
        start = len(header)
        if len(body) - start != pattern.size:
            return None
        inputs = {name: np.ndarray(shape, dtype, body, start + at) for name, shape, dtype, at in pattern.tensors}
        return InferRequest(pattern.template, inputs, identifier), layout

    def _learn_raw(self, raw: bytes, header: Mapping[str, Any], request: InferRequest, layout: ResponseFormat) -> None:
        """Remember what a header means, if nothing else is needed to read requests that begin with it."""
        identifier, rest = _cut_id(raw)
        key = request.template.model, request.template.version, rest
        if len(raw) > MEMO_BYTES or request.id != identifier or self._raws.is_new(key):
            return
        if identifier and "id" in orjson.loads(b"{" + rest):  # a second id
            return
        if not all("binary_data_size" in (item.get("parameters") or ()) for item in header["inputs"]):
            return
        pattern = Pattern.of(request)
        if pattern is not None:
            self._raws.keep(key, (pattern, layout))

    def _read_text(self, model: str, version: str, body: bytes) -> Decoded | None:
        """Return the request of a JSON text; None if its form is not known, or its values are not plain numbers."""
        start, stop = _values(body)
        identifier, before = _cut_id(body[:start])
        plan = self._texts.get((model, version, before, body[stop:]))
        if plan is None:
            return None
        text = body[start:stop]
        if b"t" in text or b"f" in text:  # true and false, which struct accepts as numbers
            return None
        try:
            packed = plan.packing.pack(*orjson.loads(text))
        except (orjson.JSONDecodeError, struct.error, OverflowError):
            return None
        inputs = {plan.name: np.ndarray(plan.shape, plan.dtype, packed)}
        return InferRequest(plan.template, inputs, identifier), plan.layout

    def _learn_text(self, body: bytes, header: dict[str, Any], request: InferRequest, layout: ResponseFormat) -> None:
        """Remember what a JSON text means apart from its values, if it has one tensor. Changes ``header``."""
        if len(request.inputs) != 1:
            return
        [(name, array)] = request.inputs.items()
        code = json_data.FORMATS.get(DType.of(array))
        start, stop = _values(body)
        if code is None or not 0 < array.size <= _MOST_VALUES or len(body) - (stop - start) > MEMO_BYTES:
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
    """Return the id at the beginning of a JSON object and the text behind it; without one, no id and the whole text.

    The text behind an id begins with a quotation mark, which no whole text does.
    """
    # Without the pattern's first bytes there is no need to search for it.
    if not text.startswith(_ID_BEGINS):
        return "", text
    found = _ID.match(text)
    if found is None:
        return "", text
    try:
        return found[1].decode(), text[found.end() :]
    except UnicodeDecodeError:
        return "", text


def _values(body: bytes) -> tuple[int, int]:
    """Return where the innermost list of the first ``data`` begins and ends."""
    named = body.find(b'"data"')
    stop = body.find(b"]", named) + 1
    return max(body.rfind(b"[", named, stop), 0), stop


def _is_data(before: bytes, after: bytes, header: dict[str, Any]) -> bool:
    """Return whether the part between two parts of a JSON text is the values of its tensor.

    The same bytes may stand in a name, or a member may occur twice; so the part is replaced, and the replacement must
    turn up as the tensor's data.
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
