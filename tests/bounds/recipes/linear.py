"""Reductions, products, convolutions, windows, recurrent layers and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.bounds.generated import KINDS, Call, Maker, Value
from tests.bounds.recipes.recipe import MS, RECIPES, recipe


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


RECIPES[MS, "FusedConv"] = lambda m, operator: moved(conv(m, operator), MS, activation="Relu")


def moved(call: Call, domain: str, **more: Any) -> Call:
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
