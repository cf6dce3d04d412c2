"""What one engine call is expected to take, by its samples: measured when a model is loaded, and learnt ever after."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate

# Rates that differ by less than this count as equal: a larger batch must pay.
_PAYS = 1.05
# How much one observation moves what is expected: one part for all sizes, since a machine that slows down does so for
# all, and one for the sizes from which that of the call is expected.
_SHARE = 0.1
# The most that one observation can seem to be off: a machine that was busy with something else for a moment says
# nothing about the model.
_CLIP = 1.5
# Known sizes lie at least this factor apart, and a size that was never run is tried when this many times as many samples
# as ever wait.
_GROWTH = 2
# Each sample more takes at least this share of what a sample takes in the largest call that is known: in two calls that seem
# to take the same time the machine was disturbed.
_LEAST_SLOPE = 0.25
# Of the first calls at a size the least counts, as the first may compile, allocate or meet a busy machine. What was
# measured while the model was loaded counts as one: had it been disturbed and were it believed, a model that seems too
# slow for every deadline would be given no request to learn better from, and a size that seems slow no batch.
_TRIES = 3
# After so many calls the best size is looked for anew. The size next to it is tried in a few calls after as many, and
# then after twice as many each time, up to so many: whatever slowed the machine when it was tried before has passed,
# and to stay at a size that is too small for the traffic is much worse than to try in vain.
_REFRESH = 16
_EXPLORE = 256
# A call of a size between two tells of the larger one only if it is by so much of the way nearer to that.
_TELLING = 0.2
# Calls that take longer than expected by more than so many times the usual difference are rare.
_MARGIN = 2.0


class Latency:
    """Seconds of one engine call by samples: straight lines between known sizes, the last of which goes on beyond them.

    More samples are never expected to take less time.

    Args:
        seconds: by samples, as measured; empty where nothing is known yet.
        sure: whether they were measured; else they are a guess, which the first observations replace.
    """

    __slots__ = (
        "_best",
        "_calls",
        "_memo",
        "_next",
        "_pace",
        "_pause",
        "_rows",
        "_seconds",
        "_settled",
        "_trial",
        "_tries",
        "guessed",
        "spread",
    )

    def __init__(self, seconds: Mapping[int, float] | None = None, *, sure: bool = True):
        known = sorted((seconds or {}).items())
        self._rows = [samples for samples, _ in known]
        self._seconds = [taken for _, taken in known]
        for place in range(len(known) - 1, 0, -1):
            # What disturbs a measurement makes it longer: the larger size's is then nearer to the truth for both.
            self._seconds[place - 1] = min(self._seconds[place - 1 : place + 1])
        self._tries = [1 if sure else 0] * len(known)
        self._pace = 1.0
        self._calls = 0
        self._trial = 0  # 1 while the size above the best is tried, -1 for the one below
        self._settled = 0  # the best size, whatever is tried
        self._next = self._pause = _REFRESH  # the call with which the next trial begins, and how many there are between
        self._best: dict[int, int] = {}
        self._memo: dict[int, float] = {}
        self.guessed = bool(known) and not sure
        """Whether no call has shown yet what is true."""
        self.spread = 0.0
        """By how much calls differ from what is expected, as a share, lately and on average."""

    def __call__(self, samples: int) -> float:
        """Return the expected seconds of a call; 0 where nothing is known."""
        found = self._memo.get(samples)
        if found is None:
            found = self._memo[samples] = self._expect(samples)
        return found

    def _expect(self, samples: int) -> float:
        sizes, seconds = self._rows, self._seconds
        place = bisect_left(sizes, samples)
        if place == len(sizes):
            return self._pace * (seconds[-1] + (samples - sizes[-1]) * self._slope()) if sizes else 0.0
        if sizes[place] == samples or place == 0:
            return self._pace * seconds[place]
        low, high = sizes[place - 1], sizes[place]
        return self._pace * (
            seconds[place - 1] + (seconds[place] - seconds[place - 1]) * (samples - low) / (high - low)
        )

    def _slope(self) -> float:
        """Return the seconds that each sample takes beyond the largest known size."""
        sizes, seconds = self._rows, self._seconds
        rate = seconds[-1] / sizes[-1]
        if len(sizes) == 1:
            return rate
        return max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), _LEAST_SLOPE * rate)

    @property
    def margin(self) -> float:
        """How many times as long as expected a call may well take."""
        return 1 + _MARGIN * self.spread

    @property
    def trying(self) -> bool:
        """Whether it is time to try a larger size than the best again."""
        return self._trial > 0

    @property
    def known(self) -> Mapping[int, float]:
        """The sizes that were measured, or learnt from traffic, with their seconds."""
        return {samples: self._pace * seconds for samples, seconds in zip(self._rows, self._seconds, strict=True)}

    def within(self, seconds: float) -> int:
        """Return the most samples of which a call takes no longer than ``seconds``; 0 if one sample takes longer."""
        sizes, known = self._rows, self._seconds
        if not sizes:
            return sys.maxsize
        seconds /= self._pace
        place = bisect_right(known, seconds)
        if place == len(sizes):
            return int(min(sizes[-1] + (seconds - known[-1]) / self._slope(), sys.maxsize))
        if place == 0:
            return 0
        low, high = sizes[place - 1], sizes[place]
        return low + int((high - low) * (seconds - known[place - 1]) / (known[place] - known[place - 1]))

    def best(self, most: int) -> int:
        """Return how many samples, at most ``most``, one call should have for the highest rate.

        The smallest of sizes that do about as well. Where the largest known size does best, twice as many, so that
        larger ones are tried as soon as so many wait. Now and then a neighbour of the best is tried again.
        """
        found = self._best.get(most)
        if found is None:
            found = self._best[most] = self._find_best(most)
        return found

    def learn(self, samples: int, seconds: float) -> None:
        """Take in how long a call really took."""
        if seconds <= 0:
            return
        self.guessed = False
        self._count()
        expected = self(samples)
        place = self._nearest(samples)
        if place is None:
            # An unlucky first call at a size must not end its use: it is not believed to be slower than in proportion.
            if self._rows and samples > self._rows[-1]:
                expected = self(self._rows[-1]) * samples / self._rows[-1]
            self._insert(samples, min(seconds, expected or seconds))
        elif self._tries[place] < _TRIES:
            self._try(place, seconds / expected)
        else:
            self._correct(samples, seconds / expected)
        self._memo.clear()

    def scaled(self, factor: float) -> Latency:
        """Return a guess for samples that are ``factor`` times as large as these."""
        return Latency({samples: factor * seconds for samples, seconds in self.known.items()}, sure=False)

    def _correct(self, samples: int, factor: float) -> None:
        """Take in that a call of sizes that were tried before took ``factor`` times as long as expected."""
        between = self._between(samples)
        above, share = between[-1]
        trial = samples > self._settled and share >= _TELLING and self._tries[above]
        surprise = factor * (1 + self.spread) < 1
        factor = min(max(factor, 1 / _CLIP), _CLIP)
        if trial and surprise:
            self._try(above, factor)  # it was disturbed when it was tried before
            return
        self.spread += 0.05 * (abs(factor - 1) - self.spread)
        self._pace *= factor**_SHARE
        for near, share in between:
            self._seconds[near] *= factor ** (share * _SHARE)
            self._straighten(near)

    def _count(self) -> None:
        self._calls += 1
        if self._calls == self._next:
            # Smaller sizes are tried as well when nothing more is to be expected of larger ones.
            self._trial = -1 if self._pause == _EXPLORE and self._calls // _EXPLORE % 2 else 1
            self._pause = min(2 * self._pause, _EXPLORE)
        elif self._calls == self._next + _TRIES:
            self._trial = 0
            self._next = self._calls + self._pause
        elif self._calls % _REFRESH:
            return
        self._best.clear()

    def _between(self, samples: int) -> list[tuple[int, float]]:
        """Return the places of the sizes from which ``samples`` is expected, and what share each has in it."""
        sizes = self._rows
        place = bisect_left(sizes, samples)
        if place == len(sizes):
            return [(place - 1, 1.0)]
        if not place or sizes[place] == samples:
            return [(place, 1.0)]
        share = (samples - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return [(place - 1, 1 - share), (place, share)]

    def _nearest(self, samples: int) -> int | None:
        """Return the place of the known size that stands for ``samples``; None if all are far from it."""
        sizes = self._rows
        place = bisect_left(sizes, samples)
        if place < len(sizes) and sizes[place] == samples:
            return place
        near = [index for index in (place - 1, place) if 0 <= index < len(sizes)]
        if not near:
            return None
        found = min(near, key=lambda index: max(samples, sizes[index]) / min(samples, sizes[index]))
        return found if max(samples, sizes[found]) < _GROWTH * min(samples, sizes[found]) else None

    def _insert(self, samples: int, seconds: float) -> None:
        place = bisect_left(self._rows, samples)
        self._rows.insert(place, samples)
        self._seconds.insert(place, seconds / self._pace)
        self._tries.insert(place, 1)
        self._best.clear()
        self._straighten(place)

    def _try(self, place: int, factor: float) -> None:
        if not self._tries[place]:
            # The first look at a guess says how wrong all of it was.
            for index, tries in enumerate(self._tries):
                self._seconds[index] *= factor if not tries else 1
            self._seconds = list(accumulate(self._seconds, max))
        elif factor < 1:
            self._seconds[place] *= factor
        self._tries[place] += 1
        self._best.clear()
        self._straighten(place)

    def _straighten(self, place: int) -> None:
        """Let no fewer samples take longer, nor more samples less, than was just learnt of a size."""
        seconds = self._seconds
        learnt = seconds[place]
        for index in range(place - 1, -1, -1):
            if seconds[index] <= learnt:
                break
            seconds[index] = learnt
        for index in range(place + 1, len(seconds)):
            if seconds[index] >= learnt:
                break
            seconds[index] = learnt

    def _find_best(self, most: int) -> int:
        count = bisect_right(self._rows, most)
        if not count:
            return most
        sizes = self._rows[:count]
        rates = [samples / seconds for samples, seconds in zip(sizes, self._seconds, strict=False)]
        enough = max(rates) / _PAYS
        best = next(place for place, rate in enumerate(rates) if rate >= enough)
        if sizes[best] > self._settled:
            self._pause = _REFRESH  # what is next to it now was not tried for long
        self._settled = sizes[best]
        last = count - 1
        if best < last and (self._trial > 0 or self._tries[best + 1] < _TRIES):
            best += 1
        elif best and self._trial < 0:
            best -= 1
        elif best == last:
            return min(_GROWTH * sizes[best], most)
        return sizes[best]


class Latencies:
    """The :class:`Latency` of one model for samples of several weights, such as texts of several lengths.

    Weights within a fifth of each other share one, so there are few. One that is not known yet is guessed from the
    nearest, in proportion to the weight.

    Args:
        first: of samples of the weight ``weight``.
        weight: bytes of one sample; 0 if that is unknown, and then the first that is asked for.
    """

    def __init__(self, first: Latency, weight: float = 0):
        self._first: Latency | None = first
        self._classes: dict[int, Latency] = {}
        if weight:
            self.of(weight)

    @property
    def classes(self) -> Mapping[int, Latency]:
        """Those that are in use, by about how many bytes a sample has."""
        return {round(2 ** (place / 4)): latency for place, latency in sorted(self._classes.items())}

    def of(self, weight: float) -> Latency:
        """Return the latency of samples of so many bytes."""
        place = round(4 * math.log2(max(weight, 1)))
        found = self._classes.get(place)
        if found is None:
            if self._first is not None:
                found, self._first = self._first, None
            else:
                nearest = min(self._classes, key=lambda other: abs(other - place))
                found = self._classes[nearest].scaled(2 ** ((place - nearest) / 4))
            self._classes[place] = found
        return found
