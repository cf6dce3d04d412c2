"""Rules for the FX graph, in the order in which they run."""

from ingot.export.passes.manager import FxPass
from ingot.export.rules.fx.attention import Attention
from ingot.export.rules.fx.bias_gelu import BiasGelu
from ingot.export.rules.fx.common_subexpressions import CommonSubexpressions
from ingot.export.rules.fx.constant_folding import ConstantFolding
from ingot.export.rules.fx.conv_bn import ConvBn
from ingot.export.rules.fx.dead_branches import DeadBranches
from ingot.export.rules.fx.dequant_matmul import DequantMatmul
from ingot.export.rules.fx.layer_norm import LayerNorm
from ingot.export.rules.fx.onnx_forms import TRANSLATIONS as TRANSLATIONS
from ingot.export.rules.fx.rms_norm import RmsNorm
from ingot.export.rules.fx.rotary import Rotary
from ingot.export.rules.fx.silu_gate import SiluGate

# Constants first: they decide branches, and layers whose weights are computed become plain ones.
RULES: tuple[FxPass, ...] = (
    ConstantFolding(),
    DeadBranches(),
    CommonSubexpressions(),
    ConvBn(),
    DequantMatmul(),
    RmsNorm(),
    LayerNorm(),
    BiasGelu(),
    SiluGate(),
    Rotary(),
    Attention(),
)
