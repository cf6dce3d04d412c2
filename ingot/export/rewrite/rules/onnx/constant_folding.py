"""What depends on constants alone is computed once."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from ingot.export.rewrite.passes.onnx import RANDOM, OnnxRule, dims

# Elements of the largest constant that may come to be; larger ones only in place of constants that are as large.
_LARGEST = 8192
# The library replaces these by operators of opset 13, whatever the model's own is, or fails.
_SEQUENCES = ("ConcatFromSequence", "SequenceAt", "SplitToSequence")


class ConstantFolding(OnnxRule):
    """Folds constants, but never so that the file grows much.

    Inputs with a default value become constants, since nothing here can override them. Quantized weights stay
    quantized. A branch of an ``If`` whose condition becomes constant takes its place. Models of sequences are left.
    """

    name = "constant-folding"

    def rewrite(self, model: ir.Model) -> int:
        before = sum(1 for _ in model.graph.all_nodes())
        lifted = common.RemoveInitializersFromInputsPass()(model).modified
        folded = fold(model, _may_fold)
        return max(1, before - sum(1 for _ in model.graph.all_nodes())) if lifted or folded else 0


def fold(model: ir.Model, may_fold: Callable[[ir.Node], bool | None]) -> bool:
    """Fold constants unless ``may_fold`` says no, and decided conditions; tell whether anything changed."""
    if any(node.op_type in _SEQUENCES for node in model.graph.all_nodes()):
        return False
    folded = optimizer.fold_constants(
        model,
        onnx_shape_inference=True,  # also tells _may_fold how large a result would be
        input_size_limit=_LARGEST,
        output_size_limit=_LARGEST,
        should_fold=may_fold,
    ).modified
    if folded:
        common.RemoveUnusedNodesPass()(model)
    return folded


def _may_fold(node: ir.Node) -> bool | None:
    """Refuse what is random, and what would have to be computed to learn that it is too large; else leave it open."""
    if node.op_type in RANDOM:
        return False
    constants = [value.const_value.size for value in node.inputs if value is not None and value.const_value is not None]
    for output in node.outputs:
        shape = dims(output)
        if shape is None or any(not isinstance(size, int) for size in shape):
            return False
        if math.prod(size for size in shape if isinstance(size, int)) > max(_LARGEST, sum(constants)):
            return False
    return None
