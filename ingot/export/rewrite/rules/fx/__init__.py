"""Rules for the FX graph, in the order in which they run. A new one is a file and an instance in ``RULES``.

Start in silu_gate.py; the base class ``PatternPass`` and the patterns are in passes/fx_pattern.py.
"""

from ingot.export.rewrite.passes.manager import FxPass
from ingot.export.rewrite.rules.fx.attention import Attention
from ingot.export.rewrite.rules.fx.bias_gelu import BiasGelu
from ingot.export.rewrite.rules.fx.common_subexpressions import CommonSubexpressions
from ingot.export.rewrite.rules.fx.constant_folding import ConstantFolding
from ingot.export.rewrite.rules.fx.dead_branches import DeadBranches
from ingot.export.rewrite.rules.fx.dequant_matmul import DequantMatmul
from ingot.export.rewrite.rules.fx.onnx_forms import TRANSLATIONS
from ingot.export.rewrite.rules.fx.silu_gate import SiluGate

__all__ = [
    "RULES",
    "TRANSLATIONS",
    "Attention",
    "BiasGelu",
    "CommonSubexpressions",
    "ConstantFolding",
    "DeadBranches",
    "DequantMatmul",
    "SiluGate",
]

# Constants first: they decide branches, and layers whose weights are computed become plain ones.
RULES: tuple[FxPass, ...] = (
    ConstantFolding(),
    DeadBranches(),
    CommonSubexpressions(),
    DequantMatmul(),
    BiasGelu(),
    SiluGate(),
    Attention(),
)
