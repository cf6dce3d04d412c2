"""Golden inputs and outputs: cases that a server replays before a variant is ready.

They are a safetensors file (data, never code). BYTES tensors, which safetensors lacks, are stored as U8 in the
protocol's raw form, with their shape in the header's metadata. A case of a model with steps also has the raw inputs, of
which the steps made the graph's inputs, and the answers that they made of its outputs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.tensors import Array, DType
from ingot.tensors import arrays as wire

_CODES = {
    DType.BOOL: "BOOL",
    DType.UINT8: "U8",
    DType.UINT16: "U16",
    DType.UINT32: "U32",
    DType.UINT64: "U64",
    DType.INT8: "I8",
    DType.INT16: "I16",
    DType.INT32: "I32",
    DType.INT64: "I64",
    DType.FP16: "F16",
    DType.FP32: "F32",
    DType.FP64: "F64",
    DType.BF16: "BF16",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Golden:
    """One case: inputs by name, and the outputs that they produced; ``raw`` and ``answers`` are those of steps."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    raw: dict[str, Array] = field(default_factory=dict)
    answers: dict[str, Array] = field(default_factory=dict)


def encode(goldens: Sequence[Golden]) -> bytes:
    """Return a safetensors file with entries ``<case>/<side>/<name>``; sides are in, out, raw and answer."""
    arrays: dict[str, Array] = {}
    for case, golden in enumerate(goldens):
        for side, tensors in _sides(golden).items():
            arrays.update({f"{case}/{side}/{name}": array for name, array in tensors.items()})
    header: dict[str, Any] = {"__metadata__": {}}
    parts: list[bytes] = []
    position = 0
    for key, array in arrays.items():
        raw = wire.to_bytes(array)
        dtype, shape = DType.of(array), list(array.shape)
        if dtype is DType.BYTES:
            header["__metadata__"][key] = json.dumps(shape)
            dtype, shape = DType.UINT8, [len(raw)]
        header[key] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [position, position + len(raw)]}
        parts.append(raw)
        position += len(raw)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((struct.pack("<Q", len(head)), head, *parts))


def decode(raw: bytes) -> tuple[Golden, ...]:
    """Parse the output of :func:`encode`.

    Raises:
        InvalidArchive: the file is invalid.
    """
    try:
        (length,) = struct.unpack_from("<Q", raw)
        if length > len(raw) - 8:
            raise InvalidArchive("the goldens are truncated")
        header = json.loads(raw[8 : 8 + length])
        data = memoryview(raw)[8 + length :]
        metadata = header.pop("__metadata__", {})
        cases: dict[str, Golden] = {}
        for key, entry in header.items():
            case, side, name = key.split("/", 2)
            start, end = entry["data_offsets"]
            strings = key in metadata
            shape = json.loads(metadata[key]) if strings else entry["shape"]
            dtype = DType.BYTES if strings else _DTYPES[entry["dtype"]]
            golden = cases.setdefault(case, Golden({}, {}))
            _sides(golden)[side][name] = wire.from_bytes(name, dtype, wire.check_shape(name, shape), data[start:end])
        return tuple(cases[case] for case in sorted(cases, key=int))
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidArgument) as error:
        raise InvalidArchive(f"the goldens cannot be read: {error}") from error


def _sides(golden: Golden) -> dict[str, dict[str, Array]]:
    return {"in": golden.inputs, "out": golden.outputs, "raw": golden.raw, "answer": golden.answers}
