"""Operators that compute element by element, or along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.bounds.generated import KINDS, Call, Maker
from tests.bounds.recipes.recipe import MS, RECIPES, recipe


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
