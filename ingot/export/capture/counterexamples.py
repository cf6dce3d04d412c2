"""The search for declared sizes at which a condition does not hold.

All sizes are tried if there are few. Otherwise the search tries sizes derived from the numbers in the condition: the
bounds that it compares with, their factors and products, and the sizes next to these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ingot.export.capture.conditions import always
from ingot.tensors import Range

Sizes = Mapping[str, int]

# The most combinations of sizes for one condition and for all together, and the largest size of an unbounded dimension.
_MOST = 50_000
BUDGET = 1_000_000
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Assumption:
    """One condition on sizes.

    Attributes:
        text: the condition in its simplest form, with the user's names.
        holds: returns whether it holds at given sizes.
        dims: the dimensions in it.
        numbers: the constants in it.
        simple: breaks near its numbers if it breaks at all, as a bound does.
        code: the condition in the form that :func:`ingot.export.capture.conditions.always` reads, or empty.
    """

    text: str
    holds: Callable[[Sizes], bool]
    dims: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    simple: bool = False
    code: str = ""


def search(
    assumptions: Sequence[Assumption], default: Sizes, ranges: Mapping[str, Range]
) -> tuple[list[dict[str, int]], list[Assumption]]:
    """Look for sizes that break assumptions.

    Args:
        assumptions: the conditions.
        default: sizes at which all of them hold; used for the dimensions that are not in a condition.
        ranges: the declared sizes.

    Returns:
        For each condition that breaks, the smallest sizes found that break it; and the conditions that held at all
        sizes tried, but could not be tried at all declared sizes.
    """
    found: list[dict[str, int]] = []
    unsure: list[Assumption] = []
    most = tries(assumptions)
    for assumption in _distinct(assumptions):
        if assumption.code and always(assumption.code, ranges):
            continue
        bounds = [ranges.get(dim, Range()) for dim in assumption.dims]
        complete = _count(bounds) <= most
        each = int(most ** (1 / max(len(bounds), 1)))
        choices = [_all(item) if complete else _pointed_to(item, assumption.numbers, each) for item in bounds]
        tried = ({**default, **dict(zip(assumption.dims, sizes, strict=True))} for sizes in itertools.product(*choices))
        wrong = [sizes for sizes in tried if not assumption.holds(sizes)]
        if wrong:
            found.append(min(wrong, key=lambda sizes: math.prod(sizes.values())))
        elif not complete and not assumption.simple:
            unsure.append(assumption)
    return [sizes for index, sizes in enumerate(found) if sizes not in found[:index]], unsure


def beyond(
    assumptions: Sequence[Assumption], broken: Sequence[Sizes], default: Sizes, ranges: Mapping[str, Range]
) -> list[dict[str, int]]:
    """Return more sizes that break assumptions: the first after the condition, the next, and half as large again.

    At the first alone, a wrong graph may be right: ``x[:, :200]``, captured for fewer than 200 columns, is ``x``, which
    is still correct for 200.
    """
    found: list[dict[str, int]] = []
    for sizes in broken:
        moved = [dim for dim in sizes if sizes[dim] != default[dim]]
        for dim in moved:
            bounds = ranges.get(dim, Range())
            first = sizes[dim] if len(moved) > 1 else _first(assumptions, default, dim, sizes[dim], bounds.step)
            more = (bounds.step, first // 2) if first > default[dim] else ()
            found += [{**sizes, dim: bounds.nearest(first + further)} for further in (0, *more)]
    return _with_all(found, default, broken)


def past(numbers: Iterable[tuple[str, int]], default: Sizes, ranges: Mapping[str, Range]) -> list[dict[str, int]]:
    """Return sizes of a dimension past each number that a graph compares it with: the next, and half as large again."""
    found: list[dict[str, int]] = []
    for dim, number in numbers:
        bounds = ranges.get(dim, Range())
        found += [{**default, dim: bounds.nearest(number + more)} for more in (bounds.step, number // 2)]
    return _with_all(found, default, ())


def _first(assumptions: Sequence[Assumption], default: Sizes, dim: str, wrong: int, step: int) -> int:
    """Return the size of a dimension, between the default and ``wrong``, at which an assumption first breaks."""
    right, over = default[dim] // step, wrong // step
    while abs(right - over) > 1:
        middle = (right + over) // 2
        if all(item.holds({**default, dim: middle * step}) for item in assumptions):
            right = middle
        else:
            over = middle
    return over * step


def _with_all(found: Sequence[dict[str, int]], default: Sizes, known: Collection[Sizes]) -> list[dict[str, int]]:
    """Return the sizes that are not known, and last those with the largest size of every dimension."""
    largest = {dim: max((sizes[dim] for sizes in found), default=size) for dim, size in default.items()}
    together = [largest] if sum(largest[dim] > size for dim, size in default.items()) > 1 else []
    new: list[dict[str, int]] = []
    for sizes in (*found, *together):
        if sizes not in (*known, default, *new):
            new.append(sizes)
    return new


def tries(assumptions: Sequence[Assumption]) -> int:
    """Return how many combinations of sizes are tried for each condition: at least 1,000, even beyond the budget."""
    return min(_MOST, max(1_000, BUDGET // max(len(_distinct(assumptions)), 1)))


def short(assumptions: Sequence[Assumption]) -> str:
    """Return a remark that the budget limited the search, or an empty string; shown with undecided conditions."""
    most = tries(assumptions)
    return f" (the search ran out of its budget at {most:,} combinations each)" if most < _MOST else ""


def _distinct(assumptions: Sequence[Assumption]) -> Collection[Assumption]:
    # Not by their texts, which are equal only for sizes of 1 or more.
    return {item.code or item.text: item for item in assumptions}.values()


def _count(bounds: Sequence[Range]) -> float:
    return math.prod(math.inf if item.high is None else len(_all(item)) for item in bounds)


def _all(bounds: Range) -> Sequence[int]:
    return range(bounds.low, (bounds.high or 0) + 1, bounds.step)


def _pointed_to(bounds: Range, numbers: Iterable[int], most: int) -> Sequence[int]:
    """Return up to ``most`` sizes of a dimension at which a condition with these numbers may break."""
    step, high = bounds.step, bounds.nearest(_LARGEST)
    near = (bounds.low + step * count for count in range(64))
    likely = itertools.chain(
        (bounds.low, high),
        itertools.islice(near, 8),
        _related(sorted({abs(number) for number in numbers} - {0})),
        near,
        (size + shift for size in (128, 256, 512, 1024, 2048, 4096) for shift in (-1, 0, 1)),
    )
    fitting = dict.fromkeys(item for size in likely for item in (size, size - size % step) if item in bounds)
    return list(fitting)[:most]


def _related(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the numbers, their factors and products, and each of these plus or minus 1 or one of the numbers."""
    factors = dict.fromkeys(factor for number in numbers for factor in _factors(number))
    products = (one * other for one, other in itertools.product(factors, numbers))
    for size in dict.fromkeys((*numbers, *factors, *products)):
        if size <= _LARGEST:
            yield from (size, size - 1, size + 1)
            yield from (size + sign * number for number in numbers for sign in (-1, 1))


def _factors(number: int) -> Iterator[int]:
    if number <= _LARGEST:
        small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
        yield from (math.isqrt(number), *small, *(number // factor for factor in reversed(small)))
