"""Batch normalization in evaluation mode is folded into the convolution or linear layer before it."""

from __future__ import annotations

import operator

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ingot.export.rewrite.passes.fx_graph import Memory, arguments, aten, insert, insert_constant, tensor
from ingot.export.rewrite.passes.fx_pattern import ANY, Call, Either, Match, Number, Op, PatternPass

CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.convolution.default,
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
LAYER = Call((*CONVOLUTIONS, *TRANSPOSED, aten.linear.default), name="layer")
STATISTICS = (ANY, ANY, ANY, ANY)
NORM = Op(aten.batch_norm.default, LAYER, *STATISTICS, False, ANY, Number("eps"), ANY, name="norm")
NATIVE = Op(aten._native_batch_norm_legit_no_training.default, LAYER, *STATISTICS, ANY, Number("eps"), name="norm")


class ConvBn(PatternPass):
    """Folds ``batch_norm(conv(x))`` and ``batch_norm(linear(x))`` into one layer with new weights.

    The layer's weights and the statistics must be constants. The module's own tensors are not changed.
    """

    name = "conv-bn"
    pattern = Either(NORM, Op(operator.getitem, NATIVE, 0))

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        layer, norm = match["layer"], arguments(match["norm"])
        own, result = arguments(layer), tensor(layer)
        weight, mean, variance = map(memory.constant, (own["weight"], norm["running_mean"], norm["running_var"]))
        if weight is None or mean is None or variance is None or result is None:
            return None
        optional = (own["bias"], norm["weight"], norm["bias"])
        bias, scale, shift = map(memory.constant, optional)
        if [node is None for node in optional] != [value is None for value in (bias, scale, shift)]:
            return None
        # Otherwise the normalized dimension, the second, is not the layer's output dimension.
        if result.dim() != weight.dim():
            return None
        transposed = layer.target in TRANSPOSED or own.get("transposed", False)
        if transposed and own["groups"] != 1:
            return None
        # In double precision, so that half-precision weights are rounded once.
        bias, scale, shift = (None if value is None else value.double() for value in (bias, scale, shift))
        folded = fuse_conv_bn_weights(
            weight.double(), bias, mean.double(), variance.double(), match["eps"], scale, shift, transposed
        )
        base = str(own["weight"].target)
        new_weight, new_bias = (
            insert_constant(root, f"{base}_{kind}", nn.Parameter(value.detach().to(weight.dtype), requires_grad=False))
            for kind, value in zip(("folded", "folded_bias"), folded, strict=True)
        )
        return insert(root, layer.target, *(own | {"weight": new_weight, "bias": new_bias}).values())
