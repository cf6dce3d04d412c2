"""Finding activation functions by what they compute, however they are written.

The graph between two nodes, if it is made of smooth elementwise operators alone, is a function of one number. It is
evaluated in double precision at many points: two such functions that agree at all of them are the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ingot.export.rewrite.passes.fx_graph import arguments, aten, is_identity, source, tensor
from ingot.export.rewrite.passes.fx_pattern import Match, Pattern

_LAST = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_CURVED = {aten.erf.default, aten.tanh.default, aten.sigmoid.default, aten.exp.default}
_SMOOTH = {
    *_LAST,
    *_CURVED,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.reciprocal.default,
}
_POINTS = torch.cat((torch.linspace(-10, 10, 81), torch.tensor([-1000.0, -100, -30, 30, 100, 1000]))).double()
# Constants such as 0.7978845608 are often truncated; the erf and tanh forms of GELU differ by 5e-4.
_TOLERANCE = 1e-6
# The longest form of GELU that is known has 10 nodes.
_LONGEST = 16


class Elementwise(Pattern):
    """A product or quotient that computes one of some functions of a node, bound as ``x``; ``function`` says which.

    Args:
        functions: by name, from a tensor to a tensor of its shape.
    """

    def __init__(self, **functions: Callable[[torch.Tensor], torch.Tensor]):
        self._expected = {name: function(_POINTS) for name, function in functions.items()}

    def find(self, value: Any, user: fx.Node | None, match: Match) -> Iterator[Match]:
        if not isinstance(value, fx.Node) or value.target not in _LAST:
            return
        cone = _cone(value)
        if not any(node.target in _CURVED for node in cone):
            return
        for x in sorted({other for node in cone for other in node.all_input_nodes}, reverse=True):
            values = _evaluate(cone, x)
            if value not in values or not _same_float(value, x):
                continue
            for name, expected in self._expected.items():
                if torch.allclose(values[value], expected, _TOLERANCE, _TOLERANCE):
                    yield match.cover(*values).bind("x", source(x)).bind("function", name)


def _cone(root: fx.Node) -> set[fx.Node]:
    """Return the smooth nodes that a node is computed from, without a gap, the nearest first up to a limit."""
    found, waiting = {root}, [root]
    while waiting and len(found) < _LONGEST:
        for node in waiting.pop(0).all_input_nodes:
            if node not in found and (node.target in _SMOOTH or is_identity(node)):
                found.add(node)
                waiting.append(node)
    return found


def _evaluate(cone: set[fx.Node], x: fx.Node) -> dict[fx.Node, torch.Tensor]:
    """Return the values, where ``x`` has each of the points, of those nodes of a cone that depend on nothing else."""
    values = {x: _POINTS}
    for node in sorted(cone - {x}):
        if not all(other in values for other in node.all_input_nodes):
            continue
        if is_identity(node):
            values[node] = values[node.all_input_nodes[0]]
        else:
            named = {name: values.get(value, value) for name, value in arguments(node).items()}
            values[node] = node.target(**named)  # type: ignore[operator]
    del values[x]
    return values


def _same_float(node: fx.Node, x: fx.Node) -> bool:
    """Return whether a function returns the floating-point type of its argument."""
    result, given = tensor(node), tensor(x)
    return result is not None and given is not None and given.is_floating_point() and result.dtype is given.dtype
