"""A batch normalization is folded into the weights of the convolution or linear layer before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.rules.common import _fuse_batchnorm as library

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, producer


class _Fold:
    """A pattern of onnxscript, which assumes inference, one datatype, and a free name for the bias."""

    def __init__(self, found: Any):
        self.pattern, self.rewrite, self._check = found.pattern, found.rewrite, found.check

    def check(self, context: Any, x: ir.Value, inbound_out: ir.Value, batchnorm_out: ir.Value) -> bool:
        layer, norm = producer(inbound_out), producer(batchnorm_out)
        weights = [value for value in (*layer.inputs[1:], *norm.inputs[1:]) if value is not None]
        kinds = {value.dtype for value in weights}
        taken = layer.graph.initializers if isinstance(layer.graph, ir.Graph) and len(layer.inputs) == 2 else {}
        return (
            len(norm.outputs) == 1
            and norm.attributes.get_int("training_mode", 0) == 0
            and kinds in ({ir.DataType.FLOAT}, {ir.DataType.DOUBLE})
            and f"{weights[0].name}_bias" not in taken
            and bool(self._check(context, x, inbound_out, batchnorm_out))
        )


class ConvBn(PatternRule):
    """Folds ``BatchNormalization`` into a preceding ``Conv``, ``ConvTranspose`` or ``Gemm``."""

    name = "conv-bn"
    anchors = ("BatchNormalization",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        # Before opset 9, attributes decide whether it is inference and which axes are normalized.
        found = (
            library.FuseBatchNormIntoConv(),
            library.FuseBatchNormIntoConvTranspose(),
            library.FuseBatchNormIntoGemm(),
        )
        return tuple(map(_Fold, found)) if opset >= 9 else ()
