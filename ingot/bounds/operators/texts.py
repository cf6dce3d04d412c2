"""How long the texts of string tensors may be: of those that a client sends, and of those in the graph.

An operator that is not named here makes texts of unknown length, so its graph is not bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ingot.bounds.abstract import STRING, Tensor, Text, UnboundedError
from ingot.bounds.operators.op import Op
from ingot.bounds.poly import ONE, ZERO

_UNKNOWN = "the length of its texts is not known"
# Numbers as text: a sign, 17 digits, a point and an exponent.
_LONGEST_NUMBER = 32
# StringNormalizer: changing case can turn a 2-byte letter into 3 bytes (U+023A); twice the bytes is enough.
_CASES = 2
_DEFAULT_LABEL = "_Unused"


def with_texts(op: Op, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a node with bounds of their texts, where they have any.

    Raises:
        UnboundedError: these are unknown, or a client controls how often its texts are repeated.
    """
    if all(tensor.kind != STRING or tensor.text is not None for tensor in outputs):
        return list(outputs)
    rule = _RULES.get(op.node.operator)
    if rule is None:
        raise UnboundedError(_UNKNOWN)
    return [tensor if tensor.kind != STRING else replace(tensor, text=rule(op, tensor)) for tensor in outputs]


def _text(tensor: Tensor) -> Text:
    if tensor.text is None:
        raise UnboundedError(_UNKNOWN)
    return tensor.text


def _repeated(tensor: Tensor, times: int | None) -> Text:
    """Bound the texts of a tensor whose elements are each used ``times`` times; None if sizes decide it."""
    text = _text(tensor)
    if text.sent == ZERO:
        return text
    if times is None:
        raise UnboundedError("it repeats texts that a client sends; the number comes from sizes or values")
    return Text(text.sent.scaled(times), text.width)


def _times(tensor: Tensor, out: Tensor, others: Sequence[Tensor]) -> int | None:
    """Return how often each element of a tensor is used where it is broadcast against others to ``out``."""
    exact = tensor.dims is not None and all(dim.exact is not None for dim in tensor.dims)
    if (exact and tensor.dims == out.dims) or all(other.count == ONE for other in others):
        return 1
    return _constant(out)


def _constant(out: Tensor) -> int | None:
    count = out.count.constant
    return None if count is None else int(count)


def _sum(texts: Sequence[Text]) -> Text:
    """Return the bounds of elements that each come from one of several tensors."""
    return Text(sum((text.sent for text in texts), ZERO), max(text.width for text in texts))


def _moved(op: Op, out: Tensor) -> Text:
    return _text(op[0])


def _joined(op: Op, out: Tensor) -> Text:
    return _sum([_text(tensor) for tensor in op.given if tensor.kind == STRING])


def _broadcast(op: Op, out: Tensor) -> Sequence[Text]:
    every = op.given
    return [
        _repeated(tensor, _times(tensor, out, [other for other in every if other is not tensor]))
        for tensor in every
        if tensor.kind == STRING
    ]


def _chosen(op: Op, out: Tensor) -> Text:
    return _sum(_broadcast(op, out))


def _concatenated(op: Op, out: Tensor) -> Text:
    texts = _broadcast(op, out)
    return Text(sum((text.sent for text in texts), ZERO), sum(text.width for text in texts))


def _gathered(op: Op, out: Tensor) -> Text:
    """Gather and similar operators: each index names every element of the data at most once."""
    return _repeated(op[0], op[1].length if _constant(out) is None else _constant(out))


def _spread(index: int) -> Callable[[Op, Tensor], Text]:
    return lambda op, out: _repeated(op[index], _constant(out))


def _cast(op: Op, out: Tensor) -> Text:
    return _text(op[0]) if op[0].kind == STRING else Text(ZERO, _LONGEST_NUMBER)


def _normalized(op: Op, out: Tensor) -> Text:
    text = _text(op[0])
    return Text(text.sent.scaled(_CASES), text.width * _CASES)


def _labels(op: Op, out: Tensor) -> Text:
    """Return the longest of all texts among the attributes."""
    width = len(_DEFAULT_LABEL)
    for attribute in op.node.attributes.values():
        tensor = attribute.tensor
        longest = attribute.longest if tensor is None or tensor.kind != STRING else tensor.longest
        if longest is None:
            raise UnboundedError(_UNKNOWN)
        width = max(width, longest)
    return Text(ZERO, width)


_RULES: dict[str, Callable[[Op, Tensor], Text]] = {
    **dict.fromkeys(
        [
            "Compress",
            "Flatten",
            "Identity",
            "Reshape",
            "ReverseSequence",
            "Slice",
            "Split",
            "Squeeze",
            "Transpose",
            "Unique",
            "Unsqueeze",
        ],
        _moved,
    ),
    **dict.fromkeys(["Concat", "Scatter", "ScatterElements", "ScatterND"], _joined),
    **dict.fromkeys(["Gather", "ArrayFeatureExtractor"], _gathered),
    **dict.fromkeys(["Expand", "GatherElements", "GatherND", "Tile"], _spread(0)),
    **dict.fromkeys(["Cast", "CastLike"], _cast),
    **dict.fromkeys(
        ["Constant", "LabelEncoder", "LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"],
        _labels,
    ),
    "OneHot": _spread(2),
    "StringConcat": _concatenated,
    "StringNormalizer": _normalized,
    "Where": _chosen,
}
