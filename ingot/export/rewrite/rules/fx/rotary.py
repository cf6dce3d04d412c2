"""Rotary position embedding, as Hugging Face models write it, becomes ``ingot::rotary``.

Its ONNX form is the kernel of ONNX Runtime. Elsewhere, the operator is no more than a name for its formula: PyTorch
takes it apart again when it decomposes a program.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, arguments, aten, insert, same_sizes, source, tensor
from ingot.export.rewrite.passes.fx_pattern import ANY, Dim, Either, Match, Number, Op, PatternPass, Var

torch.library.define("ingot::rotary", "(Tensor x, Tensor cos, Tensor sin) -> Tensor")


@torch.library.impl("ingot::rotary", "CompositeImplicitAutograd")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of values, the first and the second half of the last dimension, by the angles of their positions.

    Args:
        x: ``[batch, heads, sequence, size]``, of an even size.
        cos: ``[batch, sequence, size / 2]``, or 1 for batch.
        sin: the same.
    """
    half = x.shape[-1] // 2
    cos, sin = (torch.cat((item, item), -1).unsqueeze(1) for item in (cos, sin))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


ROTARY = torch.ops.ingot.rotary.default
X = Var("x")
FIRST = Either(
    Op(aten.slice.Tensor, X, Dim(-1), 0, Number("half")),
    Op(operator.getitem, Op(aten.chunk.default, X, 2, Dim(-1)), 0),
    Op(operator.getitem, Op(aten.split.Tensor, X, Number("half"), Dim(-1)), 0),
)
SECOND = Either(
    Op(aten.slice.Tensor, X, Dim(-1), Number("start"), ANY),
    Op(operator.getitem, Op(aten.chunk.default, X, 2, Dim(-1)), 1),
    Op(operator.getitem, Op(aten.split.Tensor, X, Number("half"), Dim(-1)), 1),
)
TURNED = Op(aten.cat.default, [Op(aten.neg.default, SECOND), FIRST], Dim(-1))
HALF = ("half", "start")
# Operators that treat the first and the second half of the last dimension alike.
EVEN = {
    aten.cos.default,
    aten.sin.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
}


class Rotary(PatternPass):
    """Replaces ``x * cos + rotate_half(x) * sin`` where both halves of cos and of sin are the same.

    ``x`` is ``[batch, heads, sequence, size]``; cos and sin are ``[batch, sequence, size]``, or 1 for batch. That their
    halves are the same shows in how they are made: ``cat((angles, angles), -1).cos()``.
    """

    name = "rotary"
    default = False  # the kernel is no operator of ONNX: the file would run in ONNX Runtime only
    pattern = Op(aten.add.Tensor, Op(aten.mul.Tensor, X, Var("cos")), Op(aten.mul.Tensor, TURNED, Var("sin")))

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        x = tensor(match["x"])
        if x is None or x.dim() != 4 or x.dtype not in (torch.float32, torch.float16):
            return None
        size = x.shape[-1]
        if not isinstance(size, int) or size % 2 or any(match.values.get(key, size // 2) != size // 2 for key in HALF):
            return None
        halves = []
        for node in (match["cos"], match["sin"]):
            # Queries and keys of all layers share it, so it is no part of the match.
            if node.target is not aten.unsqueeze.default or node.args[1] != 1:
                return None
            angles = node.args[0]
            value = tensor(angles)
            if value is None or value.dtype is not x.dtype or not _has_even_halves(angles, memory):
                return None
            if not any(same_sizes(value.shape, (batch, x.shape[2], size)) for batch in (1, x.shape[0])):
                return None
            halves.append((angles, value[..., : size // 2]))
        half = [insert(root, aten.slice.Tensor, node, 2, 0, size // 2, val=value) for node, value in halves]
        return insert(root, ROTARY, match["x"], *half)


def _has_even_halves(node: fx.Node, memory: Memory) -> bool:
    """Tell whether the first and the second half of a node's last dimension are the same."""
    while node.target is not aten.cat.default:
        constant = memory.constant(node)
        if constant is not None:
            first, second = constant.tensor_split(2, -1)
            return torch.equal(first, second)
        tensors = [source(other) for other in node.all_input_nodes]
        if node.target not in EVEN or len(tensors) != 1:
            return False
        node = tensors[0]
    named, result = arguments(node), tensor(node)
    parts = [source(part) for part in named["tensors"]]
    last = result is not None and named["dim"] % result.dim() == result.dim() - 1
    return last and len(parts) == 2 and parts[0] is parts[1]
