"""Rules that bound the outputs of ONNX's operators: start in op.py, then elementwise.py; a new rule enters ``RULES``.

An operator without a rule makes its graph unbounded, so a rule that is missing costs speed and never safety. Rules
report upper bounds; those that read sizes from values raise UnboundedError where the values have no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from ingot.bounds.abstract import BOOL, INT32
from ingot.bounds.interval import Interval
from ingot.bounds.operators import elementwise, indexing, linear, made, reducing, shaping, trees
from ingot.bounds.operators.elementwise import combined, shaped
from ingot.bounds.operators.op import Op, Rule
from ingot.bounds.operators.reducing import reduced

__all__ = ["RULES", "Op", "Rule"]

MICROSOFT, ML = "com.microsoft", "ai.onnx.ml"


def _all(names: str, rule: Rule, domain: str = "") -> dict[tuple[str, str], Rule]:
    """Return one rule for several operators of a domain, by the keys of ``RULES``."""
    return {(domain, name): rule for name in names.split()}


RULES: Mapping[tuple[str, str], Rule] = {
    **_all(
        "Acos Acosh Asin Asinh Atan Atanh BitwiseNot Celu Cos Cosh CumProd CumSum Elu Erf Exp Gelu "
        "GroupNormalization HardSigmoid HardSwish Hardmax InstanceNormalization LRN LeakyRelu Log LogSoftmax "
        "LpNormalization MeanVarianceNormalization Mish Reciprocal Relu ReverseSequence RotaryEmbedding "
        "Round Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Swish Tan Tanh "
        "ThresholdedRelu Trilu",
        elementwise.same,
    ),
    **_all("IsInf IsNaN RegexFullMatch", shaped(BOOL)),
    **_all("Not", combined(lambda value: Interval.exactly(1) - value)),
    **_all("Equal", combined(elementwise.equal, BOOL)),
    **_all("Greater", combined(lambda one, two: elementwise.less(two, one), BOOL)),
    **_all("Less", combined(elementwise.less, BOOL)),
    **_all("And Or Xor GreaterOrEqual LessOrEqual", shaped(BOOL)),
    **_all("BitShift BitwiseAnd BitwiseOr BitwiseXor Mean PRelu Pow StringConcat Sum", combined(lambda *_: Interval())),
    **_all("Add", combined(Interval.__add__, computes=True)),
    **_all("Sub", combined(Interval.__sub__, computes=True)),
    **_all("Mul", combined(Interval.__mul__, computes=True)),
    **_all("Div", elementwise.divided),
    **_all("Mod", elementwise.remainder),
    **_all("Neg", combined(Interval.__neg__, computes=True)),
    **_all("Abs", combined(lambda value: value if value.non_negative else value.most(-value), computes=True)),
    **_all("Floor", combined(lambda value: value.divided(Interval.exactly(1), rounded=True))),
    **_all("Ceil", combined(lambda value: value + Interval(Interval.exactly(0).low, Interval.exactly(1).high))),
    **_all("Min", combined(lambda *values: reduce(Interval.least, values))),
    **_all("Max", combined(lambda *values: reduce(Interval.most, values))),
    **_all("Clip", elementwise.clipped),
    **_all("Cast CastLike", elementwise.cast),
    **_all("BitCast", elementwise.recast),
    **_all("Where", elementwise.chosen),
    **_all("Identity", shaping.identity),
    **_all("Shape", shaping.shape),
    **_all("Size", shaping.size),
    **_all("Reshape", shaping.reshape),
    **_all("Flatten", shaping.flatten),
    **_all("Squeeze", shaping.squeeze),
    **_all("Unsqueeze", shaping.unsqueeze),
    **_all("Transpose", shaping.transpose),
    **_all("Concat", shaping.concat),
    **_all("Split", shaping.split),
    **_all("Slice", indexing.slice_),
    **_all("Gather", indexing.gather),
    **_all("GatherElements", indexing.gather_elements),
    **_all("GatherND", indexing.gather_nd),
    **_all("Scatter ScatterElements ScatterND", indexing.scattered),
    **_all("TensorScatter", elementwise.same),
    **_all("Expand", shaping.expand),
    **_all("Tile", shaping.tile),
    **_all("Pad", shaping.pad),
    **_all("Resize Upsample", shaping.resize),
    **_all("DepthToSpace", shaping.depth_to_space),
    **_all("SpaceToDepth", shaping.space_to_depth),
    **_all("Compress", indexing.compress),
    **_all("NonZero", indexing.nonzero),
    **_all("Unique", indexing.unique),
    **_all("TopK", indexing.top_k),
    **_all("OneHot", shaping.one_hot),
    **_all("Range", shaping.range_),
    **_all("ConstantOfShape", shaping.constant_of_shape),
    **_all("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceSumSquare", reduced()),
    **_all("ReduceSum", reduced(Interval.__add__)),
    **_all("ReduceProd", reduced(Interval.__mul__)),
    **_all("ReduceMax", reduced(Interval.most)),
    **_all("ReduceMin", reduced(Interval.least)),
    **_all("ArgMax ArgMin", reducing.position),
    **_all("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", reducing.loss),
    **_all("Det", reducing.determinants),
    **_all("MatMul", linear.matmul),
    **_all("MatMulInteger", linear.matmul_to(INT32)),
    **_all("QLinearMatMul", linear.matmul_to(None, right=3)),
    **_all("Gemm", linear.gemm),
    **_all("Einsum", linear.einsum),
    **_all("Conv", linear.conv()),
    **_all("ConvInteger", linear.conv(INT32)),
    **_all("QLinearConv", linear.conv(filters=3, like=7)),
    **_all("DeformConv", linear.deformed_conv),
    **_all("ConvTranspose", linear.conv_transpose),
    **_all("AveragePool MaxPool LpPool", linear.pool),
    **_all("GlobalAveragePool GlobalLpPool GlobalMaxPool", linear.global_pool),
    **_all("RNN GRU", linear.recurrent(1)),
    **_all("LSTM", linear.recurrent(2)),
    **_all("Attention", linear.attention),
    **_all("GridSample", linear.grid_sample),
    **_all("RoiAlign", linear.roi_align),
    **_all("MaxUnpool", linear.unpool),
    **_all("NonMaxSuppression", linear.non_max_suppression),
    **_all("BatchNormalization", linear.batch_norm),
    **_all("LayerNormalization RMSNormalization", linear.norm),
    **_all("Dropout", linear.dropout),
    **_all("DynamicQuantizeLinear", linear.dynamic_quantize),
    **_all("QuantizeLinear", linear.quantize),
    **_all("DequantizeLinear", linear.dequantize),
    **_all("Constant", made.constant),
    **_all("RandomNormal RandomUniform", made.random),
    **_all("Bernoulli EyeLike RandomNormalLike RandomUniformLike", made.like),
    **_all("Multinomial", made.multinomial),
    **_all("BlackmanWindow HammingWindow HannWindow", made.window),
    **_all("AffineGrid", made.affine_grid),
    **_all("Col2Im", made.col2im),
    **_all("CenterCropPad", made.center_crop_pad),
    **_all("DFT", made.dft),
    **_all("STFT", made.stft),
    **_all("MelWeightMatrix", made.mel_weights),
    **_all("TfIdfVectorizer", made.term_counts),
    **_all("StringNormalizer", made.texts),
    **_all("BiasGelu FastGelu Gelu QuickGelu", elementwise.same, MICROSOFT),
    **_all("RotaryEmbedding", elementwise.never_empty, MICROSOFT),
    **_all("Inverse", reducing.inverse, MICROSOFT),
    **_all("SkipLayerNormalization SkipSimplifiedLayerNormalization", linear.skip_norm, MICROSOFT),
    **_all("SimplifiedLayerNormalization", linear.norm),  # ONNX Runtime has it in ONNX's domain
    **_all("QuantizeLinear", linear.quantize, MICROSOFT),
    **_all("DequantizeLinear", linear.dequantize, MICROSOFT),
    **_all("QLinearAdd QLinearMul", elementwise.quantized, MICROSOFT),
    **_all("QLinearSigmoid QLinearLeakyRelu QLinearSoftmax", elementwise.same, MICROSOFT),
    **_all("MatMulIntegerToFloat", linear.scaled_matmul(3), MICROSOFT),
    **_all("DynamicQuantizeMatMul", linear.scaled_matmul(2), MICROSOFT),
    **_all("FusedMatMul", linear.fused_matmul, MICROSOFT),
    **_all("MatMulNBits", linear.matmul_nbits, MICROSOFT),
    **_all("FusedConv", linear.conv(), MICROSOFT),
    **_all("MultiHeadAttention", linear.multi_head_attention, MICROSOFT),
    **_all("TreeEnsembleClassifier LinearClassifier SVMClassifier", trees.classifier, ML),
    **_all("TreeEnsembleRegressor LinearRegressor SVMRegressor TreeEnsemble", trees.regressor, ML),
    **_all("Scaler Normalizer Imputer Binarizer", trees.floats, ML),
    **_all("ZipMap", elementwise.same, ML),  # engines return its input
    **_all("LabelEncoder", trees.labels, ML),
    **_all("OneHotEncoder", trees.one_hot_encoder, ML),
    **_all("ArrayFeatureExtractor", trees.extractor, ML),
    **_all("FeatureVectorizer", trees.feature_vectorizer, ML),
}
