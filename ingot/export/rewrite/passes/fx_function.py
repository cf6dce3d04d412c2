"""Finding activation functions however they are written, by algebra.

The graph between two nodes, if it is made of sums, products, powers and a few functions alone, is a polynomial in the
first node and in functions of it. Two formulas with the same polynomial are the same function. Quotients are accepted
where they cannot overflow: by a number, and by ``1 + exp(-p)``, which makes a sigmoid; ``exp(p) / (1 + exp(p))`` is NaN
for a large p, and differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import fx

from ingot.export.rewrite.passes.fx_graph import arguments, aten, is_identity, source, tensor
from ingot.export.rewrite.passes.fx_pattern import Match, Pattern

Polynomial = tuple[tuple[tuple[Any, ...], float], ...]
"""Terms and their coefficients. A term is a product of atoms: ``("x",)``, or a function's name and its argument."""

_LAST = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_CURVED = {aten.erf.default, aten.tanh.default, aten.sigmoid.default, aten.exp.default}
_SMOOTH = {
    *_LAST,
    *_CURVED,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.reciprocal.default,
}
# Constants such as 0.79788456 are often truncated, to numbers that are equal in single precision.
_TOLERANCE = 2.0**-23
# Products with numbers beyond these may overflow, where those of the function do not.
_LEAST, _MOST = 1e-3, 1e3
# The longest form of GELU that is known has 10 nodes.
_LONGEST = 16


def _polynomial(terms: dict[tuple[Any, ...], float]) -> Polynomial:
    return tuple(sorted(((term, factor) for term, factor in terms.items() if factor), key=lambda item: repr(item[0])))


def number(value: float) -> Polynomial:
    """Return a constant."""
    return _polynomial({(): float(value)})


def function(name: str, argument: Polynomial) -> Polynomial:
    """Return a function of a polynomial: ``erf``, ``exp`` or ``sigmoid``."""
    return _polynomial({((name, argument),): 1.0})


X: Polynomial = (((("x",),), 1.0),)


def add(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return a sum."""
    terms = dict(left)
    for term, factor in right:
        terms[term] = terms.get(term, 0.0) + factor
    return _polynomial(terms)


def multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return a product."""
    terms: dict[tuple[Any, ...], float] = {}
    for first, factor in left:
        for second, other in right:
            term = tuple(sorted((*first, *second), key=repr))
            terms[term] = terms.get(term, 0.0) + factor * other
    return _polynomial(terms)


def tanh(argument: Polynomial) -> Polynomial:
    """Return a hyperbolic tangent, as ``2 * sigmoid(2 * p) - 1``."""
    return add(multiply(number(2), function("sigmoid", multiply(number(2), argument))), number(-1))


def equal(left: Any, right: Any) -> bool:
    """Return whether two polynomials have the same terms, with coefficients that single precision rounds alike."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=_TOLERANCE)
    return bool(left == right)


def _inverse(divisor: Polynomial) -> Polynomial | None:
    """Return ``1 / divisor`` for numbers and for ``1 + exp(p)``; None for others."""
    match divisor:
        case (((), value),):
            return number(1 / value)
        case (((("exp", argument),), 1.0), ((), 1.0)) | (((), 1.0), ((("exp", argument),), 1.0)):
            return function("sigmoid", multiply(number(-1), argument))
    return None


class Elementwise(Pattern):
    """A product or quotient that computes one of some functions of a node, bound as ``x``; ``function`` says which.

    Args:
        functions: polynomials in :data:`X` by name.
    """

    def __init__(self, **functions: Polynomial):
        self._functions = functions

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
            for name, expected in self._functions.items():
                if equal(values[value], expected):
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


def _evaluate(cone: set[fx.Node], x: fx.Node) -> dict[fx.Node, Polynomial]:
    """Return the polynomials in ``x`` of those nodes of a cone that depend on nothing else."""
    values = {x: X}
    for node in sorted(cone - {x}):
        if not all(other in values for other in node.all_input_nodes):
            continue
        found = values[node.all_input_nodes[0]] if is_identity(node) else _value(node, values)
        if found is not None:
            values[node] = found
    del values[x]
    return values


def _value(node: fx.Node, values: dict[fx.Node, Polynomial]) -> Polynomial | None:
    """Return the polynomial of a call, or None if it has none."""
    named = arguments(node)
    literals = [value for value in named.values() if isinstance(value, int | float) and value]
    if not all(_LEAST <= abs(value) <= _MOST for value in literals) or named.get("rounding_mode"):
        return None
    x, other = (_operand(named.get(name), values) for name in ("self", "other"))
    name, alpha = str(node.target).split(".")[1], named.get("alpha", 1)
    match name:
        case "mul":
            return multiply(x, other)
        case "div":
            inverse = _inverse(other)
            return None if inverse is None else multiply(x, inverse)
        case "add" | "sub":
            return add(x, multiply(number(alpha if name == "add" else -alpha), other))
        case "rsub":
            return add(other, multiply(number(-alpha), x))
        case "neg":
            return multiply(number(-1), x)
        case "square":
            return multiply(x, x)
        case "pow":
            powers = {2: multiply(x, x), 3: multiply(x, multiply(x, x))}
            return powers.get(named["exponent"])
        case "reciprocal":
            return _inverse(x)
        case "tanh":
            return tanh(x)
    return function(name, x)


def _operand(value: Any, values: dict[fx.Node, Polynomial]) -> Polynomial:
    return values[value] if isinstance(value, fx.Node) else number(value or 0)


def _same_float(node: fx.Node, x: fx.Node) -> bool:
    """Return whether a function returns the floating-point type of its argument."""
    result, given = tensor(node), tensor(x)
    return result is not None and given is not None and given.is_floating_point() and result.dtype is given.dtype
