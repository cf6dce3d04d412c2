"""Operators that make tensors from sizes, and those of signals and text."""

from __future__ import annotations

from ingot.bounds.abstract import FLOAT, STRING, Tensor, UnboundedError
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, refuse_empty
from ingot.bounds.poly import ONE, ZERO

_MOST_SKIPS = 1 << 12  # with each, an engine visits all elements again


def constant(op: Op) -> list[Tensor]:
    for name, attribute in op.node.attributes.items():
        if name in ("value", "sparse_value"):
            value = attribute.tensor
            return [Tensor(0, None, ONE) if value is None else Tensor.constant(value)]
        if name in ("value_int", "value_ints"):
            numbers = [attribute.integer] if name == "value_int" else attribute.integers
            dims = [] if name == "value_int" else [Interval.exactly(len(numbers))]
            return [Tensor.of(7, dims, items=[Interval.exactly(number) for number in numbers])]
        if name in ("value_float", "value_floats"):
            count = 1 if name == "value_float" else len(attribute.numbers)
            return [Tensor.of(FLOAT, [] if name == "value_float" else [Interval.exactly(count)])]
        if name in ("value_string", "value_strings"):
            return [Tensor.of(STRING, [] if name == "value_string" else [Interval.exactly(attribute.strings)])]
    raise UnboundedError("it has no value")


def random(op: Op) -> list[Tensor]:
    return [Tensor.of(op.integer("dtype", FLOAT), [Interval.exactly(dim) for dim in op.integers("shape")])]


def like(op: Op) -> list[Tensor]:
    """The shape is the input's, and the element type an attribute."""
    return [Tensor(op.integer("dtype", op[0].kind), op[0].dims, op[0].count)]


def multinomial(op: Op) -> list[Tensor]:
    dims = (op[0].shape()[0], Interval.exactly(op.integer("sample_size", 1)))
    return [Tensor.of(op.integer("dtype", 6), dims)]


def window(op: Op) -> list[Tensor]:
    return [Tensor.of(op.integer("output_datatype", FLOAT), [_from_value(op, 0)])]


def affine_grid(op: Op) -> list[Tensor]:
    sizes = op[1].listed()
    if sizes is None or any(size.high is None for size in sizes):
        raise UnboundedError("its output's shape comes from values")
    dims = (sizes[0], *sizes[2:], Interval.exactly(len(sizes) - 2))
    return [Tensor.of(op[0].kind, dims)]


def col2im(op: Op) -> list[Tensor]:
    image, block = op[1].listed(), op[2].listed()
    if image is None or block is None:
        raise UnboundedError("its output's shape comes from values")
    channels = Interval.up_to(op[0].shape()[1].high or ZERO)
    return [Tensor.of(op[0].kind, (op[0].shape()[0], channels, *image))]


def center_crop_pad(op: Op) -> list[Tensor]:
    wanted = op[1].listed()
    dims = list(op[0].shape())
    if wanted is None:
        raise UnboundedError("its output's shape comes from values")
    axes = op.integers("axes", range(len(dims)))
    for axis, size in zip(axes, wanted, strict=False):
        dims[axis] = size
    return [Tensor.of(op[0].kind, dims)]


def dft(op: Op) -> list[Tensor]:
    dims = list(op[0].shape())
    if op.opset >= 20 and op.get(2) is not None and op[2].scalar.constant is None:
        raise UnboundedError("its axis comes from values")
    axis = int(op[2].scalar.constant or 0) if op.get(2) is not None else op.integer("axis", -2 if op.opset >= 20 else 1)
    if op.get(1) is not None:
        dims[axis] = _from_value(op, 1)
    elif op.integer("inverse") and op.integer("onesided"):
        dims[axis] = dims[axis] * Interval.exactly(2)
    dims[-1] = Interval.exactly(2)
    out = Tensor.of(op[0].kind, [Interval.up_to(dim.high or ZERO) for dim in dims])
    op.workspace = out.nbytes.scaled(6)  # Bluestein's method pads to the next power of two
    return [out]


def stft(op: Op) -> list[Tensor]:
    batch, length = op[0].shape()[:2]
    step = op[1].scalar
    if step.low is None or not step.low.covers(ONE):
        raise UnboundedError("its step comes from values")
    frame = _from_value(op, 3) if op.get(3) is not None else op[2].shape()[0]
    refuse_empty([frame, *(op[2].shape() if op.get(2) is not None else ())])
    frames = Interval.up_to((length.divided(step, rounded=False).high or length.high or ZERO) + ONE)
    out = Tensor.of(op[0].kind, (batch, frames, Interval.up_to(frame.high or ZERO), Interval.exactly(2)))
    op.workspace = out.nbytes.scaled(4)
    return [out]


def mel_weights(op: Op) -> list[Tensor]:
    bins = _from_value(op, 1).divided(Interval.exactly(2), rounded=False) + Interval.exactly(1)
    return [Tensor.of(op.integer("output_datatype", FLOAT), (bins, _from_value(op, 0)))]


def term_counts(op: Op) -> list[Tensor]:
    if not 0 <= op.integer("max_skip_count") <= _MOST_SKIPS:
        raise UnboundedError("it skips too many elements")
    width = max(op.integers("ngram_indexes"), default=0) + 1
    return [Tensor.of(FLOAT, (*op[0].shape()[:-1], Interval.exactly(width)))]


def texts(op: Op) -> list[Tensor]:
    """StringNormalizer: words may be left out, never added."""
    return [Tensor.of(STRING, [Interval.up_to(dim.high or ZERO).joined(Interval.exactly(1)) for dim in op[0].shape()])]


def _from_value(op: Op, index: int) -> Interval:
    value = op[index].scalar
    if value.high is None:
        raise UnboundedError("its output's shape comes from values")
    return value if value.non_negative else Interval.up_to(value.high)
