"""Conversion of floating-point numbers to integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ingot.tensors import Array

# The smallest range, so that the scale of constant zeros is not zero.
_LEAST = 1e-12


@dataclass(frozen=True)
class Affine:
    """``real = (integer - zero) * scale``."""

    scale: float
    zero: int
    dtype: ir.DataType

    @classmethod
    def of(cls, low: float, high: float, dtype: ir.DataType, kept: ir.DataType | None = None) -> Affine:
        """Return the conversion that maps ``low`` to ``high`` to the full range of integers; zero is exact.

        Args:
            low: the lowest real.
            high: the highest.
            dtype: the integers.
            kept: the type in which the scale will be stored.
        """
        low, high = min(low, 0.0), max(high, 0.0)
        bottom = -128 if dtype is ir.DataType.INT8 else 0
        steps = 65535 if dtype is ir.DataType.UINT16 else 255
        scale = float(as_kept(np.array(max(high - low, _LEAST) / steps), kept))
        return cls(scale, bottom + int(np.clip(round(-low / scale), 0, steps)), dtype)


def channel_scales(array: Array, axis: int | None) -> Array:
    """Return the scale of each channel along ``axis``, or of the whole array, for symmetric 8 bits."""
    others = None if axis is None else tuple(index for index in range(array.ndim) if index != axis)
    return np.asarray(np.maximum(np.abs(array).max(axis=others), _LEAST) / 127, np.float32)


def as_kept(scales: Array, dtype: ir.DataType | None) -> Array:
    """Round scales up to another type: in half precision small ones are coarse, or zero."""
    if dtype is not ir.DataType.FLOAT16:
        return np.asarray(scales, np.float32)
    rounded = np.asarray(scales, np.float16)
    beyond = np.nextafter(rounded, np.copysign(np.float16(np.inf), rounded))
    return np.where(np.abs(rounded) < np.abs(scales), beyond, rounded).astype(np.float32)


def to_int8(array: Array, scales: Array, axis: int | None) -> Array:
    """Return an array in steps of its scales."""
    by = scales if axis is None else along(scales, axis, array.ndim)
    return np.clip(np.rint(array / by), -127, 127).astype(np.int8)


def along(values: Array, axis: int, rank: int) -> Array:
    """Return a vector shaped so that it multiplies an array's axis."""
    return values.reshape([-1 if index == axis else 1 for index in range(rank)])
