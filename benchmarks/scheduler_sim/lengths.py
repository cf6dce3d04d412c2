"""Texts of real lengths in simulated time: ``python -m benchmarks.scheduler_sim.lengths``.

The lengths are those of the docstrings of the standard library as the packaged MiniLM tokenizes them. A call takes a
fixed time and a time for each token with padding: on a CPU as MiniLM was timed there, on a GPU as such profiles are.
Policies:

- ``cost``: the scheduler, which divides what waits into the calls of least time
- ``classes``: the scheduler as it was before: lengths within a factor of two share a batch, which runs in the calls of
  least time
- ``count``: the scheduler without knowledge of lengths: a batch is padded to its longest text

Throughput is a share of what the engine alone does with all texts in batches of equal lengths. Short texts come in an
open loop at half of the engines' rate, alone and with long ones that take another quarter of one engine's time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.texts import corpus
from ingot.deploy.capacity import traces
from ingot.deploy.capacity.simulation import Loop, Policy, Simulation
from ingot.deploy.capacity.traces import Arrival
from ingot.errors import IngotError
from ingot.runtime.scheduling.division import Work, divide
from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.scheduler import Scheduler

_WORK = Work()
_SHORT = 32
# Seconds of a call, and of each token.
PROFILES = {"cpu": (2.2e-3, 1.31e-4), "gpu": (4e-3, 2e-6)}
CLIENTS = (1, 8, 32, 128)
_KNOWN = tuple(1 << power for power in range(3, 12))
_LIMITS = Limits()


@dataclass
class Calls:
    """The duration of batches; counts their tokens before and after padding. ``divided``: a batch runs in several."""

    fixed: float
    each: float
    divided: bool = False
    tokens: int = 0
    padded: int = 0

    def seconds(self, work: int) -> float:
        return self.fixed + self.each * work

    def __call__(self, batch: list[Entry]) -> float:
        samples = [(length_of(entry), 1) for entry in batch]
        calls = divide(samples, _WORK, self.seconds, len(batch), 1 << 40) if self.divided else [[*range(len(batch))]]
        works = [len(call) * max(samples[place][0][0] for place in call) for call in calls]
        self.tokens += sum(sizes[0] for sizes, _ in samples)
        self.padded += sum(works)
        return sum(map(self.seconds, works))

    @property
    def waste(self) -> float:
        return self.padded / max(self.tokens, 1) - 1


def length_of(entry: Entry) -> tuple[int, ...]:
    return entry.sizes or entry.group[-1]


@dataclass
class Blind:
    """A policy that does not know lengths, except for what ``group`` makes of them."""

    policy: Scheduler
    group: Callable[[int], tuple[int, ...]]
    lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)

    wake: float | None = None
    late: list[Entry] = field(default_factory=list)

    def offer(self, entry: Entry, now: float) -> IngotError | None:
        self.lengths[id(entry)] = entry.sizes
        entry.group = self.group(entry.sizes[0])
        entry.sizes, entry.work = (), entry.samples
        return self.policy.offer(entry, now)

    def take(self, now: float) -> list[Entry]:
        batch = self.policy.take(now)
        self.wake = self.policy.wake
        for entry in batch:
            entry.group = (*entry.group, self.lengths.pop(id(entry)))
        return batch

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None:
        self.policy.finish(batch, now, seconds)


def policies(calls: Calls) -> dict[str, Callable[[], Policy]]:
    """Return the policies for an engine; each knows its calls of one text of the shortest length."""
    base = max(1.0, calls.fixed / calls.each)
    rows = {count: calls.seconds(16 * count) for count in (1, 2, 4, 8)}

    def class_of(length: int) -> tuple[int, ...]:
        return (max(0, math.ceil(math.log2(length / base))),)

    def blind(group: Callable[[int], tuple[int, ...]]) -> Policy:
        return Blind(Scheduler(_LIMITS, batching=True, latency=Latency(rows), sample_bytes=64 * 16), group)

    def by_cost() -> Policy:
        latency = Latency({work: calls.seconds(work) for work in _KNOWN})
        return Scheduler(_LIMITS, batching=True, latency=latency, sample_bytes=64, work=_WORK)

    return {"cost": by_cost, "classes": lambda: blind(class_of), "count": lambda: blind(lambda length: ())}


def alone(lengths: Sequence[int], calls: Calls) -> float:
    """Return texts a second of the engine with batches of equal lengths, which have up to 512 tokens."""
    taken = 0.0
    for length in set(lengths):
        left, most = lengths.count(length), max(1, 512 // length)
        taken += sum(calls.seconds(length * min(most, left - done)) for done in range(0, left, most))
    return len(lengths) / taken


def among_long(make: Callable[[], Policy], calls: Calls, lengths: Sequence[int], engines: int, *, long: bool) -> float:
    """Return the 99th percentile of short texts in an open loop at half of the engines' rate, with long ones or not."""
    short = [length for length in lengths if length <= _SHORT]
    rate = 0.5 / calls.seconds(sum(short) // len(short))
    simulation = Simulation(make(), calls, engines=engines)
    times = traces.poisson(rate * engines, len(short), math.inf)
    arrivals = [Arrival(each.time, length=length, client="short") for each, length in zip(times, short, strict=True)]
    if long:
        each = calls.seconds(corpus.LONGEST) / 0.25  # a quarter of an engine's time
        count = int(arrivals[-1].time / each)
        arrivals += [Arrival(number * each, length=corpus.LONGEST, client="long") for number in range(count)]
    simulation.replay(sorted(arrivals, key=lambda item: item.time))
    return simulation.clients["short"].percentile(0.99)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_sim.lengths")
    parser.add_argument("--texts", type=int, default=3000)
    options = parser.parse_args()
    lengths = corpus.lengths()[: options.texts]
    for name, profile in PROFILES.items():
        rates = alone(lengths, Calls(*profile))
        names = [*policies(Calls(*profile))]
        print(f"\n{name}: throughput of the engine alone, and padding by real tokens\n")
        print(f"| clients | {' | '.join(names)} |\n{'|---' * (1 + len(names))}|")
        for clients in CLIENTS:
            cells = []
            for policy in names:
                calls = Calls(*profile, divided=policy == "classes")
                loop = Loop(clients, 0.0002, len(lengths), lengths=lengths)
                found = Simulation(policies(calls)[policy](), calls).closed(loop)
                cells.append(f"{found.throughput / rates:.2f}, {calls.waste:.2f}")
            print(f"| {clients} | {' | '.join(cells)} |", flush=True)
        print(f"\n{name}: 99th percentile of short texts, ms alone, and with long ones as a ratio\n")
        print(f"| engines | {' | '.join(names)} |\n{'|---' * (1 + len(names))}|")
        for engines in (1, 2):
            cells = []
            for policy in names:
                calls = Calls(*profile, divided=policy == "classes")
                make = policies(calls)[policy]
                one, other = (among_long(make, calls, lengths, engines, long=long) for long in (False, True))
                cells.append(f"{1e3 * one:.1f}, {other / one:.2f}")
            print(f"| {engines} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
