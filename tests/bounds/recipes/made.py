"""Operators that make tensors, and transforms of signals."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from tests.bounds.generated import KINDS, Call, Maker
from tests.bounds.recipes.recipe import recipe


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
