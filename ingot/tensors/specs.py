"""Tensors: data types, shapes with named dimensions, and signatures.

One table relates the naming systems (Open Inference Protocol, numpy, ONNX, PyTorch); nothing else in Ingot lists data
types. Shapes are tuples of ints (fixed) and names (dynamic); equal names must have equal sizes within a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ingot.errors import InvalidArgument
from ingot.tensors import values
from ingot.tensors.values import ValueRange

Array = npt.NDArray[Any]
Dim = int | str
Shape = tuple[Dim, ...]


class DType(Enum):
    """A tensor element type; the value is its Open Inference Protocol name.

    Examples:
        >>> ingot.DType.parse("float32"), ingot.DType.FP32.numpy
        (<DType.FP32: 'FP32'>, dtype('float32'))
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; BYTES is an object array of ``bytes``."""
        return _TABLE[self].numpy

    @property
    def onnx(self) -> int:
        """The ``onnx.TensorProto`` element type."""
        return _TABLE[self].onnx

    @property
    def torch_name(self) -> str:
        """The PyTorch and ONNX Runtime name, such as ``float32``; ``string`` for BYTES."""
        return _TABLE[self].name

    @property
    def is_integer(self) -> bool:
        return self.numpy.kind in "iu"

    @property
    def is_float(self) -> bool:
        return self in (DType.FP16, DType.FP32, DType.FP64, DType.BF16)

    @classmethod
    def parse(cls, text: str) -> DType:
        """Return the type named ``text`` in any of the four systems.

        Raises:
            InvalidArgument: no system knows the name.
        """
        try:
            return _BY_NAME[text.lower()]
        except KeyError:
            known = ", ".join(row.name for row in _TABLE.values())
            raise InvalidArgument(f"unknown data type '{text}'; known: {known}") from None

    @classmethod
    def of(cls, array: Array) -> DType:
        """Return the type of a numpy array; any string or object array is BYTES."""
        if array.dtype.kind in "OSU":
            return cls.BYTES
        try:
            return _BY_NUMPY[array.dtype.newbyteorder("=")]
        except KeyError:
            raise InvalidArgument(f"arrays of type {array.dtype} cannot be tensors") from None

    @classmethod
    def from_onnx(cls, element_type: int) -> DType:
        """Return the type of an ``onnx.TensorProto`` element type."""
        for dtype, row in _TABLE.items():
            if row.onnx == element_type:
                return dtype
        raise InvalidArgument(f"ONNX element type {element_type} is not served; cast it inside the model")


@dataclass(frozen=True)
class _Names:
    name: str
    numpy: np.dtype[Any]
    onnx: int
    aliases: tuple[str, ...] = ()


_TABLE: dict[DType, _Names] = {
    DType.BOOL: _Names("bool", np.dtype(np.bool_), 9),
    DType.UINT8: _Names("uint8", np.dtype(np.uint8), 2),
    DType.UINT16: _Names("uint16", np.dtype(np.uint16), 4),
    DType.UINT32: _Names("uint32", np.dtype(np.uint32), 12),
    DType.UINT64: _Names("uint64", np.dtype(np.uint64), 13),
    DType.INT8: _Names("int8", np.dtype(np.int8), 3),
    DType.INT16: _Names("int16", np.dtype(np.int16), 5, ("short",)),
    DType.INT32: _Names("int32", np.dtype(np.int32), 6, ("int",)),
    DType.INT64: _Names("int64", np.dtype(np.int64), 7, ("long",)),
    DType.FP16: _Names("float16", np.dtype(np.float16), 10, ("half",)),
    DType.FP32: _Names("float32", np.dtype(np.float32), 1, ("float",)),
    DType.FP64: _Names("float64", np.dtype(np.float64), 11, ("double",)),
    DType.BF16: _Names("bfloat16", np.dtype(ml_dtypes.bfloat16), 16),
    DType.BYTES: _Names("string", np.dtype(object), 8, ("str", "text")),
}
_BY_NAME = {alias: dtype for dtype, row in _TABLE.items() for alias in (dtype.value.lower(), row.name, *row.aliases)}
_BY_NUMPY = {row.numpy: dtype for dtype, row in _TABLE.items() if dtype is not DType.BYTES}

# The datatype follows the last colon before the shape, so that names may contain colons, as in TensorFlow.
_NAME = re.compile(r"[A-Za-z_][\w.\-/:]*")
_SPEC = re.compile(
    rf"""^(?P<name>{_NAME.pattern}|"[^"]+"):(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\](\s*=\s*(?P<values>.*))?$"""
)
# Placeholders of exporters (Paddle, tf2onnx) for unnamed dimensions.
_PLACEHOLDER = re.compile(r"\?|unk__\d+|(.*\.)?DynamicDimension\.\d+")
_SYMBOL = re.compile(r"^(?P<name>[A-Za-z_]\w*)(=(?P<low>\d{0,15})\.\.(?P<high>\d{0,15})(:(?P<step>[1-9]\d{0,14}))?)?$")


@dataclass(frozen=True)
class TensorSpec:
    """The name, element type and shape of one input or output, and the range of an input's values, if declared.

    A dimension of the shape is a size, or the name of a dynamic dimension.

    Examples:
        >>> ingot.TensorSpec("x", ingot.DType.FP32, ("batch", 4)).wire_shape
        [-1, 4]
    """

    name: str
    dtype: DType
    shape: Shape
    values: ValueRange | None = None

    def __post_init__(self) -> None:
        if self.values is not None:
            self.values.check(self.name, self.dtype.numpy)

    def axis(self, symbol: str | None) -> int | None:
        """Return the axis that ``symbol`` names, or None."""
        return self.shape.index(symbol) if symbol is not None and symbol in self.shape else None

    @property
    def wire_shape(self) -> list[int]:
        """The shape in the protocol: -1 for dynamic dimensions."""
        return [dim if isinstance(dim, int) else -1 for dim in self.shape]

    @property
    def nearest_to_zero(self) -> float:
        """The number closest to 0 that the range of values allows."""
        return 0 if self.values is None else self.values.nearest(0)

    def __str__(self) -> str:
        name = self.name if _NAME.fullmatch(self.name) else f'"{self.name}"'
        values = "" if self.values is None else f"={self.values}"
        return f"{name}:{self.dtype.torch_name}[{','.join(str(dim) for dim in self.shape)}]{values}"


@dataclass(frozen=True)
class Range:
    """The allowed sizes of a dynamic dimension: multiples of ``step``, ends included; ``high`` None is unbounded."""

    low: int = 1
    high: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if self.low < 0 or self.step < 1 or (self.high is not None and self.high < self.low):
            raise InvalidArgument(f"the range {self} is empty")
        if any(end is not None and end % self.step for end in (self.low, self.high)):
            raise InvalidArgument(f"the range {self} must begin and end at a multiple of {self.step}")

    def __contains__(self, size: int) -> bool:
        return self.low <= size and (self.high is None or size <= self.high) and size % self.step == 0

    def __str__(self) -> str:
        ends = f"{self.low}..{'' if self.high is None else self.high}"
        return ends if self.step == 1 else f"{ends}:{self.step}"

    def nearest(self, size: int) -> int:
        """Return the largest allowed size not above ``size``, or ``low`` if there is none."""
        size = max(size - size % self.step, self.low)
        return size if self.high is None else min(size, self.high)


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model.

    ``batch`` names the dimension along which requests may be joined; it is None for a model whose rows are not
    independent, which then runs one request at a time. ``ranges`` bounds named dimensions; without one, a size is 1 or
    more.

    Examples:
        >>> signature = ingot.Archive.open("net.ingot").signature
        >>> signature.inputs[0].shape, signature.batch
        (('batch', 4), 'batch')
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch: str | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for specs in (self.inputs, self.outputs):
            names = [spec.name for spec in specs]
            if len(set(names)) < len(names):
                raise InvalidArgument(f"a signature names a tensor twice: {', '.join(names)}")
            if any(isinstance(dim, int) and dim < 0 for spec in specs for dim in spec.shape):
                raise InvalidArgument("a signature has a negative dimension")
        if self.batch is None:
            return
        inputs = [spec.shape.count(self.batch) for spec in self.inputs]
        if 1 not in inputs or max(inputs) > 1 or any(spec.shape.count(self.batch) != 1 for spec in self.outputs):
            raise InvalidArgument(f"batch dimension '{self.batch}' must be in an input and once in every output")

    @property
    def values(self) -> dict[str, ValueRange]:
        """The declared ranges of values, by input."""
        return {spec.name: spec.values for spec in self.inputs if spec.values is not None}

    @property
    def symbols(self) -> tuple[str, ...]:
        """The named dimensions of the inputs, in order of appearance."""
        return symbols(self.inputs)

    def range(self, symbol: str) -> Range:
        return self.ranges.get(symbol, Range())

    def max_samples(self, wanted: int) -> int:
        """Return how many samples one call may have, at most ``wanted``."""
        high = self.range(self.batch).high if self.batch else 1
        return wanted if high is None else min(wanted, high)

    def batch_axes(self, specs: Iterable[TensorSpec]) -> dict[str, int]:
        """Return the batch axis of each tensor. Only meaningful where ``batch`` is set."""
        return {spec.name: axis for spec in specs if (axis := spec.axis(self.batch)) is not None}


def symbols(specs: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Return the named dimensions of ``specs`` in order of appearance."""
    return tuple(dict.fromkeys(dim for spec in specs for dim in spec.shape if isinstance(dim, str)))


def dim_name(tensor: str, axis: int, declared: object = None) -> str:
    """Return the name of a dimension that a file does not fix: the declared one, or otherwise a unique one.

    Equal names mean equal sizes, which placeholders of exporters do not promise.
    """
    if isinstance(declared, str) and declared and not _PLACEHOLDER.fullmatch(declared):
        return declared
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', tensor)}_{axis}"


def parse_spec(text: str) -> tuple[TensorSpec, dict[str, Range]]:
    """Parse ``name:dtype[dim,...]``, such as ``ids:int64[batch,seq=1..512]``, or ``name:dtype[dim,...]=low..high``.

    Each dim is a size, a name (dynamic), or a name with a range ``name=low..high`` where either end may be omitted;
    ``name=low..high:step`` means the multiples of ``step`` within it. A range after the dims is that of the values:
    ``ids:int64[batch,seq=1..512]=0..30521``. A name with other characters than letters, digits and ``_ . - / :`` after
    a first letter or ``_`` is in double quotes: ``"petal length (cm)":float32[batch,1]``.

    Returns:
        The spec, and the ranges of its dimensions.

    Raises:
        InvalidArgument: ``text`` is not of that form.
    """
    match = _SPEC.match(text.strip())
    if match is None:
        raise InvalidArgument(
            f"'{text}' is not a tensor description; write name:dtype[dim,...], such as image:float32[batch,3,224,224]"
        )
    shape: list[Dim] = []
    ranges: dict[str, Range] = {}
    for part in (part.strip() for part in match["shape"].split(",")) if match["shape"].strip() else ():
        if part.isdecimal() and len(part) < 16:
            shape.append(int(part))
            continue
        symbol = _SYMBOL.match(part)
        if symbol is None:
            raise InvalidArgument(
                f"dimension '{part}' of '{text}' is neither a size, a name, nor name=low..high or name=low..high:step"
            )
        shape.append(symbol["name"])
        if symbol["low"] is not None:
            step = int(symbol["step"] or 1)
            low, high = int(symbol["low"] or step), int(symbol["high"]) if symbol["high"] else None
            if high is not None and high < low:
                raise InvalidArgument(f"the range of dimension '{part}' in '{text}' is empty")
            ranges[symbol["name"]] = Range(low, high, step)
    try:
        dtype = DType.parse(match["dtype"])
    except InvalidArgument as error:
        raise InvalidArgument(f"'{text}' has an {error}") from None
    held = None if match["values"] is None else values.parse(match["values"])
    return TensorSpec(match["name"].strip('"'), dtype, tuple(shape), held), ranges


def check_array(spec: TensorSpec, array: Array, signature: Signature, bound: dict[str, int]) -> None:
    """Check one named array against its spec, and bind its named dimensions in ``bound``.

    Raises:
        InvalidArgument: the dtype, the rank, a fixed dimension, a range, a size shared with another input, or a value
            is wrong.
    """
    dtype = DType.of(array)
    if dtype is not spec.dtype:
        if not array.size:  # libraries give an empty list the type of numbers
            raise InvalidArgument(
                f"input '{spec.name}' is empty, and has datatype {dtype.value} instead of {spec.dtype.value}; "
                "send at least one value"
            )
        raise InvalidArgument(
            f"input '{spec.name}' has datatype {dtype.value}, the model takes {spec.dtype.value}; "
            f"convert it to {spec.dtype.torch_name}"
        )
    if array.ndim != len(spec.shape):
        raise InvalidArgument(
            f"input '{spec.name}' has {array.ndim} dimensions {_shown(array.shape)}, the model takes "
            f"{len(spec.shape)}: {_shown(spec.shape)}"
        )
    for axis, (size, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, int):
            if size != dim:
                raise InvalidArgument(
                    f"dimension {axis} of input '{spec.name}' is {size}, the model takes {dim}: {_shown(spec.shape)}"
                )
        elif size not in (sizes := signature.range(dim)):
            ends = f"{sizes.low} or more" if sizes.high is None else f"{sizes.low}..{sizes.high}"
            multiples = f", in multiples of {sizes.step}" if sizes.step > 1 else ""
            raise InvalidArgument(
                f"dimension {axis} ('{dim}') of input '{spec.name}' is {size}, the model takes {ends}{multiples}"
            )
        elif bound.setdefault(dim, size) != size:
            raise InvalidArgument(
                f"dimension '{dim}' is {size} in input '{spec.name}' but {bound[dim]} "
                f"{'elsewhere' if spec.shape.count(dim) > 1 else 'in another input'}; they must agree"
            )
    check_values(spec, array)


def check_values(spec: TensorSpec, array: Array) -> None:
    """Check the values of an array of the spec's datatype against the spec's range, if it has one.

    Raises:
        InvalidArgument: a value is outside; the message names the first, and its index.
    """
    if spec.values is None or (at := spec.values.outside(array)) is None:
        return
    place = f" at index {_shown(at)}" if at else ""
    source = f", as {spec.values.source}" if spec.values.source else ""
    raise InvalidArgument(
        f"input '{spec.name}' holds {array[at].item()}{place}, outside the range that the model takes: "
        f"{spec.values}{source}"
    )


def check_inputs(signature: Signature, arrays: Mapping[str, Array]) -> dict[str, int]:
    """Check a full set of inputs against a signature.

    Returns:
        The size of each named dimension.

    Raises:
        InvalidArgument: an input is missing, unknown, or does not fit its spec.
    """
    known = {spec.name for spec in signature.inputs}
    for name in arrays:
        if name not in known:
            raise InvalidArgument(f"unknown input '{name}'; the model takes {_listed(known)}")
    bound: dict[str, int] = {}
    for spec in signature.inputs:
        array = arrays.get(spec.name)
        if array is None:
            raise InvalidArgument(f"input '{spec.name}' is missing; the model takes {_listed(known)}")
        check_array(spec, array, signature, bound)
    return bound


def check_same(declared: Signature, actual: Signature) -> None:
    """Check that a file has the declared inputs and outputs; the names of its dimensions may differ.

    Raises:
        InvalidArgument: a tensor is missing, or its datatype, rank or a fixed dimension differs.
    """
    for side in ("inputs", "outputs"):
        found = {spec.name: spec for spec in getattr(actual, side)}
        specs: tuple[TensorSpec, ...] = getattr(declared, side)
        if {spec.name for spec in specs} != set(found):
            raise InvalidArgument(
                f"the model's {side} are {_listed(found)}, not {_listed(spec.name for spec in specs)}"
            )
        for spec in specs:
            other = found[spec.name]
            sizes = zip(spec.shape, other.shape, strict=False)
            fits = all(want == have for want, have in sizes if isinstance(want, int) and isinstance(have, int))
            if spec.dtype is not other.dtype or len(spec.shape) != len(other.shape) or not fits:
                raise InvalidArgument(f"the model's {side} hold {other}, not {spec}")


def _shown(shape: Sequence[Dim]) -> str:
    return f"[{','.join(str(dim) for dim in shape)}]"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


_FORMATS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"BM": "a BMP image",
    b"RIFF": "a WebP image or a WAV recording",
    b"\x93NUMPY": "a .npy file",
    b"PK\3\4": "a ZIP file, as .npz and .pt are",
    b"%PDF": "a PDF document",
    b"\x1f\x8b": "compressed with gzip",
}


def foreign_format(start: bytes) -> str | None:
    """Return the kind of file that begins with these bytes, for messages; None if it is not a known one."""
    return next((kind for magic, kind in _FORMATS.items() if start.startswith(magic)), None)
