"""Sizes that a graph computes from other sizes: minimum, maximum, and quotients that are rounded down.

Equal computations have the same symbol, and a symbol has limits: a slice ``[:seq]`` of a table of 512 rows has
min(512, seq) rows, at most seq.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import gcd

from ingot.bounds.poly import ONE, ZERO, Monomial, Poly, Size

# Graphs compute few sizes; of what goes beyond this, only limits are known.
_MAX_DEPTH = 4
_MAX_TEXT = 400


def smaller(one: Poly, two: Poly) -> Poly | None:
    """Return the smaller of two sizes; None if they may be negative, or are too complex."""
    return two if one.covers(two) else one if two.covers(one) else _choice("min", one, two)


def larger(one: Poly, two: Poly) -> Poly | None:
    """Return the larger of two sizes; None if they may be negative, or are too complex."""
    return one if one.covers(two) else two if two.covers(one) else _choice("max", one, two)


def quotient(whole: Poly, by: int) -> Poly | None:
    """Return a size divided by a number and rounded down; None if it is too complex."""
    if not whole.integral:
        return None
    leading = max((monomial for monomial in whole.terms if monomial), default=())
    if whole.terms.get(leading, 0) < 0:  # floor(w / by) = -floor((by - 1 - w) / by), whose leading term is positive
        found = quotient(Poly.of(by - 1) - whole, by)
        return None if found is None else -found
    # Multiples are divided exactly, so that floor((h - 1) / 2) + 1 and floor((h + 1) / 2) are one size.
    parts = {monomial: divmod(int(factor), by) for monomial, factor in whole.terms.items()}
    exact = _integers({monomial: number for monomial, (number, _) in parts.items()})
    rest = _integers({monomial: number for monomial, (_, number) in parts.items()})
    if rest.constant is not None:
        return exact
    found = _rounded(rest, by)
    return None if found is None else exact + found


def _integers(terms: Mapping[Monomial, int]) -> Poly:
    return Poly({monomial: Fraction(number) for monomial, number in terms.items() if number})


def _rounded(rest: Poly, by: int) -> Poly | None:
    """Return the quotient of a size that is not constant and has no negative terms."""
    common = gcd(by, *(int(factor) for monomial, factor in rest.terms.items() if monomial))
    rest = (rest - Poly.of(int(rest.terms.get((), 0)) % common)).scaled(Fraction(1, common))
    by //= common
    if by == 1:
        return rest
    added = rest.terms.get((), Fraction(0))
    for inner in rest.sizes:
        if inner.division is not None and rest == Poly.symbol(inner) + Poly.of(added):
            # Layers halve a size again and again: floor((floor(h / 2) + 1) / 2) = floor((h + 2) / 4).
            dividend, divisor = inner.division
            return quotient(dividend + Poly.of(added * divisor), by * divisor)
    shares = [(rest - Poly.of(less)).scaled(Fraction(1, by)) for less in (by - 1, 0)]
    size = Size(
        f"floor({rest}/{by})" if len(rest.terms) == 1 else f"floor(({rest})/{by})",
        least=int(rest.covers(Poly.of(by))),
        lows=(shares[0],),
        highs=(shares[1],),
        value=lambda sizes: rest.at(sizes) // by,
        depth=rest.depth + 1,
        division=(rest, by),
    )
    return _symbol(size)


def _choice(kind: str, one: Poly, two: Poly) -> Poly | None:
    if not (one.integral and two.integral and one.covers(ZERO) and two.covers(ZERO)):
        return None
    one, two = sorted((one, two), key=str)
    choose = min if kind == "min" else max
    size = Size(
        f"{kind}({one}, {two})",
        least=choose(int(poly.covers(ONE)) for poly in (one, two)),
        lows=(one, two) if kind == "max" else (),
        highs=(one, two) if kind == "min" else (one.upper(two),),
        value=lambda sizes: choose(one.at(sizes), two.at(sizes)),
        depth=max(one.depth, two.depth) + 1,
    )
    return _symbol(size)


def _symbol(size: Size) -> Poly | None:
    return Poly.symbol(size) if size.depth <= _MAX_DEPTH and len(size) <= _MAX_TEXT else None
