"""Rules for the ONNX graph, in the order in which they run. A new one is a file and an instance in ``RULES``.

Start in layer_norm.py; the base classes are in passes/onnx.py. docs/guides/make/write-a-rule.md is a tutorial,
docs/guides/make/rules.md the catalogue.
"""

from ingot.export.rewrite.passes.manager import OnnxPass
from ingot.export.rewrite.rules.onnx.common_subexpressions import CommonSubexpressions
from ingot.export.rewrite.rules.onnx.constant_folding import ConstantFolding
from ingot.export.rewrite.rules.onnx.conv_bn import ConvBn
from ingot.export.rewrite.rules.onnx.dead_branches import DeadBranches
from ingot.export.rewrite.rules.onnx.dequant_matmul import DequantMatmul
from ingot.export.rewrite.rules.onnx.guarded_division import GuardedDivision
from ingot.export.rewrite.rules.onnx.layer_norm import LayerNorm
from ingot.export.rewrite.rules.onnx.rms_norm import RmsNorm
from ingot.export.rewrite.rules.onnx.rotary_cache import RotaryCache

__all__ = [
    "RULES",
    "CommonSubexpressions",
    "ConstantFolding",
    "ConvBn",
    "DeadBranches",
    "DequantMatmul",
    "GuardedDivision",
    "LayerNorm",
    "RmsNorm",
    "RotaryCache",
]

RULES: tuple[OnnxPass, ...] = (
    ConstantFolding(),
    DeadBranches(),
    CommonSubexpressions(),
    RotaryCache(),
    ConvBn(),
    LayerNorm(),
    RmsNorm(),
    DequantMatmul(),
    GuardedDivision(),
)
