"""Polynomials of the sizes of a model's inputs.

Every size of an input is at least 1. A polynomial is therefore non-negative if, for each negative term, there are
positive terms at least as large whose monomials contain that of the negative term. Computed sizes are symbols too; a
comparison also tries the limits of a computed size instead of the symbol.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import islice

Monomial = tuple[tuple[str, int], ...]
"""Symbols with their exponents, sorted; empty for the constant term."""
Number = int | Fraction

MAX_SIZE = 1 << 28
"""No dimension is assumed to be larger where integers could overflow; the default limit of bodies is far below."""
_MAX_TERMS = 64
_MAX_DEGREE = 16
# Most substitutions of computed sizes by their limits in one comparison of polynomials.
_MAX_TRIED = 16


class TooComplexError(Exception):
    """A polynomial has too many terms, or too high a degree."""


class Size(str):
    """The symbol of a size with known limits: an integer of at least ``least``, which is 0 or 1.

    ``lows`` are lower bounds of the size, and ``highs`` upper bounds. ``value`` computes the size from the sizes of the
    inputs, and ``depth`` is the number of nested computations; a named dimension has None and 0, and differs from a
    computed size of the same name. ``division`` is the dividend and the divisor of a quotient.
    """

    least: int
    lows: tuple[Poly, ...]
    highs: tuple[Poly, ...]
    value: Callable[[Mapping[str, int]], int] | None
    depth: int
    division: tuple[Poly, int] | None

    def __new__(
        cls,
        name: str,
        *,
        least: int = 1,
        lows: tuple[Poly, ...] = (),
        highs: tuple[Poly, ...] = (),
        value: Callable[[Mapping[str, int]], int] | None = None,
        depth: int = 0,
        division: tuple[Poly, int] | None = None,
    ) -> Size:
        size = super().__new__(cls, name)
        size.least, size.lows, size.highs, size.value = least, lows, highs, value
        size.depth, size.division = depth, division
        return size

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True and self.depth == getattr(other, "depth", 0)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    @property
    def most(self) -> Number:
        """A number that it does not exceed if no named dimension exceeds ``MAX_SIZE``."""
        return min([high.most for high in self.highs] + ([MAX_SIZE] if self.value is None else []))


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
    def sizes(self) -> set[Size]:
        """The symbols of which more is known than their names."""
        return {name for monomial in self.terms for name, _ in monomial if isinstance(name, Size)}

    @property
    def integral(self) -> bool:
        """Whether all values are known to be integers."""
        return all(factor.denominator == 1 for factor in self.terms.values())

    @property
    def depth(self) -> int:
        """How many computations of sizes there are within each other."""
        return max((size.depth for size in self.sizes), default=0)

    @property
    def most(self) -> Number:
        """A number that no value exceeds if no named dimension exceeds ``MAX_SIZE``."""
        return sum(by * _most(monomial) for monomial, by in self.terms.items() if by > 0)

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

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __str__(self) -> str:
        """Return the exact terms; other polynomials have other texts, whatever the names of dimensions are."""
        terms = sorted(self.terms.items(), key=lambda term: (_degree(term[0]), term[0]))
        return " + ".join(_text(monomial, factor) for monomial, factor in terms) or "0"

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the value for these sizes, rounded up and at least 0; a size below 1 counts as 1.

        Raises:
            KeyError: a symbol has no size.
        """
        return max(0, math.ceil(self.value(sizes)))

    def value(self, sizes: Mapping[str, int]) -> Fraction:
        """Return the exact value for these sizes; a size below 1 counts as 1.

        Raises:
            KeyError: a symbol has no size.
        """
        total = Fraction(0)
        for monomial, factor in self.terms.items():
            for name, power in monomial:
                compute = name.value if isinstance(name, Size) else None
                factor *= (max(1, sizes[name]) if compute is None else compute(sizes)) ** power
            total += factor
        return total

    def covers(self, other: Poly) -> bool:
        """Return whether this is known to be at least ``other`` for all sizes."""
        tried = [self - other]
        for difference in tried:  # which grows
            if difference._is_non_negative():
                return True
            if len(tried) < _MAX_TRIED:
                with contextlib.suppress(TooComplexError):
                    tried += islice(difference._weakened(), _MAX_TRIED - len(tried))
        return False

    def _is_non_negative(self) -> bool:
        """Return whether each negative term is outweighed by positive terms that are its multiples."""
        spare = {monomial: factor for monomial, factor in self.terms.items() if factor > 0}
        for monomial, factor in self.terms.items():
            if factor >= 0:
                continue
            for larger in [found for found in spare if _exceeds(found, monomial)]:
                used = min(spare[larger], -factor)
                spare[larger] -= used
                factor += used
                if not factor:
                    break
            if factor:
                return False
        return True

    def _weakened(self) -> Iterator[Poly]:
        """Yield polynomials that are no larger: in each, one size is replaced by one of its limits."""
        for size in sorted(self.sizes):
            for limits, negative in ((size.highs, True), (size.lows, False)):
                holding = {
                    monomial: by
                    for monomial, by in self.terms.items()
                    if (by < 0) is negative and any(name == size for name, _ in monomial)
                }
                rest = Poly({monomial: by for monomial, by in self.terms.items() if monomial not in holding})
                factors = Poly({_quotient(monomial, ((size, 1),)): by for monomial, by in holding.items()})
                for limit in limits if holding else ():
                    yield rest + factors * limit

    def at_most(self, value: int) -> bool:
        """Return whether this is known to be at most a number for all sizes up to ``MAX_SIZE``."""
        return self.most <= value

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

    def share(self, other: Poly) -> Poly | None:
        """Return a polynomial that is at least this divided by ``other``; None if signs are mixed.

        A sum is at least each of its terms, so each term of this is divided by the term of ``other`` that leaves least.
        """
        if not other.terms or any(by < 0 for poly in (self, other) for by in poly.terms.values()):
            return None
        found = ZERO
        for monomial, factor in self.terms.items():
            options = [(_shared(monomial, term), factor / by) for term, by in other.terms.items()]
            options = [option for option in options if option[0] is not None]
            if not options:
                return None
            rest, by = min(options, key=lambda option: (_degree(option[0] or ()), option[1]))
            found = found + Poly({rest or (): by})
        return found


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


def _text(monomial: Monomial, factor: Fraction) -> str:
    names = [name if _computed(name) or name.isidentifier() else repr(str(name)) for name, _ in monomial]
    powers = [name if power == 1 else f"{name}^{power}" for name, (_, power) in zip(names, monomial, strict=True)]
    return " ".join([*([str(factor)] if factor != 1 or not monomial else []), *powers])


def _computed(name: str) -> bool:
    return isinstance(name, Size) and name.value is not None


def _most(monomial: Monomial) -> Number:
    return math.prod((name.most if isinstance(name, Size) else MAX_SIZE) ** power for name, power in monomial)


def _exceeds(large: Monomial, small: Monomial) -> bool:
    """Return whether one product is known to be at least another: its further factors are at least 1."""
    powers = dict(small)
    if not _divides(small, large):
        return False
    return all(_positive(name) for name, power in large if power > powers.get(name, 0))


def _positive(name: str) -> bool:
    return not isinstance(name, Size) or name.least > 0


def _shared(large: Monomial, small: Monomial) -> Monomial | None:
    """Return a product at least as large as the quotient of two; None if the divisor may be 0."""
    if not all(_positive(name) for name, _ in small):
        return None
    powers = dict(small)
    return tuple((name, power - powers.get(name, 0)) for name, power in large if power > powers.get(name, 0))


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
