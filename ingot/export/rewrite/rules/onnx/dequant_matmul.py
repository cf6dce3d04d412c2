"""A product with weights of 4 or 8 bits becomes an operator that reads them as stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, constant, dims, producer
from ingot.tensors import Array

_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
# How many elements of a column may share a scale. One scale per column is repeated for blocks of _BLOCK.
_BLOCKS = (16, 32, 64, 128, 256)
_BLOCK = 128


class _DequantMatmul:
    """``x @ dequantize(w)`` for constant w [K, N], or [N, K] and transposed."""

    def __init__(self, transposed: bool):
        self._transposed = transposed

    def pattern(self, op: Any, x: Any, w: Any, scale: Any) -> Any:
        weight = op.DequantizeLinear(w, scale, _allow_other_inputs=True, _outputs=["weight"])
        return op.MatMul(x, op.Transpose(weight, perm=[1, 0]) if self._transposed else weight)

    def check(self, context: Any, x: ir.Value, w: ir.Value, scale: ir.Value, weight: ir.Value) -> bool:
        source = x.producer()
        return (
            x.dtype is scale.dtype is ir.DataType.FLOAT
            and len(dims(x) or ()) >= 2
            # Where activations are quantized too, the engine multiplies integers.
            and (source is None or source.op_type != "DequantizeLinear")
            and self._blocks(producer(weight)) is not None
        )

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, **_: Any) -> Any:
        found = self._blocks(producer(weight))
        if found is None:
            return None
        values, scales, zeros, block = found
        (columns, rows), count, bits = values.shape, scales.shape[1], _BITS[values.dtype.name]
        padded = np.pad(_unsigned(values), ((0, 0), (0, count * block - rows)))
        weights = {
            "blocks": _packed(padded.reshape(columns, count, block), bits),
            "scales": np.ascontiguousarray(scales),
            "zeros": _packed(_unsigned(zeros), bits),
        }
        inputs = [op.initializer(ir.tensor(array), name=f"{weight.name}.{key}") for key, array in weights.items()]
        sizes = {"K": rows, "N": columns, "bits": bits, "block_size": block}
        return op.MatMulNBits(x, *inputs, **sizes, _domain="com.microsoft")

    def _blocks(self, node: ir.Node) -> tuple[Array, Array, Array, int] | None:
        """Return weights [N, K], scales and zero points [N, K / block], and the block size; None for other forms."""
        w, scale, zero = (constant(value) for value in (*node.inputs, None)[:3])
        if w is None or scale is None or w.ndim != 2 or w.dtype.name not in _BITS:
            return None
        if zero is None:
            if len(node.inputs) > 2:
                return None
            zero = np.zeros(scale.shape, w.dtype)
        along_columns = node.attributes.get_int("axis", 1) % 2 == int(self._transposed)
        if not self._transposed:
            w, scale, zero = w.T, scale.T, zero.T
        block = node.attributes.get_int("block_size", 0)
        if block:
            return (w, scale, zero, block) if along_columns and block in _BLOCKS else None
        if scale.size > 1 and along_columns:
            return None
        shape = (w.shape[0], -(-w.shape[1] // _BLOCK))
        scale, zero = (np.broadcast_to(array.reshape(-1, 1), shape) for array in (scale, zero))
        return w, scale, zero, _BLOCK


def _unsigned(array: Array) -> Array:
    """Return integers of few bits as unsigned ones; signed ones are shifted by half of their range."""
    name = array.dtype.name
    offset = 0 if name.startswith("u") else 1 << (_BITS[name] - 1)
    return np.asarray(array.astype(np.int16) + offset).astype(np.uint8)


def _packed(array: Array, bits: int) -> Array:
    """Return small integers as bytes: two of 4 bits per byte, the first in the lower half."""
    if bits == 8:
        return np.ascontiguousarray(array)
    even = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, array.shape[-1] % 2)])
    return np.asarray(even[..., ::2] | even[..., 1::2] << 4)


class DequantMatmul(PatternRule):
    """Finds products with constant weights behind ``DequantizeLinear`` and writes ``MatMulNBits``.

    There may be one scale in all, one per column, or one per block of 16 to 256 rows. Activations stay in FP32, where
    ONNX Runtime by itself would round them to 8 bits. Not a default, because the exact kernel is slower.
    """

    name = "dequant-matmul"
    default = False
    anchors = ("DequantizeLinear",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_DequantMatmul(transposed=False), _DequantMatmul(transposed=True))
