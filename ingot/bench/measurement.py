"""Measures a server under one load, under several, and searches for the highest rate that meets an objective."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingot.bench.plan import Plan
from ingot.bench.processes import Processes, Seconds, Window, merged, split
from ingot.bench.target import ServerCounts, Target
from ingot.errors import InvalidArgument
from ingot.report import units

# A run is stable when so many windows in a row agree.
_ALIKE = 3
# The search for the highest rate ends when it is known to this share of itself.
_PRECISION = 0.03
# No rate is tried below this share of the capacity.
_LOWEST = 1 / 64
# More clients are tried for the capacity until they add less than this share.
_GAIN = 0.05
_MOST_CLIENTS = 1024

Show = Callable[["Point"], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a measurement begins and ends.

    Attributes:
        window: seconds of a window.
        warmup: windows before the measurement.
        windows: how many are measured; None to measure until three in a row agree.
        tolerance: the share by which rate and mean latency of windows that agree differ at most.
        most: windows after which a run ends that is not stable.
    """

    window: float = 1.0
    warmup: int = 1
    windows: int | None = None
    tolerance: float = 0.1
    most: int = 15


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A service-level objective: a quantile of the latency, at most ``seconds``."""

    quantile: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read ``p99=50ms``. Raises InvalidArgument for other forms, and for a time without a unit."""
        found = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)=(.+)", text.strip())
        seconds = units.seconds(found[2]) if found else None
        if found is None or not seconds or not 0 < float(found[1]) < 100:
            raise InvalidArgument(f"'{text}' is not an objective; write it as p99=50ms")
        if found[2][-1] in "0123456789.":  # it could be meant as milliseconds
            raise InvalidArgument(
                f"'{text}' has no unit; write it as p{found[1]}={found[2]}ms or p{found[1]}={found[2]}s"
            )
        return cls(quantile=float(found[1]) / 100, seconds=seconds)

    def __str__(self) -> str:
        return f"p{self.quantile * 100:g} of at most {units.duration(self.seconds)}"

    def met(self, point: Point) -> bool:
        """Return whether a point holds it; requests that failed or are overdue count as too late."""
        return point.quantile(self.quantile, strict=True) <= self.seconds


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measurement under one load.

    Attributes:
        clients: of a closed loop; 0 for an open loop.
        offered: requests per second of an open loop; 0 for a closed loop.
        total: the measured windows as one.
        windows: how many.
        stable: whether windows in a row agreed; None if that was not asked for.
        samples: per request.
        server: the server's counts of the measured windows, if it keeps any.
        done: False while it is being measured.
    """

    clients: int
    offered: float
    total: Window
    windows: int
    stable: bool | None
    samples: int
    server: ServerCounts | None
    done: bool

    @property
    def name(self) -> str:
        if not self.clients:
            return f"{units.rate(self.offered)}/s"
        return units.counted(self.clients, "client")

    def quantile(self, share: float, *, strict: bool = False) -> float:
        """Return a quantile of the latency in seconds.

        Args:
            share: from 0 to 1.
            strict: count requests that failed, or are overdue at the end, as infinitely late.
        """
        late = self.total.failed + self.total.overdue if strict else 0
        return _quantile(self.total.latencies, share, late)

    def first(self, share: float) -> float:
        """Return a quantile of the time to the first piece of a stream in seconds; NaN without streams."""
        return _quantile(self.total.first, share)

    def gap(self, share: float) -> float:
        """Return a quantile of the mean time between two tokens of an answer in seconds; NaN without streams."""
        return _quantile(self.total.gaps, share)

    def stage(self, name: str) -> float | None:
        """Return the mean seconds of a request in a stage of the server."""
        if self.server is None or not self.server.requests:
            return None
        return self.server.seconds[name] / self.server.requests

    @property
    def batch(self) -> float | None:
        """Samples per call of the engine."""
        return self.server.samples / self.server.calls if self.server and self.server.calls else None


def _quantile(times: Seconds, share: float, late: int = 0) -> float:
    """Return a quantile of times, of which some more are infinitely late."""
    count = len(times)
    if not count:
        return math.inf if late else math.nan
    position = math.ceil(share * (count + late)) - 1
    return float(np.partition(times, position)[position]) if position < count else math.inf


class Bench:
    """Measures one target.

    Args:
        target: what is loaded.
        plan: of one client; its load is replaced.
        samples: per request.
        rule: when a measurement begins and ends.
        processes: most processes of the load generator.
        show: called with each point, also while it is being measured.
    """

    def __init__(
        self,
        target: Target,
        plan: Plan,
        samples: int,
        rule: Rule,
        *,
        processes: int = 1,
        show: Show = lambda _: None,
    ):
        self._target = target
        self._plan = replace(plan, window=rule.window)
        self._samples = samples
        self._rule = rule
        self._processes = processes
        self._show = show

    def closed(self, clients: int, connections: int | None = None) -> Point:
        """Measure with ``clients`` that each send the next request when the last one is answered."""
        most = clients if self._plan.wire == "http" else 1
        plan = replace(self._plan, clients=clients, connections=min(clients, connections or most))
        return self._measured(plan, self._rule)

    def opened(self, rate: float, connections: int | None = None, rule: Rule | None = None) -> Point:
        """Measure with requests that come at a rate, whatever the server does."""
        most = 128 if self._plan.wire == "http" else 2
        plan = replace(self._plan, clients=0, rate=rate, connections=connections or most)
        return self._measured(plan, rule or self._rule)

    def replayed(self, times: Sequence[float], connections: int | None = None) -> Point:
        """Measure with requests that come at recorded times, in seconds from the start."""
        most = 128 if self._plan.wire == "http" else 2
        windows = max(1, math.ceil(times[-1] / self._rule.window))
        plan = replace(self._plan, clients=0, times=tuple(times), connections=connections or most)
        return self._measured(plan, replace(self._rule, warmup=0, windows=windows))

    def search(self, objective: Objective, connections: int | None = None) -> Iterator[tuple[Point, bool]]:
        """Yield points with whether they hold an objective, until the highest rate that holds it is known."""
        self._plan = replace(self._plan, limit=objective.seconds)
        high = self._capacity(connections) * (1 + _GAIN)
        low, rate, lowest = 0.0, high * 0.8, high * _LOWEST
        rule = replace(self._rule, windows=self._rule.windows or 5)
        while high - low > _PRECISION * high and rate > lowest:
            point = self.opened(rate, connections, rule)
            held = objective.met(point)
            yield point, held
            low, high = (rate, high) if held else (low, rate)
            rate = (low + high) / 2

    def _capacity(self, connections: int | None = None) -> float:
        """Return the highest rate of closed loops, with ever more clients until they no longer raise it."""
        best, clients = 0.0, 1
        rule = replace(self._rule, windows=1)
        while clients <= _MOST_CLIENTS:
            most = clients if self._plan.wire == "http" else 1
            plan = replace(self._plan, clients=clients, connections=min(clients, connections or most))
            rate = self._measured(plan, rule).total.rate
            if rate < best * (1 + _GAIN) and clients > 4:
                return max(best, rate)
            best, clients = max(best, rate), clients * 2
        return best

    def _measured(self, plan: Plan, rule: Rule) -> Point:
        windows: list[Window] = []
        with Processes(split(plan, self._processes)) as processes:
            for _ in range(rule.warmup):
                processes.window()
            counts = [self._target.statistics()]
            while True:
                windows.append(processes.window())
                counts.append(self._target.statistics() if counts[0] is not None else None)
                used, stable = _chosen(windows, rule)
                done = stable or len(windows) >= (rule.windows or rule.most)
                point = self._point(plan, used, counts[-len(used) - 1 :], stable=stable, done=bool(done))
                self._show(point)
                if point.done:
                    return point

    def _point(
        self,
        plan: Plan,
        windows: Sequence[Window],
        counts: Sequence[ServerCounts | None],
        *,
        stable: bool | None,
        done: bool,
    ) -> Point:
        first, last = counts[0], counts[-1]
        return Point(
            clients=plan.clients,
            offered=plan.rate if not plan.times else len(plan.times) / max(plan.times[-1], 1e-9),
            total=merged(windows),
            windows=len(windows),
            stable=stable,
            samples=self._samples,
            server=last - first if first is not None and last is not None else None,
            done=done,
        )


def _chosen(windows: Sequence[Window], rule: Rule) -> tuple[Sequence[Window], bool | None]:
    """Return the windows that count, and whether they agree; those without any request do not."""
    if rule.windows is not None:
        return windows, None
    last = windows[-_ALIKE:]
    busy = [window for window in last if len(window.latencies) or window.failed]
    alike = len(busy) == _ALIKE and all(
        max(values) <= min(values) * (1 + rule.tolerance)
        for values in (
            [window.rate for window in last],
            [float(window.latencies.mean()) if len(window.latencies) else 0.0 for window in last],
        )
    )
    return (last, True) if alike else (windows, False)
