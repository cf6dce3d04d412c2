"""Comparisons of polynomials, and sizes that are computed from others, against their values."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from ingot.bounds.derived import larger, quotient, smaller
from ingot.bounds.poly import ONE, ZERO, Poly, Size

NAMES = ("batch", "seq")


def drawn(rng: random.Random, known: list[Poly]) -> Poly:
    """Return a random combination of sizes, which may be negative."""
    found = Poly.of(rng.randrange(-4, 9))
    for _ in range(rng.randrange(1, 4)):
        found = found + rng.choice(known).scaled(rng.choice([-3, -1, 1, 1, 2, 16]))
    return found * rng.choice([*known[:2], ONE, ONE, ONE])


@pytest.mark.matrix
def test_computed_sizes_have_the_values_of_their_computation_and_comparisons_hold() -> None:
    rng = random.Random(7)
    cases = [{"batch": rng.randrange(1, 40), "seq": rng.randrange(1, 40)} for _ in range(12)]
    computed = compared = 0
    for _ in range(40):
        known = [Poly.symbol(name) for name in NAMES]
        for _ in range(6):
            one, two, by = drawn(rng, known), drawn(rng, known), rng.randrange(1, 9)
            results = {"min": smaller(one, two), "max": larger(one, two), "floor": quotient(one, by)}
            found = {kind: result for kind, result in results.items() if result is not None}
            for kind, result in found.items():
                for sizes in cases:
                    values = one.value(sizes), two.value(sizes)
                    expected = {"min": min(values), "max": max(values), "floor": values[0] // by}[kind]
                    assert result.value(sizes) == expected, (kind, str(one), str(two), by)
                computed += result.depth > 0
            known += [result for result in found.values() if result.covers(ZERO)][:1]
            if one.covers(two):
                compared += 1
                assert all(one.value(sizes) >= two.value(sizes) for sizes in cases), (str(one), str(two))
            share = one.share(two) if two.covers(ONE) else None
            if share is not None:
                assert all(share.value(sizes) * two.value(sizes) >= one.value(sizes) for sizes in cases)
    assert computed > 100
    assert compared > 40


def test_a_computed_size_is_known_by_its_limits() -> None:
    seq, table = Poly.symbol("seq"), Poly.of(512)
    rows = smaller(table, seq)
    assert rows is not None
    assert seq.covers(rows)
    assert table.covers(rows)
    assert rows.covers(ONE)
    assert not rows.covers(seq)
    assert smaller(table, Poly.symbol(Size("seq", highs=(table,)))) == seq
    windows = quotient(seq + Poly.of(6), 7)
    assert windows is not None
    assert windows.scaled(7).covers(seq)
    assert quotient(seq - ONE, 2) == (quotient(seq + ONE, 2) or ZERO) - ONE
    halves = seq
    for _ in range(8):  # as the strides of a deep network
        halves = quotient(halves + ONE, 2) or ZERO
    assert halves == quotient(seq + Poly.of(255), 256)
    tiles = Poly.symbol(Size("height", lows=(Poly.of(64),)))
    assert (quotient(tiles, 32) or ZERO).covers(ONE)


def test_a_dimension_of_a_file_never_passes_for_a_computed_size() -> None:
    seq = Poly.symbol("seq")
    rows = smaller(Poly.of(512), seq)
    assert rows is not None
    assert Poly.symbol(str(rows)) != rows
    assert not seq.covers(Poly.symbol(str(rows)))
    product, spaced = Poly.symbol("a") * Poly.symbol("b"), Poly.symbol("a b")
    assert smaller(seq, product) != smaller(seq, spaced)
    large, larger_by_one = Poly.of(10**12), Poly.of(10**12 + 1)
    assert smaller(seq, large) != smaller(seq, larger_by_one)
    assert str(seq.scaled(Fraction(1, 3))) == "1/3 seq"
