"""The rule of each operator; one without a rule is not followed, so its samples are not joined."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.bounds.samples import computing, layouts, selecting
from ingot.bounds.samples.computing import Rule, apart, at_axis, refused

MICROSOFT, ML = "com.microsoft", "ai.onnx.ml"


def _all(names: str, rule: Rule, domain: str = "") -> dict[tuple[str, str], Rule]:
    return {(domain, name): rule for name in names.split()}


MAKERS = frozenset(["ConstantOfShape", "Expand", "Range", "Reshape", "Shape", "Size", "Tile"])
"""Operators whose outputs may have samples, or be free of mixed values, where no input is."""

_RANDOM = "Bernoulli Multinomial RandomNormalLike RandomUniformLike"
_ELEMENTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil "
    "Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN "
    "LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink "
    "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor RegexFullMatch "
    "StringConcat"
)

RULES: Mapping[tuple[str, str], Rule] = {
    **_all(_ELEMENTWISE, computing.elementwise),
    **_all("Mod", computing.remainder),
    **_all("Cast CastLike Identity", computing.cast),
    **_all("Shape Size", layouts.shape),
    **_all("Reshape Flatten", layouts.reshape),
    **_all("Squeeze Unsqueeze", layouts.unsqueezed),
    **_all("Transpose", layouts.transpose),
    **_all("Expand", layouts.expand),
    **_all("ConstantOfShape", layouts.filled),
    **_all("Range", layouts.counted),
    **_all("Tile", layouts.tile),
    **_all("Concat", layouts.concat),
    **_all("Split", layouts.split),
    **_all("SplitToSequence", layouts.sequence),
    **_all("SequenceAt", layouts.part),
    **_all("Slice", layouts.slice_),
    **_all("Pad", layouts.pad),
    **_all("Resize Upsample", layouts.resize),
    **_all("OneHot", layouts.one_hot),
    **_all("Gather", selecting.gather),
    **_all("GatherElements", selecting.gather_elements),
    **_all("GatherND", selecting.gather_nd),
    **_all("Scatter ScatterElements", selecting.scatter_elements),
    **_all("ScatterND", selecting.scatter_nd),
    **_all("Compress", selecting.compress),
    **_all("NonZero", refused("it lists what it finds in all samples, one after another")),
    **_all("Unique", refused("it compares the values of all samples")),
    **_all("Softmax LogSoftmax Hardmax", apart(computing.softmax_axes, "it normalizes over the samples")),
    **_all("LayerNormalization RMSNormalization SimplifiedLayerNormalization", apart(computing.from_axis(-1))),
    **_all("LpNormalization", apart(computing.one(-1))),
    **_all("MeanVarianceNormalization", apart(computing.chosen_axes((0, 2, 3)))),
    **_all("InstanceNormalization GroupNormalization", apart(computing.but_first)),
    **_all("BatchNormalization", computing.batch_norm),
    **_all("LRN", apart(lambda step, rank: [1])),
    **_all("Dropout", computing.dropout),
    **_all("CumSum CumProd", apart(computing.axis_input, "it accumulates over the samples")),
    **_all("Trilu Det", apart(computing.last(2))),
    **_all("TopK", apart(computing.one(-1), "it ranks the samples")),
    **_all(
        "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSum ReduceSumSquare",
        computing.reduced,
    ),
    **_all("MatMul", computing.matmul()),
    **_all("MatMulInteger", computing.matmul()),
    **_all("QLinearMatMul", computing.matmul(0, 3)),
    **_all("Gemm", computing.gemm),
    **_all("Einsum", computing.einsum),
    **_all("Conv ConvInteger ConvTranspose QLinearConv DeformConv", computing.convolution),
    **_all("AveragePool MaxPool LpPool GlobalAveragePool GlobalLpPool GlobalMaxPool", computing.pool),
    **_all("RNN GRU LSTM", computing.recurrent),
    **_all("ReverseSequence", computing.reverse_sequence),
    **_all("Attention", computing.attention),
    **_all("RotaryEmbedding", computing.rotary),
    **_all("TensorScatter", at_axis(others=(1, 2))),
    **_all("GridSample", at_axis(others=(1,))),
    **_all("AffineGrid", computing.affine_grid),
    **_all("Col2Im DepthToSpace SpaceToDepth STFT", at_axis()),
    **_all("CenterCropPad", apart(computing.crop_axes)),
    **_all("DFT", apart(computing.dft_axes)),
    **_all("NonMaxSuppression RoiAlign MaxUnpool", refused("it numbers the samples of the batch in its values")),
    **_all("QuantizeLinear DequantizeLinear", apart(computing.quantized_axes)),
    **_all("DynamicQuantizeLinear", refused("it chooses one scale for all samples")),
    **_all(_RANDOM, refused("it is random")),
    **_all("BiasGelu FastGelu Gelu QuickGelu", computing.elementwise, MICROSOFT),
    **_all("Inverse", apart(computing.last(2)), MICROSOFT),
    **_all("RotaryEmbedding", at_axis(others=(1,)), MICROSOFT),
    **_all("SkipLayerNormalization SkipSimplifiedLayerNormalization", computing.skip_norm, MICROSOFT),
    **_all("QuantizeLinear DequantizeLinear", apart(computing.quantized_axes), MICROSOFT),
    **_all("QLinearAdd QLinearMul", computing.quantized_pair, MICROSOFT),
    **_all("QLinearSigmoid QLinearLeakyRelu", apart(lambda step, rank: ()), MICROSOFT),
    **_all("QLinearSoftmax", apart(computing.one(-1)), MICROSOFT),
    **_all("MatMulIntegerToFloat FusedMatMul MatMulNBits", computing.matmul(), MICROSOFT),
    **_all("DynamicQuantizeMatMul", refused("it chooses one scale for all samples"), MICROSOFT),
    **_all("FusedConv", at_axis(others=(3,)), MICROSOFT),
    **_all("MultiHeadAttention", at_axis(others=(1, 2, 4, 5, 6, 7)), MICROSOFT),
    **_all(
        "TreeEnsembleClassifier LinearClassifier SVMClassifier TreeEnsembleRegressor LinearRegressor SVMRegressor "
        "TreeEnsemble Scaler Normalizer Imputer OneHotEncoder",
        at_axis(),
        ML,
    ),
    **_all("Binarizer LabelEncoder ZipMap", apart(lambda step, rank: ()), ML),
    **_all("ArrayFeatureExtractor", apart(computing.last(1)), ML),
}
