"""A repair of the rotary embedding that PyTorch's exporter writes from opset 23 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, dims, producer, same


class _RotaryCache:
    """``RotaryEmbedding`` of x [B, H, S, D] with angles [1, S, D / 2], which must be [B, S, D / 2]."""

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin, _outputs=["rotated"])

    def check(self, context: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **_: Any) -> bool:
        return not (_fits(cos, x) and _fits(sin, x))

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, rotated: ir.Value) -> Any:
        batch = op.Concat(op.Shape(x, start=0, end=1), op.Constant(value_ints=[1, 1]), axis=0)
        caches = [op.Expand(value, batch) for value in (cos, sin)]
        return op.RotaryEmbedding(x, *caches, **producer(rotated).attributes)


def _fits(angles: ir.Value, x: ir.Value) -> bool:
    node, rows, batch = angles.producer(), dims(angles) or (None,), dims(x) or (None,)
    return same(rows[0], batch[0]) or (node is not None and node.op_type == "Expand")


class RotaryCache(PatternRule):
    """Repeats the angles of ``RotaryEmbedding`` along the batch; otherwise only a batch of 1 runs."""

    name = "rotary-cache"
    anchors = ("RotaryEmbedding",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_RotaryCache(),)
