"""Nodes that depend on constants alone become constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from ingot.export.program import quiet
from ingot.export.rewrite.passes.onnx import RANDOM, OnnxRule, dims

# Elements of the largest new constant; a larger one must replace constants of the same size.
_LARGEST = 8192
# The library replaces these by operators of opset 13, whatever the opset of the model, or fails.
_SEQUENCES = ("ConcatFromSequence", "SequenceAt", "SplitToSequence")


class ConstantFolding(OnnxRule):
    """Folds constants as long as the file does not grow much.

    Inputs with a default value become constants, because Ingot's engines do not override them. Quantized weights stay
    quantized. An ``If`` whose condition becomes constant is replaced by its branch. Models of sequences are left.
    """

    name = "constant-folding"

    def rewrite(self, model: ir.Model) -> int:
        before = sum(1 for _ in model.graph.all_nodes())
        lifted = common.RemoveInitializersFromInputsPass()(model).modified
        folded = fold(model, _may_fold)
        return max(1, before - sum(1 for _ in model.graph.all_nodes())) if lifted or folded else 0


def fold(model: ir.Model, may_fold: Callable[[ir.Node], bool | None]) -> bool:
    """Fold constants and ``If`` nodes on constants where ``may_fold`` is not False; return whether any changed."""
    if any(node.op_type in _SEQUENCES for node in model.graph.all_nodes()):
        return False
    with quiet():  # onnxscript logs each node that it cannot fold
        folded = optimizer.fold_constants(
            model,
            onnx_shape_inference=True,  # _may_fold needs the shapes of results
            input_size_limit=_LARGEST,
            output_size_limit=_LARGEST,
            should_fold=may_fold,
        ).modified
    if folded:
        common.RemoveUnusedNodesPass()(model)
    return folded


def _may_fold(node: ir.Node) -> bool | None:
    """Return False for random operators and for results that are too large or of unknown size, otherwise None."""
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
