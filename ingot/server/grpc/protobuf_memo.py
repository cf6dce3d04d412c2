"""Fast conversion between messages and requests or responses: repeated parts are looked up instead of parsed.

In the requests of one client with raw contents, the bytes before the first tensor differ only in the id; in responses,
only the tensors and the id differ. Those bytes are cached with their meaning. All other messages are parsed by the
protobuf library, which alone defines what a message means.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.keys import MEMO_BYTES, BoundedCache, Memo
from ingot.protocol.regions import Reader, refuse
from ingot.protocol.requests import InferRequest, InferResponse, Pattern, Route
from ingot.tensors import Array, DType, arrays

# Lengths of requests whose patterns are kept.
_LENGTHS = 512
# How many patterns of one length are kept; the latest are.
_ALIKE = 8

_NAME_TAG, _VERSION_TAG, _ID_TAG = 0x0A, 0x12, 0x1A
_RAW_INPUT = b"\x3a"
_RAW_OUTPUT = b"\x32"

_Form = tuple[bytes, tuple[tuple[bytes, str], ...], int]
"""An answer up to its id, what stands before each output's tensor, and the size of it all."""

Decoded = tuple[InferRequest, bool]
"""A request, and whether its response shall have typed contents."""


@dataclass(frozen=True)
class _Message:
    """The pattern of a request, relative to its first tensor, and the bytes that must precede each further tensor."""

    pattern: Pattern
    gaps: tuple[tuple[int, int, bytes], ...]

    def read(self, data: bytes, start: int, identifier: str, left: float | None) -> InferRequest | None:
        """Return the request of a message whose first tensor begins at ``start``."""
        if len(data) != start + self.pattern.size:  # a known beginning, but not the length of that pattern
            return None
        for begin, end, gap in self.gaps:
            if data[start + begin : start + end] != gap:
                return None
        inputs: dict[str, Array] = {}
        for name, shape, dtype, at in self.pattern.tensors:  # not a comprehension, which is a call in Python 3.11
            inputs[name] = np.ndarray(shape, dtype, data, start + at)
        return InferRequest(self.pattern.template, inputs, identifier, left)


class Codec:
    """Decodes requests and encodes responses, with a bounded cache of repeated parts.

    Args:
        find: called with the model's name and version of each request that is not cached; raises NotFound.
        reader: of inputs in shared memory; None if there is none.
    """

    def __init__(self, find: Callable[[str, str], object], reader: Reader | None = None) -> None:
        self._find = find
        self._reader = reader
        self._starts: BoundedCache[int, tuple[int, ...]] = BoundedCache(_LENGTHS)
        self._messages: Memo[bytes, _Message] = Memo()

    def decode(self, data: bytes, left: float | None = None, client: Hashable = "") -> Decoded | Callable[[], Decoded]:
        """Parse a ModelInferRequest.

        Args:
            data: the message.
            left: seconds until the call's deadline, if it has one.
            client: who sends it, by its key.

        Returns:
            The request, and whether its response shall have typed contents; or, if that takes long, a function to call
            in a thread; it returns them, or raises NotFound or InvalidArgument.

        Raises:
            NotFound: there is no such model.
            InvalidArgument: it is not valid protobuf, or is inconsistent.
        """
        known = self._known(data, left)
        if known is not None:
            return known, False
        message = proto_codec.parse(pb.ModelInferRequest, data)
        decode = partial(self._decode, message, left, client)
        if proto_codec.is_slow(message):
            return decode
        request, typed = decode()
        if not typed and len(message.raw_input_contents) == len(message.inputs) > 0:
            self._learn_request(message, request, len(data))
        return request, typed

    def _known(self, data: bytes, left: float | None) -> InferRequest | None:
        """Return the request of a message whose form is known, which has raw contents."""
        for start in self._starts.get(len(data), ()):
            known = self._messages.get(data[:start])
            if known is not None and (request := known.read(data, start, "", left)) is not None:
                return request
        begin, stop = _id_of(data)
        shift = stop - begin
        if shift:
            for start in self._starts.get(len(data) - shift, ()):
                known = self._messages.get(data[:begin] + data[stop : start + shift])
                text = _text(data[begin + 2 : stop])
                if known is not None and text is not None:
                    request = known.read(data, start + shift, text, left)
                    if request is not None:
                        return request
        return None

    def _decode(self, message: pb.ModelInferRequest, left: float | None, client: Hashable) -> Decoded:
        read = refuse if self._reader is None else self._reader(client)
        request = proto_codec.decode_request(message, self._find, read)
        request.left = left
        return request, proto_codec.wants_typed(request)

    def _learn_request(self, message: pb.ModelInferRequest, request: InferRequest, size: int) -> None:
        raw = list(message.raw_input_contents)
        message.ClearField("raw_input_contents")
        with_id = message.ByteSize()
        message.ClearField("id")
        prefix = message.SerializeToString(deterministic=True)
        key = prefix + _RAW_INPUT + _varint(len(raw[0]))
        whole = len(prefix) + sum(len(_RAW_INPUT + _varint(len(content))) + len(content) for content in raw)
        # With further fields the message is longer than what is rebuilt here, so it is not learned.
        if len(key) > MEMO_BYTES or whole + with_id - len(prefix) != size or self._messages.is_new(key):
            return
        tags = [_RAW_INPUT + _varint(len(content)) for content in raw[1:]]
        pattern = Pattern.of(request, (0, *map(len, tags)))
        if pattern is None:
            return
        offsets = [offset for *_, offset in pattern.tensors[1:]]
        gaps = tuple((offset - len(tag), offset, tag) for offset, tag in zip(offsets, tags, strict=True))
        self._messages.keep(key, _Message(pattern, gaps))
        starts = self._starts.get(whole, ())
        if len(key) not in starts:
            self._starts.keep(whole, (*starts, len(key))[-_ALIKE:])

    def encode(self, response: InferResponse, *, typed: bool) -> tuple[tuple[bytes, ...], int]:
        """Return a ModelInferResponse in parts, and their size in bytes."""
        if not typed:
            route, identifier, found = response.route, response.id, response.arrays
            kind: list[Any] = []
            for spec in route.outputs:
                array = found[spec.name]
                kind += (array.shape, array.nbytes)
            form = route.answers.get(tuple(kind)) or _learn_response(route, tuple(kind))
            if form is not None:
                head, rest, size = form
                if identifier:
                    raw_id = identifier.encode()
                    head += bytes((_ID_TAG,)) + _varint(len(raw_id)) + raw_id
                    size += len(head) - len(form[0])
                parts = [head]
                for before, name in rest:
                    parts += (before, arrays.to_bytes(found[name]))
                return tuple(parts), size
        data = proto_codec.encode_response(response, typed=typed).SerializeToString()
        return (data,), len(data)


def _learn_response(route: Route, kind: tuple[Any, ...]) -> _Form | None:
    """Cache and return a response without its id and tensors; None if it has text tensors, or outputs in shared memory.

    Args:
        route: of the responses.
        kind: the shape and the bytes of each output.
    """
    if not route.outputs or route.placed or any(spec.dtype is DType.BYTES for spec in route.outputs):
        return None
    head = pb.ModelInferResponse(model_name=route.name, model_version=route.version).SerializeToString()
    outputs = pb.ModelInferResponse()
    for spec, shape in zip(route.outputs, kind[::2], strict=True):
        outputs.outputs.add(name=spec.name, datatype=spec.dtype.value, shape=shape)
    tags = [_RAW_OUTPUT + _varint(size) for size in kind[1::2]]
    tags[0] = outputs.SerializeToString() + tags[0]
    rest = tuple((tag, spec.name) for tag, spec in zip(tags, route.outputs, strict=True))
    form = head, rest, len(head) + sum(map(len, tags)) + sum(kind[1::2])
    route.answers.keep(kind, form)
    return form


def _id_of(data: bytes) -> tuple[int, int]:
    """Return the start and end of the id's field, in the order in which all libraries write; equal if there is none."""
    at = 0
    end = len(data) - 2
    for tag in (_NAME_TAG, _VERSION_TAG):
        if at < end and data[at] == tag and data[at + 1] < 0x80:
            at += 2 + data[at + 1]
    if at < end and data[at] == _ID_TAG and 0 < data[at + 1] < 0x80:
        return at, at + 2 + data[at + 1]
    return 0, 0


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
