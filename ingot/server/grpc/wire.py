"""The fast way between messages and requests or responses: what comes again is looked up instead of parsed.

Of a request with raw contents all that stands before the first tensor is the same in every call of a client, but for
the id; of a response all but the tensors and the id. Those bytes are remembered with what they mean. Whatever is not
known goes through the protobuf library, which alone decides what a message means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot import arrays
from ingot.runtime import key_of
from ingot.server.grpc import codec
from ingot.server.grpc import open_inference_pb2 as pb
from ingot.server.grpc.service import parse
from ingot.server.requests import InferRequest, InferResponse, Route
from ingot.tensors import DType

_REMEMBERED = 512
_REMEMBERED_BYTES = 4096
# How many kinds of requests may have one length, before those of that length are all parsed.
_ALIKE = 8

_NAME_TAG, _VERSION_TAG, _ID_TAG = 0x0A, 0x12, 0x1A
_RAW_INPUT = b"\x3a"
_RAW_OUTPUT = b"\x32"

# A type whose every value is valid, so that the bytes can be taken as they are.
_UNCHECKED = frozenset(DType) - {DType.BOOL, DType.BYTES}


_Form = tuple[bytes, tuple[tuple[bytes, str], ...], int]
"""An answer up to its id, what stands before each output's tensor, and the size of it all."""


class _Plan:
    """A request without its id and tensors: what it means, and where the tensors lie, counted from its start."""

    __slots__ = ("end", "gaps", "template", "tensors")

    def __init__(self, request: InferRequest, raw: list[bytes], start: int):
        self.template = request.template
        self.template.key = key_of(request.inputs)
        self.gaps: list[tuple[int, int, bytes]] = []
        self.tensors: list[tuple[str, tuple[int, ...], np.dtype[Any], int]] = []
        for index, ((name, array), content) in enumerate(zip(request.inputs.items(), raw, strict=True)):
            if index:
                gap = _RAW_INPUT + _varint(len(content))
                self.gaps.append((start, start + len(gap), gap))
                start += len(gap)
            self.tensors.append((name, array.shape, array.dtype, start))
            start += len(content)
        self.end = start

    def read(self, data: bytes, shift: int, request_id: str, left: float | None) -> InferRequest | None:
        """Return the request that ``data`` is, whose metadata is this; ``shift`` is what its id takes."""
        if len(data) != self.end + shift:  # another message has this length, and begins like this one
            return None
        for start, stop, gap in self.gaps:
            if data[start + shift : stop + shift] != gap:
                return None
        inputs = {}
        for name, shape, dtype, start in self.tensors:
            inputs[name] = np.ndarray(shape, dtype, data, start + shift)
        return InferRequest(self.template, inputs, request_id, left)


class Codec:
    """Decodes requests and encodes responses, and remembers those parts of them that come again. Bounded."""

    def __init__(self) -> None:
        self._starts: dict[int, tuple[int, ...]] = {}
        self._plans: dict[bytes, _Plan] = {}

    def decode(self, data: bytes, left: float | None = None) -> tuple[InferRequest, bool]:
        """Parse a ModelInferRequest.

        Args:
            data: the message.
            left: seconds until the call's deadline, if it has one.

        Returns:
            The request, and whether its contents were typed.

        Raises:
            InvalidArgument: it is no valid protobuf, or contradicts itself.
        """
        for start in self._starts.get(len(data), ()):
            plan = self._plans.get(data[:start])
            if plan is not None and (request := plan.read(data, 0, "", left)) is not None:
                return request, False
        begin, stop = _id_of(data)
        shift = stop - begin
        if shift:
            for start in self._starts.get(len(data) - shift, ()):
                plan = self._plans.get(data[:begin] + data[stop : start + shift])
                text = _text(data[begin + 2 : stop])
                if plan is not None and text is not None:
                    request = plan.read(data, shift, text, left)
                    if request is not None:
                        return request, False
        return self._parse(data, left)

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
        data = codec.encode_response(response, typed=typed).SerializeToString()
        return (data,), len(data)

    def _parse(self, data: bytes, left: float | None) -> tuple[InferRequest, bool]:
        message = parse(pb.ModelInferRequest, data)
        request = codec.decode_request(message)
        typed = not message.raw_input_contents
        unchecked = all(DType.of(array) in _UNCHECKED for array in request.inputs.values())
        if not typed and unchecked and request.template.light:
            self._learn_request(message, request, len(data))
        request.left = left
        return request, typed

    def _learn_request(self, message: pb.ModelInferRequest, request: InferRequest, size: int) -> None:
        raw = list(message.raw_input_contents)
        message.ClearField("raw_input_contents")
        with_id = message.ByteSize()
        message.ClearField("id")
        prefix = message.SerializeToString(deterministic=True)
        key = prefix + _RAW_INPUT + _varint(len(raw[0]))
        whole = len(prefix) + sum(len(_RAW_INPUT + _varint(len(content))) + len(content) for content in raw)
        # A message that is longer holds something that this one does not; it is looked up in vain.
        if len(key) > _REMEMBERED_BYTES or whole + with_id - len(prefix) != size:
            return
        if len(self._plans) >= _REMEMBERED:
            self._plans.clear()
            self._starts.clear()
        starts = self._starts.get(whole, ())
        if key in self._plans or (len(key) not in starts and len(starts) >= _ALIKE):
            return
        self._plans[key] = _Plan(request, raw, len(key))
        if len(key) not in starts:
            self._starts[whole] = (*starts, len(key))


def _learn_response(route: Route, kind: tuple[Any, ...]) -> _Form | None:
    """Return answers without their ids and tensors, and remember it; None for texts.

    Args:
        route: theirs.
        kind: the shape and the bytes of each output.
    """
    if not route.outputs or any(spec.dtype is DType.BYTES for spec in route.outputs):
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
    """Return where the id's field begins and ends, in the order that all libraries write; the same if it has none."""
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
