"""Conditions on sizes as formulas: proof that one holds at all declared sizes, and its simplified text."""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from ingot.tensors import Range

# The most residue classes of sizes that a condition is proved for, one by one.
_MOST_CLASSES = 256


class _Unknown(Exception):
    """A condition has a part that is not arithmetic on sizes."""


@dataclass(frozen=True)
class _Values:
    """The sizes by name, and the values of the parts of a condition that were computed; None if one is unknown."""

    sizes: Mapping[str, sympy.Expr]
    parts: dict[ast.expr, sympy.Expr | None] = field(default_factory=dict)


def always(code: str, ranges: Mapping[str, Range]) -> bool:
    """Return whether a condition is proved to hold at all declared sizes; False may also mean undecided.

    Args:
        code: a Python expression, with sizes as calls such as ``_size('batch')``.
        ranges: the declared sizes.
    """
    try:
        tree = ast.parse(code, mode="eval").body
    except SyntaxError:
        return False
    # Most conditions hold whatever the remainders of the sizes are; the others are proved for each remainder.
    return any(_proved(tree, ranges, divisor) for divisor in dict.fromkeys((1, math.prod(_divisors(tree)))))


def plain(code: str, text: str) -> str:
    """Return a condition on sizes of 1 or more in its simplest form, or ``text`` if it is not an expression.

    Arithmetic that amounts to a polynomial is replaced by it, and comparisons of polynomials lose common factors and
    terms, so that equivalent conditions have one text.
    """
    try:
        tree = ast.parse(code, mode="eval").body
    except SyntaxError:
        return text
    written = {f"_{number}": name for number, name in enumerate(_names(tree))}
    simplified = _Simplified(written).visit(tree)
    for node in ast.walk(simplified):
        if isinstance(node, ast.Name):
            node.id = written.get(node.id, node.id)
    return ast.unparse(simplified)


class _Simplified(ast.NodeTransformer):
    """Replaces polynomials in a condition by their shortest form. Sizes become names, the keys of ``written``."""

    def __init__(self, written: Mapping[str, str]):
        self._sizes = [sympy.Symbol(name, integer=True, positive=True) for name in written]
        self._more = [sympy.Symbol(f"{name}_more", integer=True, nonnegative=True) for name in written]
        self._values = _Values({name: 1 + more for name, more in zip(written.values(), self._more, strict=True)})

    def visit(self, node: ast.AST) -> ast.AST:
        text = ""
        with contextlib.suppress(_Unknown):
            match node:
                case ast.Compare(left, [op], [right]) if type(op) in _SIGNS:
                    text = self._compared(self._polynomial(left), _SIGNS[type(op)], self._polynomial(right))
                case ast.BinOp() | ast.UnaryOp() | ast.Call():
                    text = str(self._polynomial(node))
        return ast.parse(text, mode="eval").body if text else self.generic_visit(node)

    def _polynomial(self, tree: ast.expr) -> sympy.Expr:
        sizes = {more: size - 1 for more, size in zip(self._more, self._sizes, strict=True)}
        value = _value(tree, self._values)
        if not value.is_polynomial(*self._more):
            raise _Unknown
        return sympy.expand(value.subs(sizes))

    def _compared(self, left: sympy.Expr, sign: str, right: sympy.Expr) -> str:
        shared = sympy.Mul.make_args(sympy.factor(left - right))
        factors = [sympy.sign(factor) if factor.is_number else factor for factor in shared if not factor.is_positive]
        reduced = sympy.expand(sympy.Mul(*factors))
        if reduced.is_number:
            return f"{left} {sign} {right}"
        terms = reduced.as_ordered_terms()
        left = sympy.Add(*(term for term in terms if not _is_negative(term)))
        right = sympy.Add(*(-term for term in terms if _is_negative(term)))
        return f"{left} {sign} {right}"


_SIGNS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def _is_negative(term: sympy.Expr) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


def _proved(tree: ast.expr, ranges: Mapping[str, Range], divisor: int) -> bool:
    try:
        return all(_holds(tree, values) for values in _classes(tree, ranges, divisor))
    except _Unknown:
        return False


def _classes(tree: ast.expr, ranges: Mapping[str, Range], divisor: int) -> Iterator[_Values]:
    """Yield the sizes by residue class modulo ``divisor``, each as a smallest size plus a multiple of the period."""
    dims = {name: ranges.get(name, Range()) for name in _names(tree)}
    periods = {name: math.lcm(bounds.step, divisor) for name, bounds in dims.items()}
    if math.prod(periods[name] // bounds.step for name, bounds in dims.items()) > _MOST_CLASSES:
        raise _Unknown
    choices = []
    for name, bounds in dims.items():
        more = sympy.Symbol(name, integer=True, nonnegative=True)
        firsts = range(bounds.low, bounds.low + periods[name], bounds.step)
        choices.append([first + periods[name] * more for first in firsts])
    for values in itertools.product(*choices):
        yield _Values(dict(zip(dims, values, strict=True)))


def _divisors(tree: ast.expr) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(_, ast.FloorDiv() | ast.Mod() | ast.Div(), ast.Constant(int(number))) if number > 0:
                yield number


def _names(tree: ast.expr) -> list[str]:
    names = {_size(node) for node in ast.walk(tree)}
    return sorted(name for name in names if name and not name.isdecimal())


def _size(node: ast.AST) -> str:
    """Return the size that a node stands for, a name or a number, or an empty text."""
    match node:
        case ast.Call(ast.Name("_size"), [ast.Constant(str(name))]):
            return name
    return ""


def _holds(tree: ast.expr, values: _Values) -> bool:
    if isinstance(tree, ast.BoolOp):
        parts = (_holds(part, values) for part in tree.values)
        return all(parts) if isinstance(tree.op, ast.And) else any(parts)
    if not isinstance(tree, ast.Compare):
        raise _Unknown
    sides = [_value(side, values) for side in (tree.left, *tree.comparators)]
    return all(_compared(op, *pair) for op, pair in zip(tree.ops, itertools.pairwise(sides), strict=True))


def _compared(op: ast.cmpop, left: sympy.Expr, right: sympy.Expr) -> bool:
    more = sympy.expand(left - right)
    match op:
        case ast.Eq():
            return bool(more == 0)
        case ast.NotEq():
            return _above(more, 1) or _above(-more, 1)
        case ast.Lt() | ast.LtE():
            return _above(-more, isinstance(op, ast.Lt))
        case ast.Gt() | ast.GtE():
            return _above(more, isinstance(op, ast.Gt))
    raise _Unknown


def _above(value: sympy.Expr, least: int) -> bool:
    """Return whether a polynomial of nonnegative symbols has a visible lower bound: 0, or above 0 if ``least``."""
    symbols = sorted(value.free_symbols, key=str)
    if not value.is_polynomial(*symbols):
        return False
    coefficients = sympy.Poly(value, *symbols).coeffs() if symbols else [value]
    constant = value.subs(dict.fromkeys(symbols, 0))
    return all(item >= 0 for item in coefficients) and (not least or bool(constant > 0))


_OPERATORS: dict[type[ast.operator], Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: sympy.cancel(left / _positive(right)),
    ast.FloorDiv: lambda left, right: _floored(left, _positive(right)),
    ast.Mod: lambda left, right: left - right * _floored(left, _positive(right)),
}


def _value(tree: ast.expr, values: _Values) -> sympy.Expr:
    if tree not in values.parts:
        values.parts[tree] = None
        with contextlib.suppress(_Unknown):
            values.parts[tree] = _computed(tree, values)
    found = values.parts[tree]
    if found is None:
        raise _Unknown
    return found


def _computed(tree: ast.expr, values: _Values) -> sympy.Expr:
    match tree:
        case ast.Constant(int(number)):
            return sympy.Integer(number)
        case ast.Call(ast.Name("max" | "min" as extreme), [*items]):
            return _extreme([_value(item, values) for item in items], 1 if extreme == "max" else -1)
        case ast.Call() if name := _size(tree):
            return sympy.Integer(name) if name.isdecimal() else values.sizes[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, values)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left, values), _value(right, values))
            return sympy.expand(value)
    raise _Unknown


def _positive(divisor: sympy.Expr) -> sympy.Expr:
    """Return a divisor that is above 0 at all sizes."""
    if not _above(divisor, 1):
        raise _Unknown
    return divisor


def _floored(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """Return the quotient rounded down: ``(rows*columns + rows - 1) // rows`` is ``columns``."""
    if right.is_number:
        return sympy.floor(sympy.expand(left / right))
    quotient, rest = sympy.div(left, right)
    if rest == 0:
        return sympy.floor(sympy.expand(quotient))
    for less in (0, 1):
        whole, over = quotient - less, sympy.expand(rest + less * right)
        if sympy.floor(whole) == whole and _above(over, 0) and _above(right - over, 1):
            return whole
    raise _Unknown


def _extreme(values: Sequence[sympy.Expr], sign: int) -> sympy.Expr:
    """Return the value that is the largest at all sizes, or with a ``sign`` of -1 the smallest."""
    for value in values:
        if all(_above(sign * (value - other), 0) for other in values):
            return value
    raise _Unknown
