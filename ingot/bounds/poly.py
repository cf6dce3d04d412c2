"""Polynomials of the sizes of a model's inputs.

Every size is at least 1, so a polynomial is known to be non-negative where each negative term is outweighed by positive
terms of which its monomial is a factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

Monomial = tuple[tuple[str, int], ...]
"""Symbols with their exponents, sorted; empty for the constant term."""
Number = int | Fraction

MAX_SIZE = 1 << 28
"""No dimension is assumed to be larger where integers could overflow; the default limit of bodies is far below."""
_MAX_TERMS = 64
_MAX_DEGREE = 16


class TooComplexError(Exception):
    """A polynomial has too many terms, or too high a degree."""


@dataclass(frozen=True, slots=True)
class Poly:
    """A polynomial: its coefficients by monomial, none of them zero."""

    terms: Mapping[Monomial, Fraction]

    @classmethod
    def of(cls, value: Number) -> Poly:
        """Return a constant."""
        return cls({(): Fraction(value)} if value else {})

    @classmethod
    def symbol(cls, name: str) -> Poly:
        """Return the size of a named dimension."""
        return cls({((name, 1),): Fraction(1)})

    @property
    def constant(self) -> Fraction | None:
        """The value if it does not depend on sizes, otherwise None."""
        if not self.terms:
            return Fraction(0)
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def degree(self) -> int:
        return max(map(_degree, self.terms), default=0)

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for monomial, factor in other.terms.items():
            terms[monomial] = terms.get(monomial, Fraction(0)) + factor
        return _checked(terms)

    def __neg__(self) -> Poly:
        return Poly({monomial: -factor for monomial, factor in self.terms.items()})

    def __sub__(self, other: Poly) -> Poly:
        return self + -other

    def __mul__(self, other: Poly) -> Poly:
        terms: dict[Monomial, Fraction] = {}
        for left, factor in self.terms.items():
            for right, by in other.terms.items():
                monomial = _product(left, right)
                terms[monomial] = terms.get(monomial, Fraction(0)) + factor * by
        return _checked(terms)

    def scaled(self, by: Number) -> Poly:
        return Poly({monomial: factor * by for monomial, factor in self.terms.items()} if by else {})

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the value for these sizes, rounded up and at least 0; a size below 1 counts as 1.

        Raises:
            KeyError: a symbol has no size.
        """
        total = Fraction(0)
        for monomial, factor in self.terms.items():
            for name, power in monomial:
                factor *= max(1, sizes[name]) ** power
            total += factor
        return max(0, math.ceil(total))

    def covers(self, other: Poly) -> bool:
        """Return whether this is known to be at least ``other`` for all sizes."""
        difference = (self - other).terms
        spare = {monomial: factor for monomial, factor in difference.items() if factor > 0}
        for monomial, factor in difference.items():
            if factor >= 0:
                continue
            for larger in [found for found in spare if _divides(monomial, found)]:
                used = min(spare[larger], -factor)
                spare[larger] -= used
                factor += used
                if not factor:
                    break
            if factor:
                return False
        return True

    def at_most(self, value: int) -> bool:
        """Return whether this is known to be at most a number for all sizes up to ``MAX_SIZE``."""
        most = sum(by * MAX_SIZE ** _degree(monomial) for monomial, by in self.terms.items() if by > 0)
        return bool(most <= value)

    def at_least(self, value: int) -> bool:
        """Return whether this is known to be at least a number for all sizes up to ``MAX_SIZE``."""
        return (-self).at_most(-value)

    def upper(self, other: Poly) -> Poly:
        """Return a polynomial that is at least both."""
        if self.covers(other):
            return self
        if other.covers(self):
            return other
        zero = Fraction(0)
        names = {*self.terms, *other.terms}
        return _checked({name: max(self.terms.get(name, zero), other.terms.get(name, zero)) for name in names})

    def lower(self, other: Poly) -> Poly:
        """Return a polynomial that is at most both."""
        return -(-self).upper(-other)

    def over(self, other: Poly) -> Poly | None:
        """Return the quotient of an exact division, or None if there is a remainder."""
        if not other.terms:
            return None
        lead = max(other.terms, key=_order)
        quotient, rest = Poly({}), self
        while rest.terms:
            largest = max(rest.terms, key=_order)
            if not _divides(lead, largest) or len(quotient.terms) >= _MAX_TERMS:
                return None
            step = Poly({_quotient(largest, lead): rest.terms[largest] / other.terms[lead]})
            quotient, rest = quotient + step, rest - step * other
        return quotient


ZERO, ONE = Poly.of(0), Poly.of(1)


def product(factors: Iterable[Poly]) -> Poly:
    """Return the product of all factors; 1 if there are none."""
    return reduce(Poly.__mul__, factors, ONE)


def _checked(terms: dict[Monomial, Fraction]) -> Poly:
    made = Poly({monomial: factor for monomial, factor in terms.items() if factor})
    if len(made.terms) > _MAX_TERMS or made.degree > _MAX_DEGREE:
        raise TooComplexError
    return made


def _product(left: Monomial, right: Monomial) -> Monomial:
    if not left or not right:
        return left or right
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted(powers.items()))


def _degree(monomial: Monomial) -> int:
    return sum(power for _, power in monomial)


def _divides(small: Monomial, large: Monomial) -> bool:
    powers = dict(large)
    return all(powers.get(name, 0) >= power for name, power in small)


def _quotient(large: Monomial, small: Monomial) -> Monomial:
    powers = dict(large)
    for name, power in small:
        powers[name] -= power
    return tuple((name, power) for name, power in sorted(powers.items()) if power)


def _order(monomial: Monomial) -> tuple[int, tuple[str, ...]]:
    # Products keep this order (by degree, then by the symbols written out), so that division ends.
    written = tuple(name for name, power in monomial for _ in range(power))
    return len(written), written
