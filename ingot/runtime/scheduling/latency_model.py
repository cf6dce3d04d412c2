"""The expected duration of an engine call by samples: measured at load, then learned from traffic."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

# Throughputs that differ by less than this factor count as equal: a larger batch must pay off.
_PAYS: Final = 1.05
# Weight of one observation: one part adjusts all sizes, since a machine slows down as a whole, and one part adjusts the
# sizes from which the estimate was interpolated.
_WEIGHT: Final = 0.1
# Largest deviation that one observation can show: a machine that was briefly busy says nothing about the model.
_CLIP: Final = 1.5
# Known sizes differ at least by this factor; a new size is tried once this many times as many samples wait.
_GROWTH: Final = 2
# Smallest slope between two sizes, as a share of the average time per sample: if two calls seem to take the same time,
# the measurement was disturbed.
_LEAST_SLOPE: Final = 0.25
# The fastest of the first calls at a size counts, since the first may compile, allocate or run on a busy machine. The
# measurement at load time counts as one call: if it was disturbed and believed, a model that seems too slow for every
# deadline would never receive a request to learn from.
_TRIES: Final = 3
# Calls after which the best size is recomputed. A neighbouring size is tried in a few calls after as many calls, and
# then at doubling intervals up to ``_EXPLORE``: staying at a size that is too small for the traffic costs much more
# than an unnecessary trial.
_REFRESH: Final = 16
_EXPLORE: Final = 256
# A call between two known sizes informs about the larger one only from this share of the distance on.
_TELLING: Final = 0.2
# Multiple of the usual deviation that calls rarely exceed.
_MARGIN: Final = 2.0


class Latency:
    """Seconds of one engine call by samples: piecewise linear between known sizes, extrapolated beyond the last.

    More samples are never expected to take less time.

    Args:
        seconds: by samples, as measured; empty if unknown.
        sure: whether they were measured; otherwise they are a guess that the first observations replace.
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
            # Disturbances only make measurements longer, so the value of the larger size bounds both.
            self._seconds[place - 1] = min(self._seconds[place - 1 : place + 1])
        self._tries = [1 if sure else 0] * len(known)
        self._pace = 1.0
        self._calls = 0
        self._trial = 0  # 1 while the size above the best is tried, -1 for the size below
        self._settled = 0  # the best size, regardless of trials
        self._next = self._pause = _REFRESH  # call that starts the next trial, and calls between trials
        self._best: dict[int, int] = {}
        self._memo: dict[int, float] = {}
        self.guessed = bool(known) and not sure
        """Whether no call has confirmed the estimate yet."""
        self.spread = 0.0
        """Recent average deviation of calls from the estimate, as a share."""

    def __call__(self, samples: int) -> float:
        """Return the expected seconds of a call; 0 if unknown."""
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
        """Return the seconds per sample beyond the largest known size."""
        sizes, seconds = self._rows, self._seconds
        rate = seconds[-1] / sizes[-1]
        if len(sizes) == 1:
            return rate
        return max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), _LEAST_SLOPE * rate)

    @property
    def margin(self) -> float:
        """The factor by which a call may plausibly exceed its estimate."""
        return 1 + _MARGIN * self.spread

    @property
    def trying(self) -> bool:
        """Whether a size larger than the best is due to be tried again."""
        return self._trial > 0

    @property
    def known(self) -> Mapping[int, float]:
        """The sizes that were measured or learned, with their seconds."""
        return {samples: self._pace * seconds for samples, seconds in zip(self._rows, self._seconds, strict=True)}

    def within(self, seconds: float) -> int:
        """Return the most samples that a call handles in ``seconds``; 0 if one sample takes longer."""
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
        """Return the batch size, at most ``most``, with the highest throughput.

        Among sizes of about equal throughput the smallest is chosen. If the largest known size is the best, twice that
        size is returned, so that larger batches are tried as soon as enough samples wait. Occasionally a neighbour of
        the best size is tried again.
        """
        found = self._best.get(most)
        if found is None:
            found = self._best[most] = self._find_best(most)
        return found

    def learn(self, samples: int, seconds: float) -> None:
        """Update the estimate with the measured duration of a call."""
        if seconds <= 0:
            return
        self.guessed = False
        self._count()
        expected = self(samples)
        place = self._nearest(samples)
        if place is None:
            # A slow first call at a size must not end its use: it is not believed to be slower than in proportion.
            if self._rows and samples > self._rows[-1]:
                expected = self(self._rows[-1]) * samples / self._rows[-1]
            self._insert(samples, min(seconds, expected or seconds))
        elif self._tries[place] < _TRIES:
            self._try(place, seconds / expected)
        else:
            self._correct(samples, seconds / expected)
        self._memo.clear()

    def scaled(self, factor: float) -> Latency:
        """Return a guess for samples that are ``factor`` times as large."""
        return Latency({samples: factor * seconds for samples, seconds in self.known.items()}, sure=False)

    def _correct(self, samples: int, factor: float) -> None:
        """Learn that a call of a known size took ``factor`` times as long as expected."""
        between = self._between(samples)
        above, share = between[-1]
        trial = samples > self._settled and share >= _TELLING and self._tries[above]
        surprise = factor * (1 + self.spread) < 1
        factor = min(max(factor, 1 / _CLIP), _CLIP)
        if trial and surprise:
            self._try(above, factor)  # the earlier trial was disturbed
            return
        self.spread += 0.05 * (abs(factor - 1) - self.spread)
        self._pace *= factor**_WEIGHT
        for near, share in between:
            self._seconds[near] *= factor ** (share * _WEIGHT)
            self._straighten(near)

    def _count(self) -> None:
        self._calls += 1
        if self._calls == self._next:
            # Smaller sizes are tried too once larger ones promise nothing more.
            self._trial = -1 if self._pause == _EXPLORE and self._calls // _EXPLORE % 2 else 1
            self._pause = min(2 * self._pause, _EXPLORE)
        elif self._calls == self._next + _TRIES:
            self._trial = 0
            self._next = self._calls + self._pause
        elif self._calls % _REFRESH:
            return
        self._best.clear()

    def _between(self, samples: int) -> list[tuple[int, float]]:
        """Return the positions of the sizes from which ``samples`` is interpolated, and the weight of each."""
        sizes = self._rows
        place = bisect_left(sizes, samples)
        if place == len(sizes):
            return [(place - 1, 1.0)]
        if not place or sizes[place] == samples:
            return [(place, 1.0)]
        share = (samples - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return [(place - 1, 1 - share), (place, share)]

    def _nearest(self, samples: int) -> int | None:
        """Return the position of the known size that represents ``samples``; None if all are too different."""
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
            # The first measurement corrects the whole guess.
            for index, tries in enumerate(self._tries):
                self._seconds[index] *= factor if not tries else 1
            self._seconds = list(accumulate(self._seconds, max))
        elif factor < 1:
            self._seconds[place] *= factor
        self._tries[place] += 1
        self._best.clear()
        self._straighten(place)

    def _straighten(self, place: int) -> None:
        """Keep the estimates monotonic after the one at ``place`` changed."""
        seconds = self._seconds
        learned = seconds[place]
        for index in range(place - 1, -1, -1):
            if seconds[index] <= learned:
                break
            seconds[index] = learned
        for index in range(place + 1, len(seconds)):
            if seconds[index] >= learned:
                break
            seconds[index] = learned

    def _find_best(self, most: int) -> int:
        count = bisect_right(self._rows, most)
        if not count:
            return most
        sizes = self._rows[:count]
        rates = [samples / seconds for samples, seconds in zip(sizes, self._seconds, strict=False)]
        enough = max(rates) / _PAYS
        best = next(place for place, rate in enumerate(rates) if rate >= enough)
        if sizes[best] > self._settled:
            self._pause = _REFRESH  # its new neighbour has not been tried recently
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
    """The :class:`Latency` models of one model by sample size in bytes, such as for texts of different lengths.

    Sizes within a fifth of each other share a model, so there are few. The first estimate for a new size is scaled from
    the nearest known one.

    Args:
        first: for samples of ``weight`` bytes.
        weight: bytes of one sample; 0 if unknown, in which case the first request decides.
    """

    def __init__(self, first: Latency, weight: float = 0):
        self._first: Latency | None = first
        self._classes: dict[int, Latency] = {}
        if weight:
            self.of(weight)

    @property
    def classes(self) -> Mapping[int, Latency]:
        """The models in use, by approximate bytes per sample."""
        return {round(2 ** (place / 4)): latency for place, latency in sorted(self._classes.items())}

    def of(self, weight: float) -> Latency:
        """Return the latency model for samples of ``weight`` bytes."""
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
