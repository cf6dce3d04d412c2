"""Rules for the ONNX graph, in the order in which they run."""

from ingot.export.passes.manager import OnnxPass
from ingot.export.rules.onnx.attention import Attention
from ingot.export.rules.onnx.bias_gelu import BiasGelu
from ingot.export.rules.onnx.common_subexpressions import CommonSubexpressions
from ingot.export.rules.onnx.constant_folding import ConstantFolding
from ingot.export.rules.onnx.conv_bn import ConvBn
from ingot.export.rules.onnx.dead_branches import DeadBranches
from ingot.export.rules.onnx.dequant_matmul import DequantMatmul
from ingot.export.rules.onnx.layer_norm import LayerNorm
from ingot.export.rules.onnx.rms_norm import RmsNorm
from ingot.export.rules.onnx.rotary import Rotary
from ingot.export.rules.onnx.rotary_cache import RotaryCache
from ingot.export.rules.onnx.silu_gate import SiluGate

RULES: tuple[OnnxPass, ...] = (
    ConstantFolding(),
    DeadBranches(),
    CommonSubexpressions(),
    RotaryCache(),
    ConvBn(),
    LayerNorm(),
    RmsNorm(),
    BiasGelu(),
    SiluGate(),
    Rotary(),
    Attention(),
    DequantMatmul(),
)
