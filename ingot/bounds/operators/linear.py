"""Products of matrices, convolutions, pooling, recurrent networks and attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

from ingot.bounds.abstract import BOOL, FLOAT, INT64, UINT8, Dims, Tensor, UnboundedError, broadcast, stretched
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, Rule, refuse_empty, sizes
from ingot.bounds.poly import ZERO, Poly, product

# ONNX Runtime visits all elements of a window, also those of its padding.
_LARGEST_WINDOW = 1 << 24
# The windows of a convolution that it copies at a time, in bytes on one thread. It copies all of them if they are fewer
# than the filters, so that they take no more than the filters do.
_SEGMENT = 1 << 16


def matmul(op: Op) -> list[Tensor]:
    return [_matmul(op[0], op[1], op[0].kind)]


def matmul_to(kind: int | None, right: int = 1) -> Rule:
    """Return a rule for a product of inputs 0 and ``right`` with an element type, by default that of the last input."""

    def rule(op: Op) -> list[Tensor]:
        # Kernels for 8 bits may copy the left matrix.
        op.workspace = op[0].nbytes
        return [_matmul(op[0], op[right], op.given[-1].kind if kind is None else kind)]

    return rule


def scaled_matmul(scales: int) -> Rule:
    """Return a rule for products of 8 bits with scales of the right matrix, the input of index ``scales``.

    ONNX Runtime multiplies the product by scales of any width, and writes as many results.
    """

    def rule(op: Op) -> list[Tensor]:
        widths = op[scales].shape()[-1:]
        refuse_empty(op[scales].shape())
        columns = op[1].shape()[-1:]
        if any(width.constant != 1 for width in widths) and (widths != columns or columns[0].exact is None):
            raise UnboundedError("it may have more scales than columns, which overwrites memory")
        return matmul_to(FLOAT)(op)

    return rule


def _matmul(left: Tensor, right: Tensor, kind: int) -> Tensor:
    one, two = left.shape(), right.shape()
    if not one or not two:
        raise UnboundedError("an input is a scalar")
    outer = [Tensor.of(kind, dims[:-2]) for dims in (one, two) if len(dims) > 2]
    dims = list(broadcast(outer)[0] or ()) if outer else []
    dims += [one[-2]] if len(one) > 1 else []
    dims += [two[-1]] if len(two) > 1 else []
    return Tensor.of(kind, dims)


def gemm(op: Op) -> list[Tensor]:
    left, right = op[0].shape(), op[1].shape()
    rows = left[1 if op.integer("transA") else 0]
    columns = right[0 if op.integer("transB") else 1]
    return [Tensor.of(op[0].kind if op[0].kind not in (2, 3) else FLOAT, (rows, columns))]


def fused_matmul(op: Op) -> list[Tensor]:
    one, two = (list(tensor.shape()) for tensor in (op[0], op[1]))
    if op.integer("transBatchA") or op.integer("transBatchB"):
        raise UnboundedError("this form of the operator is not analysed")
    for dims, name in ((one, "transA"), (two, "transB")):
        if op.integer(name) and len(dims) > 1:
            dims[-2:] = dims[:-3:-1]
    return [_matmul(Tensor.of(op[0].kind, one), Tensor.of(op[1].kind, two), op[0].kind)]


def matmul_nbits(op: Op) -> list[Tensor]:
    """The weight is packed: its sizes are attributes; its rows are unpacked for large batches."""
    width = op.integer("N")
    op.workspace = Poly.of(4 * width * op.integer("K"))
    return [Tensor.of(op[0].kind, (*op[0].shape()[:-1], Interval.exactly(width)))]


def einsum(op: Op) -> list[Tensor]:
    left, arrow, right = op.text("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or len(terms) != len(op.given):
        raise UnboundedError("its equation has an ellipsis or no output")
    known: dict[str, Interval] = {}
    for term, tensor in zip(terms, op.given, strict=True):
        if len(term) != len(tensor.shape()):
            raise UnboundedError("its equation does not fit its inputs")
        for letter, dim in zip(term, tensor.shape(), strict=True):
            known[letter] = stretched(known.get(letter, dim), dim)
    if not set(right) <= set(known):
        raise UnboundedError("its equation does not fit its inputs")
    # Pairs of inputs are multiplied in turn, with all their letters.
    op.workspace = product(dim.high or ZERO for dim in known.values()).scaled(8) if len(terms) > 2 else ZERO
    return [Tensor.of(op[0].kind, [known[letter] for letter in right])]


def conv(kind: int | None = None, *, filters: int = 1, like: int = 0) -> Rule:
    """Return a rule for convolutions: ``filters`` is the index of their input.

    Results are of the element type ``kind``, by default that of the input ``like``.
    """

    def rule(op: Op) -> list[Tensor]:
        source, weight = op[0].shape(), op[filters].shape()
        places = _windows(op, source[2:], op.integers("kernel_shape") or _fixed(weight[2:]))
        out = Tensor.of(op[like].kind if kind is None else kind, (source[0], weight[0], *places))
        # Kernels other than the direct ones copy the windows of one image.
        op.workspace = product(sizes((*weight[1:], *places))).scaled(4)
        segment = Poly.of(_SEGMENT)
        segmented = op[0].kind == FLOAT and len(places) <= 3 and segment.covers(product(sizes(weight)).scaled(4))
        if segmented and not segment.covers(op.workspace):
            op.workspace = segment
        return [out]

    return rule


def deformed_conv(op: Op) -> list[Tensor]:
    """The third input, the offsets, has the spatial sizes of the output."""
    places = op[2].shape()[2:]
    op.workspace = product(sizes((*op[1].shape()[1:], *places))).scaled(4)
    return [Tensor.of(op[0].kind, (op[0].shape()[0], op[1].shape()[0], *places))]


def conv_transpose(op: Op) -> list[Tensor]:
    source, weight = op[0].shape(), op[1].shape()
    spatial = source[2:]
    kernel = op.integers("kernel_shape") or _fixed(weight[2:])
    rank = len(spatial)
    strides, dilations = op.integers("strides", [1] * rank), op.integers("dilations", [1] * rank)
    extra, pads = op.integers("output_padding", [0] * rank), op.integers("pads", [0] * 2 * rank)
    if op.text("auto_pad", "NOTSET") != "NOTSET":
        pads = [0] * 2 * rank
    wanted = op.integers("output_shape")
    places = [
        Interval.exactly(wanted[axis - rank])
        if wanted
        else (dim - Interval.exactly(1)) * Interval.exactly(strides[axis])
        + Interval.exactly(extra[axis] + (kernel[axis] - 1) * dilations[axis] + 1 - pads[axis] - pads[axis + rank])
        for axis, dim in enumerate(spatial)
    ]
    if op.text("auto_pad", "NOTSET").startswith("SAME") and not wanted:  # at least the size times the stride
        places = [
            Interval.up_to((dim * Interval.exactly(strides[axis])).joined(places[axis]).high or ZERO)
            for axis, dim in enumerate(spatial)
        ]
    groups = Interval.exactly(op.integer("group", 1))
    op.workspace = product(sizes((*weight[1:], *spatial))).scaled(4)
    return [Tensor.of(op[0].kind, (source[0], weight[1] * groups, *places))]


def _fixed(dims: Sequence[Interval]) -> list[int]:
    found = [dim.constant for dim in dims]
    if None in found:
        raise UnboundedError("the size of its kernel comes from values")
    return [int(value or 0) for value in found]


def _windows(op: Op, spatial: Dims, kernel: Sequence[int]) -> list[Interval]:
    """Return the number of positions of a window along each spatial dimension."""
    rank = len(spatial)
    strides, dilations = op.integers("strides", [1] * rank), op.integers("dilations", [1] * rank)
    pads = op.integers("pads", [0] * 2 * rank)
    automatic = op.text("auto_pad", "NOTSET")
    if min(len(kernel), len(strides), len(dilations)) < rank or len(pads) < 2 * rank or 0 in strides:
        raise UnboundedError("its attributes do not fit its input")
    if prod(kernel) > _LARGEST_WINDOW:
        raise UnboundedError("its window is too large")
    found = []
    for axis, dim in enumerate(spatial):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        padding = 0 if automatic == "VALID" else pads[axis] + pads[axis + rank]
        same = automatic.startswith("SAME")
        room = dim - Interval.exactly(1) if same else dim + Interval.exactly(padding - reach)
        rounds_up = bool(op.integer("ceil_mode")) and not same and strides[axis] > 1
        if strides[axis] > 1:
            up = strides[axis] - 1 if rounds_up else 0
            room = (room + Interval.exactly(up)).divided(Interval.exactly(strides[axis]), rounded=True)
        place = room + Interval.exactly(1)
        # Kernels for pooling ignore dilations where they pad, and drop a last window that is all padding.
        sure = place.non_negative and dim.positive and not (same and dilations[axis] > 1) and not rounds_up
        found.append(place if sure else Interval.up_to(place.high or ZERO))
    return found


def pool(op: Op) -> list[Tensor]:
    source = op[0].shape()
    dims = (*source[:2], *_windows(op, source[2:], op.integers("kernel_shape")))
    return [Tensor.of(op[0].kind, dims), Tensor.of(INT64, dims)][: op.outputs]


def global_pool(op: Op) -> list[Tensor]:
    source = op[0].shape()
    return [Tensor.of(op[0].kind, (*source[:2], *(Interval.exactly(1) for _ in source[2:])))]


def recurrent(states: int) -> Rule:
    """Return a rule for RNN and GRU (one state) and LSTM (two)."""

    def rule(op: Op) -> list[Tensor]:
        first, second, _ = op[0].shape()
        refuse_empty(op[0].shape())
        steps, batch = (second, first) if op.integer("layout") else (first, second)
        ways = Interval.exactly(2 if op.text("direction", "forward") == "bidirectional" else 1)
        width = Interval.exactly(op.integer("hidden_size"))
        if op.integer("layout"):
            shapes: list[tuple[Interval, ...]] = [(batch, steps, ways, width), *[(batch, ways, width)] * states]
        else:
            shapes = [(steps, ways, batch, width), *[(ways, batch, width)] * states]
        outputs = [Tensor.of(op[0].kind, dims) for dims in shapes]
        op.workspace = outputs[0].nbytes.scaled(8)  # the gates of all steps, computed at once
        return outputs[: op.outputs]

    return rule


def attention(op: Op) -> list[Tensor]:
    """ai.onnx.Attention: inputs of rank 4 are [batch, heads, sequence, width], of rank 3 have all heads in the last."""
    query, keys, values = (op[index].shape() for index in range(3))
    if len(query) == 4:
        heads, length = query[1], query[2]
        out: Dims = (*query[:3], values[3])
        past, key_heads = keys[2], keys[1]
    else:
        heads, length = Interval.exactly(op.integer("q_num_heads", 1)), query[1]
        key_heads = Interval.exactly(op.integer("kv_num_heads", 1))
        width = values[2].divided(key_heads, rounded=True)
        past, out = keys[1], (query[0], query[1], heads * width)
    if op.get(4) is not None:
        past = past + op[4].shape()[2]
    scores = Tensor.of(op[0].kind, (query[0], heads, length, past))
    op.workspace = scores.nbytes.scaled(3)
    outputs = [Tensor.of(op[0].kind, out)]
    if op.outputs > 1:
        for dims, wide in ((keys, op.get(4)), (values, op.get(5))):
            last = dims[3] if len(dims) == 4 else dims[2].divided(key_heads, rounded=True)
            outputs.append(Tensor.of(op[0].kind, (dims[0], key_heads, past, last if wide is None else wide.shape()[3])))
        outputs.append(scores)
    return outputs[: op.outputs]


def multi_head_attention(op: Op) -> list[Tensor]:
    """com.microsoft.MultiHeadAttention without a past: query [batch, sequence, width]."""
    query = op[0].shape()
    with_past = op.get(6) is not None or op.get(7) is not None
    if len(query) != 3 or op.get(1) is None or op.get(2) is None or op.outputs > 1 or with_past:
        raise UnboundedError("this form of the operator is not analysed")
    for index in range(3):
        refuse_empty(op[index].shape())
    heads = Interval.exactly(op.integer("num_heads", 1))
    keys, values = op[1].shape(), op[2].shape()
    length = keys[2] if len(keys) == 4 else keys[1]
    op.workspace = Tensor.of(op[0].kind, (query[0], heads, query[1], length)).nbytes.scaled(3)
    width = values[3] * heads if len(values) == 4 else values[2]
    return [Tensor.of(op[0].kind, (*query[:2], width))]


def grid_sample(op: Op) -> list[Tensor]:
    return [Tensor.of(op[0].kind, (*op[0].shape()[:2], *op[1].shape()[1:-1]))]


def roi_align(op: Op) -> list[Tensor]:
    if op.integer("sampling_ratio") <= 0:
        raise UnboundedError(
            "with sampling_ratio 0, the number of samples comes from the values of the regions; export it with a "
            "sampling_ratio above 0"
        )
    height, width = op.integer("output_height", 1), op.integer("output_width", 1)
    dims = (op[1].shape()[0], op[0].shape()[1], Interval.exactly(height), Interval.exactly(width))
    op.workspace = Poly.of(height * width * op.integer("sampling_ratio") ** 2 * 32)
    return [Tensor.of(op[0].kind, dims)]


def non_max_suppression(op: Op) -> list[Tensor]:
    batch, boxes, _ = op[0].shape()
    classes = op[1].shape()[1]
    most = boxes.high or ZERO
    if op.get(2) is not None and (named := op[2].scalar.high) is not None and most.covers(named):
        most = named
    rows = Interval.up_to(product([*sizes((batch, classes)), most]))
    places = reduce(Poly.upper, sizes((batch, classes, boxes)))
    return [Tensor.of(INT64, (rows, Interval.exactly(3)), each=Interval.up_to(places))]


def dynamic_quantize(op: Op) -> list[Tensor]:
    scalar = Tensor.of(FLOAT, [])
    return [Tensor(UINT8, op[0].dims, op[0].count), scalar, Tensor.of(UINT8, [])]


def quantize(op: Op) -> list[Tensor]:
    kind = op[2].kind if op.get(2) is not None else op.integer("output_dtype", UINT8)
    return [Tensor(kind, op[0].dims, op[0].count)]


def dequantize(op: Op) -> list[Tensor]:
    return [Tensor(op[1].kind, op[0].dims, op[0].count)]


def norm(op: Op) -> list[Tensor]:
    """Normalizations: the further outputs, means and variances, are no larger than the first."""
    source = op[0]
    return [source.forgotten(), *[Tensor(source.kind, None, source.count)] * (op.outputs - 1)][: op.outputs]


def skip_norm(op: Op) -> list[Tensor]:
    """SkipLayerNormalization and similar operators: the second input, which is added, repeats along the first."""
    refuse_empty(op[1].shape())
    return norm(op)


def batch_norm(op: Op) -> list[Tensor]:
    return [op[0].forgotten(), *[op[index].forgotten() for index in (3, 4, 3, 4)]][: op.outputs]


def dropout(op: Op) -> list[Tensor]:
    trains = op.get(2) is not None and op[2].scalar.constant != 0
    return [op[0].forgotten() if trains else op[0], Tensor(BOOL, op[0].dims, op[0].count)][: op.outputs]


def unpool(op: Op) -> list[Tensor]:
    if op.get(2) is not None:
        wanted = op[2].listed()
        if wanted is None:
            raise UnboundedError("its output's shape comes from values")
        return [Tensor.of(op[0].kind, wanted)]
    source = op[0].shape()
    rank = len(source) - 2
    kernel, strides = op.integers("kernel_shape"), op.integers("strides", [1] * rank)
    pads = op.integers("pads", [0] * 2 * rank)
    dims = [
        (dim - Interval.exactly(1)) * Interval.exactly(strides[axis])
        + Interval.exactly(kernel[axis] - pads[axis] - pads[axis + rank])
        for axis, dim in enumerate(source[2:])
    ]
    return [Tensor.of(op[0].kind, (*source[:2], *dims))]
