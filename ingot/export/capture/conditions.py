"""Conditions on sizes as formulas: proof that one holds at all declared sizes, and its simplified text."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import sympy

from ingot.tensors import Range

# The most residue classes of sizes that a condition is proved for, one by one.
_MOST_CLASSES = 256

_Values = Mapping[str, sympy.Expr]


class _Unknown(Exception):
    """A condition has a part that is not arithmetic on sizes."""


def always(code: str, ranges: Mapping[str, Range]) -> bool:
    """Return whether a condition is proved to hold at all declared sizes; False may also mean undecided.

    Args:
        code: a Python expression, with sizes as calls such as ``_size('batch')``.
        ranges: the declared sizes.
    """
    try:
        tree = ast.parse(code, mode="eval").body
        return all(_holds(tree, values) for values in _classes(tree, ranges))
    except (_Unknown, SyntaxError):
        return False


def plain(code: str, text: str) -> str:
    """Return a polynomial comparison with common factors and terms cancelled, and ``text`` for other conditions."""
    try:
        tree = ast.parse(code, mode="eval").body
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
            return text
        symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in _names(tree)}
        difference = _value(tree.left, symbols) - _value(tree.comparators[0], symbols)
    except (_Unknown, SyntaxError):
        return text
    shared = sympy.Mul.make_args(sympy.factor(difference))
    factors = [sympy.sign(factor) if factor.is_number else factor for factor in shared if not factor.is_positive]
    reduced = sympy.expand(sympy.Mul(*factors))
    sign = _SIGNS.get(type(tree.ops[0]))
    if sign is None or not symbols or not reduced.is_polynomial(*symbols.values()) or reduced.is_number:
        return text
    terms = reduced.as_ordered_terms()
    left = sympy.Add(*(term for term in terms if not _is_negative(term)))
    right = sympy.Add(*(-term for term in terms if _is_negative(term)))
    return f"{left} {sign} {right}"


_SIGNS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def _is_negative(term: sympy.Expr) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


def _classes(tree: ast.expr, ranges: Mapping[str, Range]) -> Iterator[_Values]:
    """Yield the sizes by residue class modulo all divisors, each as a smallest size plus a multiple of the period."""
    divisors = math.prod(_divisors(tree))
    dims = {name: ranges.get(name, Range()) for name in _names(tree)}
    periods = {name: math.lcm(bounds.step, divisors) for name, bounds in dims.items()}
    if math.prod(periods[name] // bounds.step for name, bounds in dims.items()) > _MOST_CLASSES:
        raise _Unknown
    choices = []
    for name, bounds in dims.items():
        more = sympy.Symbol(name, integer=True, nonnegative=True)
        firsts = range(bounds.low, bounds.low + periods[name], bounds.step)
        choices.append([first + periods[name] * more for first in firsts])
    for values in itertools.product(*choices):
        yield dict(zip(dims, values, strict=True))


def _divisors(tree: ast.expr) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Div):
            if (
                not isinstance(node.right, ast.Constant)
                or not isinstance(node.right.value, int)
                or node.right.value < 1
            ):
                raise _Unknown
            yield node.right.value


def _names(tree: ast.expr) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted({name for call in calls if not (name := _size(call)).isdecimal()})


def _size(call: ast.Call) -> str:
    match call:
        case ast.Call(ast.Name("_size"), [ast.Constant(str(name))]):
            return name
    raise _Unknown


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
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: sympy.floor(sympy.expand(left / right)),
    ast.Mod: lambda left, right: left - right * sympy.floor(sympy.expand(left / right)),
}


def _value(tree: ast.expr, values: _Values) -> sympy.Expr:
    match tree:
        case ast.Constant(int(number)):
            return sympy.Integer(number)
        case ast.Call():
            name = _size(tree)
            return sympy.Integer(name) if name.isdecimal() else values[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, values)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left, values), _value(right, values))
            return sympy.expand(value)
    raise _Unknown
