"""A random call of each operator that has a rule; see generated.py. Most of its calls must fit the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.bounds.generated import KINDS, Call, Maker, Value

Recipe = Callable[[Maker, str], Call]
RECIPES: dict[tuple[str, str], Recipe] = {}
MS, ML = "com.microsoft", "ai.onnx.ml"
SCALES = (0.5, 0.7, 0.6, 0.3, 1.0, 1.3, 1.7, 2.0, 2.5, 0.1, 0.9)


def recipe(names: str, domain: str = "") -> Callable[[Recipe], Recipe]:
    def registered(made: Recipe) -> Recipe:
        RECIPES.update({(domain, name): made for name in names.split()})
        return made

    return registered


def unary(kinds: str, names: str, domain: str = "", **given: Any) -> None:
    RECIPES.update(
        {
            (domain, name): lambda m, operator: Call(operator, [m.tensor(kinds, m.shape())], domain=domain, **given)
            for name in names.split()
        }
    )


unary("f", "Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp HardSigmoid HardSwish LeakyRelu Log Mish")
unary("f", "Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh ThresholdedRelu")
unary("f", "Floor Ceil IsInf IsNaN", since=20)
unary("fij", "Neg Abs Sign")
unary("f", "Gelu", since=20)
unary("f", "Swish", since=24)
unary("iju", "BitwiseNot", since=18)
unary("b", "Not")
unary("fijubt", "Identity Shape Size")
unary("f", "Hardmax LogSoftmax Softmax")
unary("fij", "NonZero")
unary("f", "Gelu QuickGelu", MS)
unary("f", "RandomNormalLike RandomUniformLike")
unary("f", "Bernoulli", since=15)


def broadcasting(kinds: str, names: str, *, most: int = 2, **given: Any) -> None:
    def made(m: Maker, operator: str) -> Call:
        kind, shape = m.pick(*kinds), m.shape(3)
        count = m.rng.randint(1, most) if most > 2 else 2
        shapes = [m.near(shape) for _ in range(count)]
        if m.chance(0.15):  # as large as each other, and their result is larger
            size = m.size()
            shapes = [[size, 1], [1, size], [1, 1]][:count]
        return Call(operator, [m.tensor(kind, each) for each in shapes], **given)

    RECIPES.update({("", name): made for name in names.split()})


broadcasting("fij", "Add Sub Mul Equal Greater Less GreaterOrEqual LessOrEqual Pow")
broadcasting("b", "And Or Xor")
broadcasting("iju", "BitwiseAnd BitwiseOr BitwiseXor", since=18)
broadcasting("fij", "Min Max", most=3)
broadcasting("f", "Sum Mean", most=3)
broadcasting("t", "StringConcat", since=20)
broadcasting("f", "PRelu", since=16)
RECIPES[("", "Equal")] = lambda m, operator: (
    RECIPES["", "Add"](m, operator)
    if m.chance(0.7)
    else Call(operator, [m.tensor("t", shape := m.shape(2)), m.tensor("t", m.near(shape))], since=19)
)


@recipe("BitShift")
def bit_shift(m: Maker, operator: str) -> Call:
    kind, shape = "u", m.shape(3)
    inputs = [m.tensor(kind, m.near(shape), 0, 7) for _ in range(2)]
    return Call(operator, inputs, attributes={"direction": m.pick("LEFT", "RIGHT")})


@recipe("Div Mod")
def divided(m: Maker, operator: str) -> Call:
    kind, shape = m.pick("f", "i", "i", "j"), m.shape(3)
    if operator == "Mod" and kind == "f":
        return Call(operator, [m.tensor("f", m.near(shape)), m.tensor("f", m.near(shape), 1)], attributes={"fmod": 1})
    return Call(operator, [m.tensor(kind, m.near(shape), -9, 12), m.tensor(kind, m.near(shape), 1, 6)])


@recipe("Clip")
def clip(m: Maker, operator: str) -> Call:
    kind = m.pick("f", "i")
    low, high = m.tensor(kind, [], -2, 3), m.tensor(kind, [], 1, 9)
    return Call(operator, [m.tensor(kind, m.shape()), low if m.chance(0.7) else None, high if m.chance(0.7) else None])


@recipe("Cast")
def cast(m: Maker, operator: str) -> Call:
    to = m.pick(*"fdhijusbtw")
    return Call(operator, [m.tensor("fijubd" if to == "t" else "fdijusb", m.shape())], attributes={"to": KINDS[to][0]})


@recipe("CastLike")
def cast_like(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("fijub", m.shape()), m.tensor("fijubt", m.shape())], since=15)


@recipe("BitCast")
def bit_cast(m: Maker, operator: str) -> Call:
    kind, to = m.pick("fj", "jf", "di", "id", "su", "us")
    return Call(operator, [m.tensor(kind, m.shape())], attributes={"to": KINDS[to][0]}, since=26)


@recipe("Where")
def where(m: Maker, operator: str) -> Call:
    kind, shape = m.pick(*"fiut"), m.shape(3)
    return Call(
        operator, [m.tensor("b", m.near(shape)), m.tensor(kind, m.near(shape)), m.tensor(kind, m.near(shape))], since=16
    )


@recipe("RegexFullMatch")
def regex(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("t", m.shape())], attributes={"pattern": "x*"}, since=20)


@recipe("CumSum CumProd")
def cumulated(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axis = m.ints(m.rng.randrange(-len(shape), len(shape)))
    return Call(operator, [m.tensor("fij", shape), axis], since=26 if operator == "CumProd" else 14)


@recipe("GroupNormalization InstanceNormalization")
def channel_norm(m: Maker, operator: str) -> Call:
    channels = m.pick(2, 4)
    x = m.tensor("f", [m.size(), channels, *m.sizes(m.pick(1, 2))])
    grouped = {"num_groups": 2} if operator == "GroupNormalization" else {}
    return Call(operator, [x, m.tensor("f", [channels]), m.tensor("f", [channels])], attributes=grouped, since=21)


@recipe("LRN")
def lrn(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("f", m.sizes(4))], attributes={"size": 3})


@recipe("LpNormalization")
def lp_norm(m: Maker, operator: str) -> Call:
    return Call(
        operator, [m.tensor("f", m.sizes(3))], attributes={"axis": m.pick(0, 1, -1), "p": m.pick(1, 2)}, since=11
    )


@recipe("MeanVarianceNormalization")
def mvn(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("f", m.sizes(4))])


@recipe("ReverseSequence")
def reversed_(m: Maker, operator: str) -> Call:
    time, batch = m.sizes(2)
    lengths = [m.rng.randint(min(1, time), time) for _ in range(batch)]
    return Call(operator, [m.tensor("fit", [time, batch, *m.sizes(m.pick(0, 1))]), m.ints(lengths)])


@recipe("RotaryEmbedding")
def rotary(m: Maker, operator: str) -> Call:
    batch, heads, length = m.sizes(3)
    table = [m.tensor("f", [12, 2]) for _ in range(2)]
    x = m.tensor("f", [batch, heads, length, 4])
    places = m.ints(np.zeros((batch, length), int) if m.chance(0.8) else np.zeros((batch, 1), int))
    return Call(operator, [x, *table, places], since=23)


@recipe("RotaryEmbedding", MS)
def rotary_ms(m: Maker, operator: str) -> Call:
    batch, length = m.sizes(2)
    x = m.tensor("f", [batch, length, 8]) if m.chance(0.5) else m.tensor("f", [batch, 2, length, 4])
    table = [m.tensor("f", [12, 2]) for _ in range(2)]
    return Call(operator, [x, m.ints(np.zeros((batch, length), int)), *table], domain=MS)


@recipe("Trilu")
def trilu(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("fi", m.sizes(m.pick(2, 3))), m.ints(m.pick(-1, 0, 1))], since=14)


@recipe("TensorScatter")
def tensor_scatter(m: Maker, operator: str) -> Call:
    batch, long, width = m.sizes(3)
    update = m.tensor("f", [batch, min(long, m.size()), width])
    return Call(operator, [m.tensor("f", [batch, long, width]), update, m.ints([0] * batch)], since=24)


@recipe("Reshape")
def reshape(m: Maker, operator: str) -> Call:
    x = m.tensor("fit", m.shape())
    size = x.array.size
    if size == 0:
        wanted = m.pick([0], [m.size(), 0], [0, m.size()], [-1], [m.size(), -1], list(x.array.shape))
    else:
        parts = [part for part in range(1, size + 1) if size % part == 0]
        part = m.pick(*parts)
        wanted = m.pick([size], [part, size // part], [1, part, size // part, 1], [part, -1], [-1], [0, -1], [-1, part])
    return Call(operator, [x, m.ints(wanted)], attributes={"allowzero": m.pick(0, 0, 1)}, since=14)


@recipe("Flatten")
def flatten(m: Maker, operator: str) -> Call:
    shape = m.shape()
    return Call(operator, [m.tensor("fi", shape)], attributes={"axis": m.rng.randint(-len(shape), len(shape))})


@recipe("Squeeze Unsqueeze")
def squeeze(m: Maker, operator: str) -> Call:
    shape = [1 if m.chance(0.5) else size for size in m.sizes(m.rng.randint(1, 4))]
    if m.chance(0.2):  # the older form
        ones = [axis for axis, size in enumerate(shape) if size == 1] if operator == "Squeeze" else m.pick([0], [1, 0])
        return Call(operator, [m.tensor("fi", shape)], attributes={"axes": ones} if ones else {}, since=11, until=11)
    if operator == "Squeeze":
        ones = [axis for axis, size in enumerate(shape) if size == 1]
        axes: Any = m.rng.sample(ones, m.rng.randint(0, len(ones)))
        return Call(operator, [m.tensor("fit", shape), m.ints(axes) if axes or m.chance(0.5) else None])
    return Call(operator, [m.tensor("fit", shape), m.ints(m.pick([0], [-1], [1, 0], [0, -1]))])


@recipe("Transpose")
def transpose(m: Maker, operator: str) -> Call:
    shape = m.shape()
    order = m.rng.sample(range(len(shape)), len(shape))
    return Call(operator, [m.tensor("fiut", shape)], attributes={"perm": order} if shape and m.chance(0.7) else {})


@recipe("Concat")
def concat(m: Maker, operator: str) -> Call:
    kind, shape = m.pick(*"fit"), m.sizes(m.rng.randint(1, 3))
    axis = m.rng.randrange(-len(shape), len(shape))
    inputs: list[Value | None] = []
    for _ in range(m.rng.randint(1, 3)):
        other = list(shape)
        other[axis] = m.size()
        if m.chance(0.1):
            other[0] = 0
        inputs.append(m.tensor(kind, other))
    return Call(operator, inputs, attributes={"axis": axis})


@recipe("Split")
def split(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axis, count = m.rng.randrange(-len(shape), len(shape)), m.rng.randint(1, 3)
    cuts = sorted(m.rng.randint(0, shape[axis]) for _ in range(count - 1))
    parts = np.diff([0, *cuts, shape[axis]])
    if m.chance(0.2):  # the older form
        attributes = {"axis": axis, "split": parts.tolist()}
        return Call(operator, [m.tensor("fi", shape)], count, attributes=attributes, since=11, until=11)
    if m.chance(0.5):
        return Call(operator, [m.tensor("fit", shape), m.ints(parts)], count, attributes={"axis": axis})
    return Call(operator, [m.tensor("fit", shape)], count, attributes={"axis": axis, "num_outputs": count}, since=18)


@recipe("Slice")
def slice_(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axes = m.rng.sample(range(len(shape)), m.rng.randint(1, len(shape)))
    ends = [m.pick(*range(-4, 8), 99, -99) for _ in axes]
    steps = m.ints([m.pick(1, 1, 2, -1, -2, 3) for _ in axes])
    inputs = [m.tensor("fit", shape), m.ints([m.rng.randint(-4, 6) for _ in axes]), m.ints(ends), m.ints(axes)]
    return Call(operator, [*inputs, steps] if m.chance(0.6) else inputs)


def places(m: Maker, shape: Sequence[int], size: int) -> Value:
    """Return random positions in a dimension of a size."""
    found = [m.rng.randrange(-size, size) if size else 0 for _ in range(int(np.prod(shape)))]
    return m.ints(np.array(found, int).reshape(shape), "ij")


@recipe("Gather")
def gather(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axis = m.rng.randrange(-len(shape), len(shape))
    return Call(operator, [m.tensor("fit", shape), places(m, m.shape(2), shape[axis])], attributes={"axis": axis})


@recipe("GatherElements")
def gather_elements(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axis = m.rng.randrange(-len(shape), len(shape))
    other = [min(size, m.size()) for size in shape]
    other[axis] = m.size()
    return Call(operator, [m.tensor("fit", shape), places(m, other, shape[axis])], attributes={"axis": axis})


@recipe("GatherND")
def gather_nd(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    depth, outer = m.rng.randint(1, len(shape)), m.shape(2)
    index = places(m, [*outer, depth], min(shape[:depth])).array.astype(np.int64)
    return Call(operator, [m.tensor("fit", shape), m.ints(index)])


@recipe("Scatter ScatterElements")
def scatter(m: Maker, operator: str) -> Call:
    kind, shape = m.pick(*"fit"), m.sizes(m.rng.randint(1, 3))
    axis = m.rng.randrange(-len(shape), len(shape))
    other = [min(size, m.size()) for size in shape]
    adds = (
        {"reduction": m.pick("add", "mul", "max", "min")}
        if operator != "Scatter" and kind != "t" and m.chance(0.5)
        else {}
    )
    inputs = [m.tensor(kind, shape), places(m, other, shape[axis]), m.tensor(kind, other)]
    old = operator == "Scatter"
    return Call(operator, inputs, attributes={"axis": axis, **adds}, since=10 if old else 18, until=10 if old else 23)


@recipe("ScatterND")
def scatter_nd(m: Maker, operator: str) -> Call:
    kind, shape = m.pick(*"fit"), m.sizes(m.rng.randint(1, 3))
    depth, outer = m.rng.randint(1, len(shape)), m.sizes(m.pick(1, 2))
    index = places(m, [*outer, depth], min(shape[:depth])).array.astype(np.int64)
    adds = {"reduction": m.pick("add", "mul", "max", "min")} if kind != "t" and m.chance(0.5) else {}
    return Call(
        operator,
        [m.tensor(kind, shape), m.ints(index), m.tensor(kind, [*outer, *shape[depth:]])],
        attributes=adds,
        since=18,
    )


@recipe("Expand")
def expand(m: Maker, operator: str) -> Call:
    shape = m.shape(3)
    return Call(operator, [m.tensor("fit", m.near(shape)), m.ints(m.near(shape))])


@recipe("Tile")
def tile(m: Maker, operator: str) -> Call:
    shape = m.shape(3)
    return Call(operator, [m.tensor("fit", shape), m.ints([m.pick(0, 1, 2, 3) for _ in shape])])


@recipe("Pad")
def pad(m: Maker, operator: str) -> Call:
    kind, shape = m.pick("f", "i"), m.shape(3)
    amounts = [m.pick(0, 0, 1, 2, -1) for _ in range(2 * len(shape))]
    mode = m.pick("constant", "constant", "edge", "reflect")
    filling = m.tensor(kind, []) if mode == "constant" and m.chance(0.5) else None
    return Call(operator, [m.tensor(kind, shape), m.ints(amounts), filling], attributes={"mode": mode})


@recipe("Resize")
def resize(m: Maker, operator: str) -> Call:
    shape, mode = m.sizes(4), m.pick("nearest", "linear")
    attributes = {"mode": mode}
    scales = np.array([1, 1, m.pick(*SCALES), m.pick(*SCALES)], np.float32)
    x = m.tensor("f", shape)
    if m.chance(0.6):
        return Call(operator, [x, None, m.known_of(scales, 1, constant=True)], attributes=attributes)
    if m.chance(0.5):
        policy = m.pick("stretch", "not_larger", "not_smaller")
        sizes = m.ints(m.sizes(2))
        return Call(
            operator,
            [x, None, None, sizes],
            attributes=attributes | {"axes": [2, 3], "keep_aspect_ratio_policy": policy},
            since=18,
        )
    return Call(operator, [x, None, None, m.ints([*shape[:2], *m.sizes(2)])], attributes=attributes)


@recipe("Upsample")
def upsample(m: Maker, operator: str) -> Call:
    scales = np.array([1, 1, m.pick(1, 2, 1.3, 1.7), m.pick(1, 2, 2.5)], np.float32)
    return Call(operator, [m.tensor("f", m.sizes(4)), m.known_of(scales, 1, constant=True)], since=9, until=9)


@recipe("DepthToSpace SpaceToDepth")
def blocks(m: Maker, operator: str) -> Call:
    n, c, h, w = m.sizes(4)
    shape = [n, 4 * c, h, w] if operator == "DepthToSpace" else [n, c, 2 * min(h, 5), 2 * min(w, 5)]
    return Call(operator, [m.tensor("f", shape)], attributes={"blocksize": 2})


@recipe("Compress")
def compress(m: Maker, operator: str) -> Call:
    shape = m.shape(3)
    attributes = {"axis": m.rng.randrange(len(shape))} if shape and m.chance(0.5) else {}
    return Call(operator, [m.tensor("fit", shape), m.tensor("b", [m.size()])], attributes=attributes)


@recipe("Unique")
def unique(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    attributes: dict[str, Any] = {"axis": m.rng.randrange(len(shape))} if m.chance(0.5) else {}
    return Call(
        operator, [m.tensor("fit", shape, 0, 3)], m.rng.randint(1, 4), attributes=attributes | {"sorted": m.pick(0, 1)}
    )


@recipe("TopK")
def top_k(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axis = m.rng.randrange(-len(shape), len(shape))
    return Call(
        operator, [m.tensor("fi", shape), m.ints([m.rng.randint(0, shape[axis])])], 2, attributes={"axis": axis}
    )


@recipe("OneHot")
def one_hot(m: Maker, operator: str) -> Call:
    shape = m.shape(2)
    depth = m.ints(m.pick(m.size(), [m.size()]))
    inputs = [m.tensor("i", shape, -2, 4), depth, m.tensor("fit", [2])]
    return Call(operator, inputs, attributes={"axis": m.rng.randint(-len(shape) - 1, len(shape))})


@recipe("Range")
def range_(m: Maker, operator: str) -> Call:
    step = m.pick(1, 1, 2, 3, -1, -2)
    kind = m.pick("i", "i", "i", "j", "f")
    if kind == "f":
        numbers = [m.pick(0.0, 0.5, 1.25, -1), float(m.size()), m.pick(1.0, 0.1, 0.3, 0.7)]
        return Call(
            operator, [m.known_of(np.array(number, np.float32), 1, constant=m.chance(0.5)) for number in numbers]
        )
    return Call(operator, [m.ints(m.pick(0, 0, 1, -2, 7), kind), m.ints(m.size(), kind), m.ints(step, kind)])


@recipe("ConstantOfShape")
def constant_of_shape(m: Maker, operator: str) -> Call:
    value = numpy_helper.from_array(np.array([m.pick(0, 1, 7)], m.pick(np.int64, np.float32)))
    return Call(operator, [m.ints(m.shape(3))], attributes={"value": value} if m.chance(0.7) else {})


@recipe(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceSumSquare ReduceSum ReduceProd ReduceMax ReduceMin"
)
def reduce(m: Maker, operator: str) -> Call:
    shape = m.shape(3)
    x = m.tensor("f" if operator.startswith("ReduceLog") else "fij", shape)
    axes = m.rng.sample(range(-len(shape), 0), m.rng.randint(0, len(shape)))
    attributes: dict[str, Any] = {"keepdims": m.pick(0, 1)}
    if m.chance(0.5):
        attributes |= {"noop_with_empty_axes": m.pick(0, 1)}
        return Call(operator, [x, m.ints(axes) if m.chance(0.8) else None], attributes=attributes, since=18)
    until = 12 if operator == "ReduceSum" else 17
    return Call(operator, [x], attributes=attributes | ({"axes": axes} if axes else {}), since=11, until=until)


@recipe("ArgMax ArgMin")
def position(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    attributes = {"keepdims": m.pick(0, 1), "axis": m.rng.randrange(-len(shape), len(shape))}
    return Call(operator, [m.tensor("fi", shape)], attributes=attributes)


@recipe("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
def loss(m: Maker, operator: str) -> Call:
    n, c, d = m.sizes(3)
    more = [d] if m.chance(0.5) else []
    target = m.ints(np.zeros((n, *more), int))
    outputs = m.pick(1, 2) if operator.startswith("Soft") else 1
    weights = m.tensor("f", [c]) if m.chance(0.3) else None
    attributes = {"reduction": m.pick("none", "mean", "sum")}
    return Call(operator, [m.tensor("f", [n, c, *more]), target, weights], outputs, attributes=attributes)


@recipe("Det")
def det(m: Maker, operator: str) -> Call:
    size = m.size()
    return Call(operator, [m.tensor("f", [*m.shape(2), size, size])], since=22)


@recipe("Inverse", MS)
def inverse(m: Maker, operator: str) -> Call:
    size = m.size()
    return Call(operator, [m.tensor("f", [*m.shape(2), size, size])], domain=MS)


def product_shapes(m: Maker) -> tuple[list[int], list[int]]:
    n, k, p = m.sizes(3)
    outer = m.shape(2)
    left, right = [*m.near(outer), n, k], [*m.near(outer), k, p]
    if m.chance(0.1):
        left = left[-1:]
    elif m.chance(0.1):
        right = right[-2:-1]
    return left, right


@recipe("MatMul")
def matmul(m: Maker, operator: str) -> Call:
    kind, (left, right) = m.pick("f", "f", "i"), product_shapes(m)
    return Call(operator, [m.tensor(kind, left), m.tensor(kind, right)])


@recipe("MatMulInteger")
def matmul_integer(m: Maker, operator: str) -> Call:
    left, right = product_shapes(m)
    return Call(operator, [m.tensor("u", left), m.tensor("us", right)])


def quantized(m: Maker, kinds: str, shape: Sequence[int]) -> list[Value]:
    """Return a tensor of 8 bits with its scale and zero point."""
    kind = m.pick(*kinds)
    zero = m.known_of(np.array(0, KINDS[kind][1]), KINDS[kind][0], constant=True)
    return [m.tensor(kind, shape), m.known_of(np.array(0.5, np.float32), 1, constant=True), zero]


@recipe("QLinearMatMul")
def qlinear_matmul(m: Maker, operator: str) -> Call:
    left, right = product_shapes(m)
    return Call(operator, [*quantized(m, "u", left), *quantized(m, "u", right), *quantized(m, "u", [])[1:]])


@recipe("MatMulIntegerToFloat", MS)
def matmul_to_float(m: Maker, operator: str) -> Call:
    left, right = product_shapes(m)
    one, two = quantized(m, "u", left), quantized(m, "us", right)
    return Call(operator, [one[0], two[0], one[1], two[1]], domain=MS)


@recipe("DynamicQuantizeMatMul", MS)
def dynamic_matmul(m: Maker, operator: str) -> Call:
    left, right = product_shapes(m)
    two = quantized(m, "us", right)
    return Call(operator, [m.tensor("f", left), two[0], two[1]], domain=MS)


@recipe("FusedMatMul", MS)
def fused_matmul(m: Maker, operator: str) -> Call:
    left, right = product_shapes(m)
    flags = {"transA": m.pick(0, 1), "transB": m.pick(0, 1), "transBatchA": m.pick(0, 0, 0, 1), "transBatchB": 0}
    if flags["transA"] and len(left) > 1:
        left[-2:] = left[:-3:-1]
    if flags["transB"] and len(right) > 1:
        right[-2:] = right[:-3:-1]
    return Call(operator, [m.tensor("f", left), m.tensor("f", right)], domain=MS, attributes=flags)


@recipe("MatMulNBits", MS)
def nbits(m: Maker, operator: str) -> Call:
    width = m.pick(3, 16)
    weight = m.known_of(np.zeros((width, 2, 8), np.uint8), 2, constant=True)
    scales = m.known_of(np.ones(width * 2, np.float32), 1, constant=True)
    attributes = {"K": 32, "N": width, "bits": 4, "block_size": 16}
    return Call(operator, [m.tensor("f", [*m.shape(2), 32]), weight, scales], domain=MS, attributes=attributes)


@recipe("Gemm")
def gemm(m: Maker, operator: str) -> Call:
    n, k, p = m.sizes(3)
    flags = {"transA": m.pick(0, 1), "transB": m.pick(0, 1)}
    left, right = [k, n] if flags["transA"] else [n, k], [p, k] if flags["transB"] else [k, p]
    added = m.tensor("f", m.pick([n, p], [p], [1, p], [n, 1], [])) if m.chance(0.5) else None
    return Call(operator, [m.tensor("f", left), m.tensor("f", right), added], attributes=flags)


@recipe("Einsum")
def einsum(m: Maker, operator: str) -> Call:
    equation = m.pick(
        "a,a->a", "ab,bc->ac", "ab,ab->ab", "ab,ab->a", "ab,ab,ab->ba", "abc,abd->acd", "ab->ba", "ab,b->ab"
    )
    sizes = {letter: m.size() for letter in "abcd"}
    terms = equation.partition("->")[0].split(",")
    inputs = [m.tensor("f", [1 if m.chance(0.15) else sizes[letter] for letter in term]) for term in terms]
    return Call(operator, inputs, attributes={"equation": equation})


def windows(m: Maker, rank: int) -> dict[str, Any]:
    """Return random attributes of a window."""
    found: dict[str, Any] = {"strides": [m.pick(1, 1, 2, 3) for _ in range(rank)]}
    if m.chance(0.3):
        found["auto_pad"] = m.pick("SAME_UPPER", "SAME_LOWER", "VALID")
    else:
        found["pads"] = [m.pick(0, 0, 1, 2) for _ in range(2 * rank)]
    return found


@recipe("Conv")
def conv(m: Maker, operator: str) -> Call:
    rank, group, channels = m.pick(1, 2), m.pick(1, 1, 2), m.pick(1, 2)
    kernel = [m.pick(1, 2, 3) for _ in range(rank)]
    weight = m.tensor("f", [group * m.pick(1, 3), channels, *kernel])
    attributes = windows(m, rank) | {"group": group, "dilations": [m.pick(1, 1, 2) for _ in range(rank)]}
    attributes |= {"kernel_shape": kernel} if m.chance(0.7) else {}
    return Call(operator, [m.tensor("f", [m.size(), group * channels, *m.sizes(rank)]), weight], attributes=attributes)


RECIPES[MS, "FusedConv"] = lambda m, operator: _moved(conv(m, operator), MS, activation="Relu")


def _moved(call: Call, domain: str, **more: Any) -> Call:
    call.domain = domain
    call.attributes |= more
    return call


@recipe("ConvInteger QLinearConv")
def conv_integer(m: Maker, operator: str) -> Call:
    kernel = [m.pick(1, 2), 2]
    x, weight = [m.size(), 2, *m.sizes(2)], [m.pick(1, 3), 2, *kernel]
    attributes = windows(m, 2) | {"kernel_shape": kernel}
    if operator == "ConvInteger":
        return Call(operator, [m.tensor("u", x), m.tensor("u", weight)], attributes=attributes)
    inputs = [*quantized(m, "u", x), *quantized(m, "u", weight), *quantized(m, "u", [])[1:]]
    return Call(operator, inputs, attributes=attributes)


@recipe("DeformConv")
def deform_conv(m: Maker, operator: str) -> Call:
    n, h, w = m.sizes(3)
    out = [max(0, h - 1), max(0, w - 1)]
    inputs = [m.tensor("f", [n, 2, h, w]), m.tensor("f", [3, 2, 2, 2]), m.tensor("f", [n, 8, *out])]
    return Call(operator, inputs, since=19)


@recipe("ConvTranspose")
def conv_transpose(m: Maker, operator: str) -> Call:
    rank, group = m.pick(1, 2), m.pick(1, 1, 2)
    kernel = [m.pick(1, 2, 3) for _ in range(rank)]
    x, weight = [m.size(), 2 * group, *m.sizes(rank)], [2 * group, m.pick(1, 3), *kernel]
    attributes = windows(m, rank) | {"group": group, "dilations": [m.pick(1, 1, 2) for _ in range(rank)]}
    attributes |= {"kernel_shape": kernel} if m.chance(0.7) else {}
    if m.chance(0.3):
        attributes["output_padding"] = [m.pick(0, 1) for _ in range(rank)]
    if m.chance(0.2):
        attributes["output_shape"] = [m.pick(4, 6, 9) for _ in range(rank)]
    return Call(operator, [m.tensor("f", x), m.tensor("f", weight)], attributes=attributes)


@recipe("AveragePool MaxPool LpPool")
def pool(m: Maker, operator: str) -> Call:
    rank = m.pick(1, 2)
    attributes = windows(m, rank) | {"kernel_shape": [m.pick(1, 2, 3) for _ in range(rank)]}
    if m.chance(0.4):
        attributes["ceil_mode"] = 1
    if m.chance(0.3):
        attributes["dilations"] = [m.pick(1, 2) for _ in range(rank)]
    outputs = m.pick(1, 2) if operator == "MaxPool" else 1
    return Call(
        operator,
        [m.tensor("f", [*m.sizes(2), *m.sizes(rank)])],
        outputs,
        attributes=attributes,
        since=22 if operator == "LpPool" else 13,
    )


@recipe("GlobalAveragePool GlobalLpPool GlobalMaxPool")
def global_pool(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("f", m.sizes(m.pick(3, 4)))])


@recipe("RNN GRU LSTM")
def recurrent(m: Maker, operator: str) -> Call:
    gates, least = {"RNN": 1, "GRU": 3, "LSTM": 4}[operator], m.pick(0, 1, 1)
    both, hidden, width, turned = m.pick(0, 1), m.pick(2, 4), max(1, m.size()), m.pick(0, 0, 1)
    ways = 1 + both
    x = m.tensor("f", [max(least, size) for size in (*m.sizes(2), width)])
    weights = [m.tensor("f", [ways, gates * hidden, width]), m.tensor("f", [ways, gates * hidden, hidden])]
    attributes = {"hidden_size": hidden, "direction": "bidirectional" if both else m.pick("forward", "reverse")}
    attributes |= {"layout": 1} if turned else {}
    return Call(
        operator, [x, *weights], m.rng.randint(1, 3 if operator == "LSTM" else 2), attributes=attributes, since=14
    )


@recipe("Attention")
def attention(m: Maker, operator: str) -> Call:
    batch, length, past, heads, width, wide = m.size(), m.size(), m.size(), m.pick(1, 2), m.pick(1, 4), m.pick(1, 4)
    groups = m.pick(1, 2)
    attributes: dict[str, Any] = {}
    if m.chance(0.5):
        q, k, v = [batch, heads * groups, length, width], [batch, heads, past, width], [batch, heads, past, wide]
    else:
        q, k, v = [batch, length, heads * groups * width], [batch, past, heads * width], [batch, past, heads * wide]
        attributes = {"q_num_heads": heads * groups, "kv_num_heads": heads}
    inputs: list[Value | None] = [m.tensor("f", shape) for shape in (q, k, v)]
    outputs = m.pick(1, 4)
    if m.chance(0.4):
        earlier = m.size()
        outputs = m.pick(3, 4)
        inputs += [None, m.tensor("f", [batch, heads, earlier, width]), m.tensor("f", [batch, heads, earlier, wide])]
    elif m.chance(0.4):
        inputs.append(m.tensor("f", m.pick([length, past], [1, past], [batch, 1, length, past])))
    return Call(operator, inputs, outputs, attributes=attributes, since=23)


@recipe("MultiHeadAttention", MS)
def multi_head(m: Maker, operator: str) -> Call:
    batch, length, past = m.sizes(3)
    shapes = [[batch, length, 8], [batch, past, 8], [batch, past, m.pick(4, 8)]]
    if m.chance(0.3):
        shapes[1:] = [[batch, 2, past, 4], [batch, 2, past, m.pick(2, 4)]]
    return Call(operator, [m.tensor("f", shape) for shape in shapes], domain=MS, attributes={"num_heads": 2})


@recipe("GridSample")
def grid_sample(m: Maker, operator: str) -> Call:
    batch, h, w = m.sizes(3)
    return Call(operator, [m.tensor("f", [batch, m.size(), h, w]), m.tensor("f", [batch, *m.sizes(2), 2])], since=16)


@recipe("RoiAlign")
def roi_align(m: Maker, operator: str) -> Call:
    rois, batch = m.size(), m.pick(1, 2, 3)
    inputs = [m.tensor("f", [batch, *m.sizes(3)]), m.tensor("f", [rois, 4]), m.ints([0] * rois)]
    attributes = {"sampling_ratio": m.pick(1, 2), "output_height": m.pick(1, 3), "output_width": m.pick(1, 2)}
    return Call(operator, inputs, attributes=attributes, since=16)


@recipe("MaxUnpool")
def unpool(m: Maker, operator: str) -> Call:
    shape = [m.size(), m.size(), m.size()]
    inputs = [m.tensor("f", shape), m.ints(np.zeros(shape, int))]
    attributes = {"kernel_shape": [m.pick(1, 2)], "strides": [m.pick(1, 2)], "pads": m.pick([0, 0], [1, 0])}
    if m.chance(0.3):
        inputs.append(m.ints([shape[0], shape[1], 2 * shape[2] + 2]))
    return Call(operator, inputs, attributes=attributes, since=22)


@recipe("NonMaxSuppression")
def nms(m: Maker, operator: str) -> Call:
    batch, boxes, classes = m.sizes(3)
    inputs = [m.tensor("f", [batch, boxes, 4]), m.tensor("f", [batch, classes, boxes])]
    return Call(operator, [*inputs, m.ints([m.pick(0, 1, 2, 9)])] if m.chance(0.6) else inputs)


@recipe("BatchNormalization")
def batch_norm(m: Maker, operator: str) -> Call:
    channels = m.size()
    x = m.tensor("f", [m.size(), channels, *m.shape(2)])
    training = m.pick(0, 0, 1)
    inputs = [x, *[m.tensor("f", [channels]) for _ in range(4)]]
    return Call(operator, inputs, 3 if training else 1, attributes={"training_mode": training}, since=15)


@recipe("LayerNormalization")
def layer_norm(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.pick(2, 3))
    axis = m.pick(-1, 1)
    scale = m.tensor("f", m.near(shape[axis:])) if m.chance(0.3) else m.tensor("f", shape[axis:])
    inputs = [m.tensor("f", shape), scale, m.tensor("f", shape[axis:]) if m.chance(0.5) else None]
    return Call(operator, inputs, m.rng.randint(1, 3), attributes={"axis": axis}, since=17)


@recipe("RMSNormalization SimplifiedLayerNormalization")
def rms_norm(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.pick(2, 3))
    scale = m.near(shape[-1:]) if m.chance(0.3) else shape[-1:]
    return Call(operator, [m.tensor("f", shape), m.tensor("f", scale)], attributes={"axis": -1}, since=23)


@recipe("SkipLayerNormalization SkipSimplifiedLayerNormalization", MS)
def skip_norm(m: Maker, operator: str) -> Call:
    shape = m.sizes(3)
    skip = m.pick(shape, shape, shape[1:], [1, *shape[1:]])
    inputs: list[Value | None] = [m.tensor("f", shape), m.tensor("f", skip), m.tensor("f", shape[-1:])]
    if operator == "SkipLayerNormalization":
        inputs.append(m.tensor("f", shape[-1:]))
    return Call(operator, inputs, m.pick(1, 4), domain=MS)


@recipe("Dropout")
def dropout(m: Maker, operator: str) -> Call:
    x, ratio = m.tensor("f", m.shape(2)), m.known_of(np.array(m.pick(0.0, 0.5), np.float32), 1)
    if m.chance(0.2):  # the older form
        return Call(operator, [x], m.pick(1, 2), attributes={"ratio": 0.5}, since=11, until=11)
    training = m.known_of(np.array(m.chance(0.5)), 9, constant=m.chance(0.3))
    return Call(operator, [x, ratio, training][: m.rng.randint(1, 3)], m.pick(1, 2))


@recipe("DynamicQuantizeLinear")
def dynamic_quantize(m: Maker, operator: str) -> Call:
    return Call(operator, [m.tensor("f", m.shape())], 3)


def scales_of(m: Maker, shape: Sequence[int], kind: str) -> tuple[list[Value | None], dict[str, Any]]:
    axis = m.rng.randrange(len(shape)) if shape and m.chance(0.4) else None
    places = [] if axis is None else [shape[axis]]
    scale = m.tensor("f", places, 1)
    zero = m.known_of(np.zeros(places, KINDS[kind][1]), KINDS[kind][0]) if m.chance(0.6) else None
    return [scale, zero], {} if axis is None else {"axis": axis}


@recipe("QuantizeLinear DequantizeLinear")
def quantize(m: Maker, operator: str) -> Call:
    shape, kind = m.shape(3), m.pick("u", "s")
    more, attributes = scales_of(m, shape, kind)
    x = m.tensor("f" if operator == "QuantizeLinear" else kind, shape)
    return Call(operator, [x, *more], attributes=attributes)


RECIPES[MS, "QuantizeLinear"] = lambda m, operator: _moved(quantize(m, operator), MS)
RECIPES[MS, "DequantizeLinear"] = lambda m, operator: _moved(quantize(m, operator), MS)


@recipe("QLinearAdd QLinearMul", MS)
def qlinear_add(m: Maker, operator: str) -> Call:
    shape, kind = m.shape(3), m.pick("u", "s")
    one, two, out = (quantized(m, kind, m.near(shape)) for _ in range(3))
    return Call(operator, [*one, *two, *out[1:]], domain=MS)


@recipe("QLinearSigmoid QLinearLeakyRelu QLinearSoftmax", MS)
def qlinear_unary(m: Maker, operator: str) -> Call:
    shape, kind = m.sizes(m.rng.randint(1, 3)), m.pick("u", "s")
    one, out = quantized(m, kind, shape), quantized(m, kind, [])
    attributes = {"opset": 13, "axis": -1} if operator == "QLinearSoftmax" else {}
    return Call(operator, [*one, *out[1:]], domain=MS, attributes=attributes)


@recipe("BiasGelu FastGelu", MS)
def bias_gelu(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    return Call(operator, [m.tensor("f", shape), m.tensor("f", shape[-1:])], domain=MS)


@recipe("Constant")
def constant(m: Maker, operator: str) -> Call:
    attributes: dict[str, Any] = m.pick(
        {"value": numpy_helper.from_array(np.array(m.numbers([3], 0, 9), np.int64))},
        {"value": numpy_helper.from_array(np.array(["aß", "b" * 9], object))},
        {"value_int": 5},
        {"value_ints": [1, 2, 3]},
        {"value_float": 1.5},
        {"value_floats": [1.0, 2.0]},
        {"value_string": b"text"},
        {"value_strings": [b"long text", b"t"]},
    )
    return Call(operator, [], attributes=attributes)


@recipe("RandomNormal RandomUniform")
def random_(m: Maker, operator: str) -> Call:
    return Call(operator, [], attributes={"shape": m.sizes(m.rng.randint(1, 3)), "dtype": KINDS[m.pick("f", "d")][0]})


@recipe("EyeLike")
def eye(m: Maker, operator: str) -> Call:
    kind = {"dtype": KINDS[m.pick("f", "i")][0]} if m.chance(0.5) else {}
    return Call(operator, [m.tensor("fi", m.sizes(2))], attributes={"k": m.pick(-1, 0, 1), **kind})


@recipe("Multinomial")
def multinomial(m: Maker, operator: str) -> Call:
    attributes = {"sample_size": m.pick(1, 5), "dtype": KINDS[m.pick("j", "i")][0]}
    return Call(operator, [m.tensor("f", m.sizes(2), 0, 1)], attributes=attributes)


@recipe("BlackmanWindow HammingWindow HannWindow")
def window(m: Maker, operator: str) -> Call:
    return Call(operator, [m.ints(m.size(), "ij")], attributes={"output_datatype": m.pick(1, 11)}, since=17)


@recipe("AffineGrid")
def affine_grid(m: Maker, operator: str) -> Call:
    batch, rank = m.size(), m.pick(2, 3)
    inputs = [m.tensor("f", [batch, rank, rank + 1]), m.ints([batch, 3, *m.sizes(rank)])]
    return Call(operator, inputs, attributes={"align_corners": m.pick(0, 1)}, since=20)


@recipe("Col2Im")
def col2im(m: Maker, operator: str) -> Call:
    n, c, h, w = m.size(), m.size(), m.pick(2, 4), m.pick(3, 5)
    block = [m.pick(1, 2), m.pick(1, 2, 3)]
    columns = (h - block[0] + 1) * (w - block[1] + 1)
    return Call(
        operator, [m.tensor("f", [n, c * block[0] * block[1], columns]), m.ints([h, w]), m.ints(block)], since=18
    )


@recipe("CenterCropPad")
def center_crop_pad(m: Maker, operator: str) -> Call:
    shape = m.sizes(m.rng.randint(1, 3))
    axes = m.rng.sample(range(-len(shape), len(shape)), 1) if m.chance(0.5) else None
    wanted = m.sizes(len(shape) if axes is None else 1)
    return Call(operator, [m.tensor("fi", shape), m.ints(wanted)], attributes={"axes": axes}, since=18)


@recipe("DFT")
def dft(m: Maker, operator: str) -> Call:
    shape = [*m.sizes(m.pick(2, 3)), m.pick(1, 1, 2)]
    axis = m.rng.randrange(len(shape) - 1)
    inverse = m.pick(0, 0, 1)
    attributes = {"inverse": inverse, "onesided": m.pick(0, 1)}
    length = m.ints(m.size()) if m.chance(0.5) else None
    if m.chance(0.5):
        return Call(operator, [m.tensor("f", shape), length, m.ints(axis)], attributes=attributes, since=20)
    return Call(operator, [m.tensor("f", shape), length], attributes=attributes | {"axis": axis}, since=17, until=19)


@recipe("STFT")
def stft(m: Maker, operator: str) -> Call:
    batch, frame = m.size(), m.pick(2, 4, 5)
    length = frame + m.size()
    shape = [batch, length, m.pick(1, 2)] if m.chance(0.8) else [batch, length]
    framed = m.tensor("f", [frame])
    inputs = m.pick([framed, None], [framed, m.ints(frame)], [None, m.ints(frame)])
    attributes = {"onesided": m.pick(0, 1)}
    return Call(operator, [m.tensor("f", shape), m.ints(m.pick(1, 2, 3)), *inputs], attributes=attributes, since=17)


@recipe("MelWeightMatrix")
def mel(m: Maker, operator: str) -> Call:
    ends = [m.known_of(np.array(value, np.float32), 1) for value in (0.0, 4000.0)]
    return Call(operator, [m.ints(m.size()), m.ints(m.pick(8, 9, 12)), m.ints(8000), *ends], since=17)


@recipe("TfIdfVectorizer")
def term_counts(m: Maker, operator: str) -> Call:
    texts = m.chance(0.5)
    attributes: dict[str, Any] = {
        "mode": "TF",
        "min_gram_length": 1,
        "max_gram_length": 2,
        "max_skip_count": m.pick(0, 1),
        "ngram_counts": [0, 2],
        "ngram_indexes": m.pick([0, 1, 2], [4, 0, 2]),
        **({"pool_strings": ["a", "b", "a", "B"]} if texts else {"pool_int64s": [1, 2, 5, 4]}),
    }
    x = m.tensor("t" if texts else "i", m.sizes(m.pick(1, 2)))
    return Call(operator, [x], attributes=attributes)


@recipe("StringNormalizer")
def normalizer(m: Maker, operator: str) -> Call:
    attributes = {"case_change_action": m.pick("LOWER", "UPPER", "NONE"), "stopwords": ["a", "B"], "locale": "C.UTF-8"}
    x = m.texts(m.pick([m.size()], [1, m.size()]))
    if m.chance(0.3) and x.array.size:
        x.array.reshape(-1)[-1:] = "Ⱥ"
        if x.bounds.text is not None and x.bounds.text.sent.terms:
            x.array.reshape(-1)[:] = ["Ⱥ" * 20, *[""] * (x.array.size - 1)]
        else:
            x.array.reshape(-1)[:] = ["Ⱥ" * (x.bounds.text.width // 2 if x.bounds.text else 0)] * x.array.size
    return Call(operator, [x], attributes=attributes)


LABELS = ["short", "a longer label, ß"]


@recipe("TreeEnsembleClassifier TreeEnsembleRegressor", ML)
def trees(m: Maker, operator: str) -> Call:
    attributes: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [1.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
    }
    kind, targets = ("class", m.pick(2, 3)) if operator == "TreeEnsembleClassifier" else ("target", m.pick(1, 3))
    attributes |= {
        f"{kind}_treeids": [0, 0],
        f"{kind}_nodeids": [1, 2],
        f"{kind}_ids": [0, targets - 1],
        f"{kind}_weights": [1.0, 2.0],
    }
    if kind == "target":
        attributes["n_targets"] = targets
    elif m.chance(0.5):
        attributes["classlabels_int64s"] = [1, 5, 7][:targets]
    else:
        attributes["classlabels_strings"] = [*LABELS, "x" * 30][:targets]
    return Call(
        operator,
        [m.tensor("f", [m.size(), 2])],
        2 if kind == "class" else 1,
        domain=ML,
        version=3,
        attributes=attributes,
    )


@recipe("TreeEnsemble", ML)
def tree_ensemble(m: Maker, operator: str) -> Call:
    attributes = {
        "n_targets": 2,
        "tree_roots": [0],
        "nodes_featureids": [0],
        "nodes_modes": numpy_helper.from_array(np.array([0], np.uint8)),
        "nodes_splits": numpy_helper.from_array(np.array([1.0], np.float32)),
        "nodes_truenodeids": [0],
        "nodes_trueleafs": [1],
        "nodes_falsenodeids": [1],
        "nodes_falseleafs": [1],
        "leaf_targetids": [0, 1],
        "leaf_weights": numpy_helper.from_array(np.array([1.0, 2.0], np.float32)),
    }
    return Call(operator, [m.tensor("f", [m.size(), 2])], domain=ML, version=5, attributes=attributes)


@recipe("LinearClassifier LinearRegressor", ML)
def linear(m: Maker, operator: str) -> Call:
    shape = m.pick([m.size(), 2], [2])
    if operator == "LinearRegressor":
        attributes: dict[str, Any] = {"coefficients": [1.0] * 4, "intercepts": [0.0, 1.0], "targets": 2}
        return Call(operator, [m.tensor("f", shape)], domain=ML, version=4, attributes=attributes)
    labels = {"classlabels_ints": [3, 4]} if m.chance(0.5) else {"classlabels_strings": LABELS}
    attributes = {"coefficients": [1.0] * 4, "intercepts": [0.0, 1.0], **labels}
    return Call(operator, [m.tensor("fi", shape)], 2, domain=ML, version=4, attributes=attributes)


@recipe("SVMClassifier SVMRegressor", ML)
def svm(m: Maker, operator: str) -> Call:
    attributes: dict[str, Any] = {
        "kernel_type": "LINEAR",
        "kernel_params": [0.1, 0.0, 3.0],
        "rho": [0.1],
        "support_vectors": [1.0, 2.0, 3.0, 4.0],
    }
    x = m.tensor("f", m.pick([m.size(), 2], [2]))
    if operator == "SVMRegressor":
        attributes |= {"coefficients": [1.0, 2.0], "n_supports": 2}
        return Call(operator, [x], domain=ML, version=4, attributes=attributes)
    labels = {"classlabels_ints": [3, 4]} if m.chance(0.5) else {"classlabels_strings": LABELS}
    attributes |= {"coefficients": [1.0, 2.0], "vectors_per_class": [1, 1], **labels}
    return Call(operator, [x], 2, domain=ML, version=4, attributes=attributes)


@recipe("Scaler Normalizer Imputer Binarizer", ML)
def floats(m: Maker, operator: str) -> Call:
    attributes: dict[str, dict[str, Any]] = {
        "Scaler": {"offset": [0.5], "scale": [2.0]},
        "Normalizer": {"norm": "MAX"},
        "Imputer": {"imputed_value_floats": [1.0], "replaced_value_float": 2.0},
        "Binarizer": {"threshold": 1.0},
    }
    return Call(
        operator,
        [m.tensor("fi" if operator in ("Scaler", "Normalizer") else "f", m.sizes(m.pick(1, 2)))],
        domain=ML,
        version=4,
        attributes=attributes[operator],
    )


@recipe("ZipMap", ML)
def zip_map(m: Maker, operator: str) -> Call:
    return Call(
        operator, [m.tensor("f", [m.size(), 2])], domain=ML, version=4, attributes={"classlabels_strings": LABELS}
    )


@recipe("LabelEncoder", ML)
def labels(m: Maker, operator: str) -> Call:
    x = m.tensor("t", m.shape(2)) if m.chance(0.4) else m.tensor("i", m.shape(2))
    keys: dict[str, Any] = {"keys_strings": ["a", "B"]} if x.bounds.kind == 8 else {"keys_int64s": [1, 2]}
    values: dict[str, Any] = m.pick(
        {"values_strings": LABELS, "default_string": "an even longer text for all others"},
        {"values_strings": LABELS},
        {"values_floats": [1.0, 2.0]},
        {"values_int64s": [7, 8]},
        {
            "values_tensor": numpy_helper.from_array(np.array(LABELS, object)),
            "default_tensor": numpy_helper.from_array(np.array(["x" * 50], object)),
        },
    )
    if x.bounds.kind == 8 and "values_strings" not in values:
        values.pop("default_string", None)
    return Call(operator, [x], domain=ML, version=4, attributes=keys | values)


@recipe("OneHotEncoder", ML)
def one_hot_encoder(m: Maker, operator: str) -> Call:
    if m.chance(0.5):
        return Call(
            operator, [m.tensor("t", m.shape(2))], domain=ML, version=4, attributes={"cats_strings": ["a", "B", "c"]}
        )
    return Call(operator, [m.tensor("if", m.shape(2))], domain=ML, version=4, attributes={"cats_int64s": [1, 2]})


@recipe("ArrayFeatureExtractor", ML)
def extractor(m: Maker, operator: str) -> Call:
    shape = m.pick([m.size(), 3], [3])
    return Call(operator, [m.tensor("fit", shape), m.ints(m.pick([0], [2, 1], [0, 0, 1, 1, 2]))], domain=ML)


@recipe("FeatureVectorizer", ML)
def vectorizer(m: Maker, operator: str) -> Call:
    rows, widths = m.size(), [m.pick(1, 2), m.pick(1, 3)]
    inputs = [m.tensor("f", [rows, width]) for width in widths]
    return Call(operator, inputs, domain=ML, version=4, attributes={"inputdimensions": widths})


def inner(
    name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[tuple[str, int, Any]], outputs: Sequence[str]
) -> onnx.GraphProto:
    ends = [onnx.ValueInfoProto(name=output) for output in outputs]
    return helper.make_graph(nodes, name, [helper.make_tensor_value_info(n, k, shape) for n, k, shape in inputs], ends)


@recipe("If")
def if_(m: Maker, operator: str) -> Call:
    kind = m.pick(*"fit")
    shape = m.shape(2)
    outer = {"one": m.tensor(kind, shape), "two": m.tensor(kind, m.near(shape))}
    branches = {
        branch: inner(branch, [helper.make_node("Identity", [name], [branch])], [], [branch])
        for branch, name in (("then_branch", "one"), ("else_branch", "two"))
    }
    return Call(operator, [m.known_of(np.array(m.chance(0.5)), 9)], attributes=branches, outer=outer)


@recipe("Loop")
def loop(m: Maker, operator: str) -> Call:
    kind, shape = m.pick(*"fit"), m.shape(2)
    join = "StringConcat" if kind == "t" else m.pick("Add", "Max")
    follows = m.pick(join, "Identity")
    body = inner(
        "body",
        [
            helper.make_node("Identity", ["going"], ["goes"]),
            helper.make_node(follows, ["state", "other"] if follows == join else [m.pick("state", "other")], ["next"]),
            helper.make_node("Identity", [m.pick("state", "other")], ["part"]),
        ],
        [("number", TensorProto.INT64, []), ("going", TensorProto.BOOL, []), ("state", KINDS[kind][0], None)],
        ["goes", "next", "part"],
    )
    trips = m.ints(m.pick(0, 1, 3))
    outer = {"other": m.tensor(kind, m.near(shape))}
    return Call(operator, [trips, None, m.tensor(kind, shape)], 2, attributes={"body": body}, outer=outer, since=20)


@recipe("Scan")
def scan(m: Maker, operator: str) -> Call:
    kind, shape = m.pick("f", "i"), m.shape(2)
    body = inner(
        "body",
        [
            helper.make_node("Add", ["state", "slice"], ["next"]),
            helper.make_node(m.pick("Identity", "Shape", "NonZero"), ["slice"], ["part"]),
        ],
        [("state", KINDS[kind][0], None), ("slice", KINDS[kind][0], None)],
        ["next", "part"],
    )
    axis = m.rng.randint(0, len(shape))
    whole = [*shape[:axis], m.size(), *shape[axis:]]
    attributes = {"body": body, "num_scan_inputs": 1, "scan_input_axes": [axis], "scan_output_axes": [m.pick(0, -1)]}
    return Call(operator, [m.tensor(kind, m.near(shape)), m.tensor(kind, whole)], 2, attributes=attributes)
