"""Intervals between two polynomials of the sizes of a model's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ingot.bounds.derived import larger, quotient, smaller
from ingot.bounds.poly import ONE, ZERO, Number, Poly


@dataclass(frozen=True, slots=True)
class Interval:
    """The values between two polynomials, ends included; None is an unknown end."""

    low: Poly | None = None
    high: Poly | None = None

    @classmethod
    def exactly(cls, value: Poly | Number) -> Interval:
        value = value if isinstance(value, Poly) else Poly.of(value)
        return cls(value, value)

    @classmethod
    def up_to(cls, high: Poly) -> Interval:
        return cls(ZERO, high)

    @property
    def exact(self) -> Poly | None:
        """The only value, or None if there may be several."""
        return self.low if self.low is not None and self.low == self.high else None

    @property
    def constant(self) -> Fraction | None:
        """The only value if it does not depend on sizes, otherwise None."""
        return None if self.exact is None else self.exact.constant

    @property
    def non_negative(self) -> bool:
        return self.low is not None and self.low.covers(ZERO)

    @property
    def positive(self) -> bool:
        return self.low is not None and self.low.covers(ONE)

    def __neg__(self) -> Interval:
        return Interval(None if self.high is None else -self.high, None if self.low is None else -self.low)

    def __add__(self, other: Interval) -> Interval:
        return Interval(_both(Poly.__add__, self.low, other.low), _both(Poly.__add__, self.high, other.high))

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        if self.non_negative and other.non_negative:
            return Interval(_both(Poly.__mul__, self.low, other.low), _both(Poly.__mul__, self.high, other.high))
        for one, by in ((self, other.constant), (other, self.constant)):
            if by is not None:
                ends = [None if end is None else end.scaled(by) for end in (one.low, one.high)]
                return Interval(*ends) if by >= 0 else Interval(*ends[::-1])
        return Interval()

    def divided(self, other: Interval, *, rounded: bool) -> Interval:
        """Return the quotients; with ``rounded``, an interval that holds both the floored and the truncated ones."""
        by = other.constant
        if by is None and self.exact is not None and other.exact is not None and self.exact.over(other.exact):
            return Interval.exactly(self.exact.over(other.exact) or ZERO)
        if by is None and self.non_negative and other.low is not None and other.low.covers(ONE):
            return Interval(ZERO, self.high)
        if not by:
            return Interval()
        if rounded and self.exact is not None and self.non_negative and by > 0 and by.denominator == 1:
            floored = quotient(self.exact, int(by))
            if floored is not None:
                return Interval.exactly(floored)
        found = self * Interval.exactly(1 / by)
        whole = found.exact is not None and all(factor.denominator == 1 for factor in found.exact.terms.values())
        if not rounded or whole:
            return found
        # Rounded down, or towards zero: less than 1 away.
        low = None if found.low is None else found.low - ONE
        if found.non_negative:
            return Interval(ZERO if low is None or not low.covers(ZERO) else low, found.high)
        return Interval(low, None if found.high is None else found.high + ONE)

    def joined(self, other: Interval) -> Interval:
        """Return an interval that contains both."""
        return Interval(_both(Poly.lower, self.low, other.low), _both(Poly.upper, self.high, other.high))

    def least(self, other: Interval) -> Interval:
        """Return the smaller of two values."""
        high = _both(lambda one, two: smaller(one, two) or one, self.high, other.high)
        low = _both(lambda one, two: smaller(one, two) or one.lower(two), self.low, other.low)
        return Interval(low, high or self.high or other.high)

    def most(self, other: Interval) -> Interval:
        """Return the larger of two values."""
        low = _both(lambda one, two: larger(one, two) or one, self.low, other.low)
        high = _both(lambda one, two: larger(one, two) or one.upper(two), self.high, other.high)
        return Interval(low or self.low or other.low, high)


def _both(combine: Callable[[Poly, Poly], Poly], one: Poly | None, two: Poly | None) -> Poly | None:
    return None if one is None or two is None else combine(one, two)
