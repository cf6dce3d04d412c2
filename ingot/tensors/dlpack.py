"""Tensors of other libraries by the DLPack protocol, without importing those libraries.

An object with ``__dlpack__`` and ``__dlpack_device__`` exports a capsule that points to a description of its memory:
https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.tensors.specs import Array, DType

CPU, CUDA, CUDA_HOST = 1, 2, 3
"""Kinds of devices: the host's memory, a GPU's, and pinned memory of the host."""

_KINDS = {CPU: "cpu", CUDA: "cuda", CUDA_HOST: "pinned memory", 8: "metal", 10: "rocm", 13: "managed CUDA memory"}
_HOST = (CPU, 0)
# The newest version whose capsules are understood; libraries that do not know the argument export the oldest one.
_VERSION = (1, 0)
# Codes of element types, with a number of bits each.
_TYPES = {
    (0, 8): DType.INT8,
    (0, 16): DType.INT16,
    (0, 32): DType.INT32,
    (0, 64): DType.INT64,
    (1, 8): DType.UINT8,
    (1, 16): DType.UINT16,
    (1, 32): DType.UINT32,
    (1, 64): DType.UINT64,
    (2, 16): DType.FP16,
    (2, 32): DType.FP32,
    (2, 64): DType.FP64,
    (4, 16): DType.BF16,
    (6, 8): DType.BOOL,
}
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
# As many as arrays of numpy may have.
_MOST_DIMENSIONS = 64


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned`` of dlpack.h; its predecessor begins with the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Separate prototypes, since other packages set the types of ctypes.pythonapi's functions as well.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True)
class Exported:
    """The memory of a tensor; ``owner`` keeps it. ``strides`` are in bytes, and None if it is contiguous."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    owner: object

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Let numpy make a view of the memory, which keeps this object and so the memory."""
        kind = np.dtype(np.uint16) if self.dtype is DType.BF16 else self.dtype.numpy  # numpy has no bfloat16
        place = self.address, True
        return {"version": 3, "data": place, "shape": self.shape, "typestr": kind.str, "strides": self.strides}


def exports(value: object) -> bool:
    """Return whether an object is a tensor of another library."""
    return not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def device_of(name: str, value: Any) -> tuple[int, int]:
    """Return the kind of a tensor's device and its number.

    Raises:
        InvalidArgument: the object does not say where it is.
    """
    with foreign.reported_as(InvalidArgument, f"input '{name}' cannot be read by DLPack"):
        kind, number = value.__dlpack_device__()
        return int(kind), int(number)


def to_array(name: str, value: Any) -> Array:
    """Return a tensor as an array: a view of its memory that cannot be written to, or a copy from its device.

    Args:
        name: of the input, for errors.
        value: of which :func:`exports` is true.

    Raises:
        InvalidArgument: its element type cannot be served, or its library does not export it to the host.
    """
    kind, _ = device_of(name, value)
    options = {} if kind in (CPU, CUDA_HOST) else {"dl_device": _HOST, "copy": True}
    found = export(name, value, **options)
    with foreign.reported_as(InvalidArgument, f"input '{name}' cannot be read"):  # by its sizes or strides
        array = np.asarray(found) if math.prod(found.shape) else np.empty(found.shape, found.dtype.numpy)
    return array.view(found.dtype.numpy)


def export(name: str, value: Any, **options: Any) -> Exported:
    """Let a tensor's library export it.

    Args:
        name: of the input, for errors.
        value: the tensor.
        options: of ``__dlpack__``, such as ``stream``.

    Raises:
        InvalidArgument: its element type cannot be served, or its library does not export it.
    """
    kind, number = device_of(name, value)
    where = f"{_KINDS.get(kind, f'a device of kind {kind}')}{f':{number}' if kind != CPU else ''}"
    remedy = "; copy it to the host first: tensor.cpu()" if options.get("dl_device") == _HOST else ""
    with foreign.reported_as(
        InvalidArgument, lambda error: f"input '{name}' on {where} cannot be read: {error}{remedy}"
    ):
        try:
            capsule = value.__dlpack__(max_version=_VERSION, **options)
        except TypeError:  # of a library that is older than this argument
            capsule = value.__dlpack__(**options)
        return _described(capsule, on_host=kind != CUDA or "dl_device" in options)


def _described(capsule: Any, *, on_host: bool) -> Exported:
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != _VERSION[0]:
            raise InvalidArgument(f"DLPack {versioned.major}.{versioned.minor} is not known")
        tensor = versioned.tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    else:
        raise InvalidArgument("it exports no DLPack capsule")
    dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        text = f"{_CODES.get(tensor.code, f'type {tensor.code} of ')}{tensor.bits}"
        text += f" in vectors of {tensor.lanes}" if tensor.lanes != 1 else ""
        known = ", ".join(each.torch_name for each in _TYPES.values())
        raise InvalidArgument(f"elements of {text} cannot be served; convert them to one of {known}")
    if on_host and tensor.device_type not in (CPU, CUDA_HOST):
        raise InvalidArgument("its capsule is of another device than the host")
    # ctypes would read outside of the memory.
    if not 0 <= tensor.ndim <= _MOST_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise InvalidArgument("its capsule has no valid shape")
    shape = tuple(tensor.shape[: tensor.ndim])
    if any(size < 0 for size in shape) or (0 not in shape and not tensor.data):
        raise InvalidArgument(f"its capsule has a negative size or no memory; its shape is {list(shape)}")
    strides = tuple(dtype.numpy.itemsize * step for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    # The capsule is not renamed, as its consumer takes it over otherwise: so it frees the memory when it is dropped.
    return Exported((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, capsule)


def is_contiguous(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> bool:
    """Return whether elements follow each other in row-major order."""
    if strides is None:
        return True
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
