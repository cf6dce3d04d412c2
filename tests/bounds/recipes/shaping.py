"""Operators that change shapes, or select elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper

from tests.bounds.generated import Call, Maker, Value
from tests.bounds.recipes.recipe import SCALES, recipe


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
