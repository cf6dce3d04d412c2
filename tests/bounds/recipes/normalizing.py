"""Normalizations and quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.bounds.generated import KINDS, Call, Maker, Value
from tests.bounds.recipes.linear import moved, quantized
from tests.bounds.recipes.recipe import MS, RECIPES, recipe


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


RECIPES[MS, "QuantizeLinear"] = lambda m, operator: moved(quantize(m, operator), MS)
RECIPES[MS, "DequantizeLinear"] = lambda m, operator: moved(quantize(m, operator), MS)


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
