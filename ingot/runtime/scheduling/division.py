"""Samples of different sizes among engine calls: the division of them whose calls take the least time together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

Sizes = tuple[int, ...]
"""Sizes of the dimensions that may be padded."""
Sample = tuple[Sizes, int]
"""The sizes of samples that stay together, and their number."""
# Sizes whose work is remembered.
_MOST = 4096


class Work:
    """What the duration of a call depends on: its samples times their elements along dimensions that may be padded.

    For texts these are its tokens with padding. A transformer's call takes a fixed time and a time for each token: of
    MiniLM on a CPU, 2 ms and 0.13 ms, and a token of a text of 256 takes a tenth more than one of a text of 16.

    Args:
        target: returns the sizes to which samples of given sizes are padded when they run alone: the bucket above.
    """

    def __init__(self, target: Callable[[Sizes], Sizes] = tuple):
        self._target = target
        self._known: dict[Sizes, int] = {}

    def __call__(self, sizes: Sizes, samples: int = 1) -> int:
        """Return the work of a call of samples of which the largest have these sizes."""
        found = self._known.get(sizes)
        if found is None:
            if len(self._known) >= _MOST:  # clients choose the sizes
                self._known.clear()
            found = self._known[sizes] = max(1, prod(self._target(sizes)))
        return found * samples


def joint(one: Sizes, other: Sizes) -> Sizes:
    """Return the sizes of two samples in one call."""
    return one if one == other else tuple(map(max, one, other))


def divide(
    samples: Sequence[Sample], work: Work, seconds: Callable[[int], float], most: int, cap: int
) -> list[list[int]]:
    """Return the samples of each call, as positions in ascending order.

    Each call pads its samples to its largest. Among calls of samples that follow each other by size, the division is
    the one of least time.

    Args:
        samples: in any order.
        work: of a call.
        seconds: of a call, by its work.
        most: samples of a call; more only if they stay together.
        cap: work of a call; more only if one sample, or samples that stay together, have it.
    """
    items = _equal(samples, work, most, cap)
    spent: list[tuple[float, int]] = [(0.0, 0)]  # seconds and number of calls of the first items
    begins = []
    fixed = seconds(1)
    for end in range(1, len(items) + 1):
        sizes, count, _ = items[end - 1]
        unit = work(sizes)
        taken, calls = spent[-1]
        least, begin = (taken + seconds(unit * count), calls + 1), end - 1
        for start in range(end - 2, -1, -1):
            own, number, _ = items[start]
            count += number
            if (larger := joint(sizes, own)) != sizes:
                sizes, unit = larger, work(larger)
            if count > most or (load := unit * count) > cap:
                break
            taken, calls = spent[start]
            cost = taken + seconds(load), calls + 1
            if cost <= least:
                least, begin = cost, start
            elif cost[0] > least[0] + fixed:  # smaller samples too would be padded for more than a call costs
                break
        spent.append(least)
        begins.append(begin)
    return _calls(items, begins)


_Item = tuple[Sizes, int, list[int]]


def _equal(samples: Sequence[Sample], work: Work, most: int, cap: int) -> list[_Item]:
    """Return samples of equal size together, as far as a call may have them, in ascending order of size."""
    items: list[_Item] = []
    for place in sorted(range(len(samples)), key=lambda place: work(samples[place][0])):
        sizes, count = samples[place]
        if items and items[-1][0] == sizes:
            total = items[-1][1] + count
            if total <= most and work(sizes, total) <= cap:
                items[-1][2].append(place)
                items[-1] = (sizes, total, items[-1][2])
                continue
        items.append((sizes, count, [place]))
    return items


def _calls(items: Sequence[_Item], begins: Sequence[int]) -> list[list[int]]:
    """Return the positions of each call, given where the call that ends with each item begins."""
    calls = []
    end = len(items)
    while end:
        begin = begins[end - 1]
        calls.append(sorted(place for _, _, places in items[begin:end] for place in places))
        end = begin
    return calls[::-1]
