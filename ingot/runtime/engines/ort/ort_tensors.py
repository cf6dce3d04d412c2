"""Inputs and outputs of ONNX Runtime's sessions: their signatures, and their arrays."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, Shape, TensorSpec, dim_name
from ingot.tensors.arrays import as_bytes

# Names of the batch dimension in bare .onnx files, which cannot declare it otherwise.
_BATCH_NAMES = ("batch", "batch_size", "N", "n")


def spec_of(node: Any) -> TensorSpec:
    """Return an input or output of a session.

    Raises:
        InvalidArgument: it is not a tensor.
    """
    match = re.fullmatch(r"tensor\((\w+)\)", node.type)
    if match is None:
        remedy = "convert the model by skl2onnx with options={'zipmap': False}"
        raise InvalidArgument(
            f"'{node.name}' is of type {node.type}; only tensors can be served: "
            + (remedy if "map(" in node.type else "convert it inside the model, or leave it out")
        )
    shape: Shape = tuple(
        dim if isinstance(dim, int) and dim >= 0 else dim_name(node.name, axis, dim)
        for axis, dim in enumerate(node.shape)
    )
    return TensorSpec(node.name, DType.parse(match[1]), shape)


def batch_symbol(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> str | None:
    """Return the first dimension's name if it is a well-known one and every input and output starts with it."""
    leading = {spec.shape[0] if spec.shape else None for spec in (*inputs, *outputs)}
    only = leading.pop() if len(leading) == 1 else None
    if not isinstance(only, str) or only not in _BATCH_NAMES:
        return None
    # A second batch axis, as in a similarity matrix, relates samples of one batch to each other.
    return only if all(spec.shape.count(only) == 1 for spec in (*inputs, *outputs)) else None


def to_ort(spec: TensorSpec, array: Array) -> Array:
    """Return an array as a session accepts it: aligned and contiguous, text as objects.

    Raises:
        InvalidArgument: it holds text that is not UTF-8.
    """
    if spec.dtype is not DType.BYTES:
        # A tensor after a JSON header may start at any byte; kernels expect aligned memory.
        flags = array.flags
        return array if flags.aligned and flags.c_contiguous else array.copy()
    try:
        items = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{spec.name}' holds text that is not UTF-8, which ONNX strings require"
        ) from error
    return np.array(items, dtype=object).reshape(array.shape)


def from_ort(spec: TensorSpec, value: Array) -> Array:
    """Return an output of a session as an array, text as bytes."""
    if spec.dtype is not DType.BYTES:
        return value
    return as_bytes([str(item).encode() for item in value.reshape(-1).tolist()]).reshape(value.shape)


def copied(value: Any, dtype: DType) -> Array:
    """Return a copy of an ``onnxruntime.OrtValue`` in the host's memory, also of a type that numpy lacks."""
    shape = tuple(value.shape())
    array = np.empty(shape, dtype.numpy)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array
