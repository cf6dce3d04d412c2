"""How many replicas a rate needs, and what is left when one of them is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ingot.bench.measurement import Objective
from ingot.deploy.capacity.server import Server, Traffic
from ingot.deploy.capacity.simulation import Result
from ingot.errors import InvalidArgument
from ingot.report.units import duration

# Shares of a replica's capacity that the curve of latencies shows.
_SHOWN = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load of one replica: requests per second and latencies in seconds; ``busy`` is the share of its busiest part.

    That is the event loop or the engine; both together where they share the cores.
    """

    rate: float
    p50: float
    p99: float
    p999: float
    batch: float
    busy: float

    @classmethod
    def of(cls, rate: float, result: Result, server: Server) -> Load:
        """Return the figures of a simulation."""
        loop, engine = result.loop / result.span, result.engine / result.span
        busy = loop + engine if server.shared else max(loop, engine)
        p50, p99, p999 = (result.percentile(share) for share in (0.5, 0.99, 0.999))
        return cls(rate=rate, p50=p50, p99=p99, p999=p999, batch=result.batch, busy=min(busy, 1.0))


@dataclass(frozen=True, kw_only=True)
class Request:
    """The load and the objective to plan for.

    Attributes:
        rate: requests per second of all replicas.
        objective: what each replica must hold.
        headroom: the share of each replica's capacity that stays unused.
        cost: of a replica per hour; None if unknown.
    """

    rate: float
    objective: Objective
    headroom: float = 0.2
    cost: float | None = None


class Plan:
    """The replicas for a request. Load balancing is assumed to spread requests evenly, at random.

    Args:
        request: the load and the objective.
        server: one replica.
        traffic: how requests arrive.
        step: called with a line of text before each simulation.

    Raises:
        InvalidArgument: no rate holds the objective.
    """

    def __init__(
        self, request: Request, server: Server, traffic: Traffic, step: Callable[[str], None] = lambda _: None
    ):
        self.request = request
        self.server = server
        self._traffic = traffic
        self._step = step
        self._loads: dict[float, Load] = {}
        self.capacity = self._search()
        """Requests per second of one replica within the objective."""

    @cached_property
    def replicas(self) -> int:
        return max(1, math.ceil(self.request.rate / (self.capacity * (1 - self.request.headroom)) - 1e-9))

    @cached_property
    def chosen(self) -> Load:
        """The load of each replica."""
        return self._load(self.request.rate / self.replicas)

    @property
    def headroom(self) -> float:
        """The share of the capacity of all replicas that the rate leaves unused."""
        return 1 - self.request.rate / (self.replicas * self.capacity)

    @cached_property
    def lost(self) -> Load | None:
        """The load of each remaining replica when one is lost; None if no replica remains."""
        return self._load(self.request.rate / (self.replicas - 1)) if self.replicas > 1 else None

    @property
    def survives(self) -> bool:
        """Whether the objective still holds when one replica is lost."""
        return self.replicas > 1 and self.request.rate <= (self.replicas - 1) * self.capacity

    @cached_property
    def curve(self) -> list[Load]:
        """Loads up to the capacity, by rate."""
        shown = [self._load(share * self.capacity) for share in (*_SHOWN, 1.0)]
        return sorted({load.rate: load for load in (*shown, self.chosen)}.values(), key=lambda load: load.rate)

    @property
    def cost(self) -> float | None:
        """Per hour, of all replicas."""
        return None if self.request.cost is None else self.request.cost * self.replicas

    @property
    def cost_per_million(self) -> float | None:
        """The cost of a million requests."""
        return None if self.cost is None else self.cost / self.request.rate / 3600 * 1e6

    def json(self) -> dict[str, Any]:
        """Return the plan for programs; times are in seconds."""
        request, server = self.request, self.server
        return {
            "rate": request.rate,
            "objective": {"quantile": request.objective.quantile, "seconds": request.objective.seconds},
            "replica": {
                "capacity": self.capacity,
                "ceiling": server.ceiling,
                "cores": server.cores,
                "engine_threads": server.threads,
                "device": server.device,
                "latency": {str(rows): seconds for rows, seconds in sorted(server.seconds.items())},
                "overhead": vars(server.overhead),
            },
            "replicas": self.replicas,
            "headroom": self.headroom,
            "each": vars(self.chosen),
            "one_lost": None if self.lost is None else {**vars(self.lost), "holds": self.survives},
            "cost_per_hour": self.cost,
            "cost_per_million": self.cost_per_million,
            "curve": [vars(load) for load in self.curve],
        }

    def _search(self) -> float:
        objective, best, tried = self.request.objective, 0.0, []
        for rate, result, held in self.server.search(objective, self._traffic):
            self._step(f"Simulating one replica: {rate:,.0f} requests per second")
            self._loads[rate] = Load.of(rate, result, self.server)
            tried.append((rate, result))
            best = max(best, rate) if held else best
        if not best:
            rate, result = min(tried, key=lambda each: each[0])
            found = duration(result.percentile(objective.quantile))
            raise InvalidArgument(
                f"a {objective} cannot be held: at the lowest rate that was simulated, {rate:,.3g} requests per "
                f"second, it is {found}; one request alone takes {duration(self.server.alone)}, which is the fastest "
                "possible; allow more time"
            )
        return best

    def _load(self, rate: float) -> Load:
        if rate not in self._loads:
            self._step(f"Simulating one replica: {rate:,.0f} requests per second")
            arrivals = self._traffic.at(rate, 60 * self.request.objective.seconds)
            self._loads[rate] = Load.of(rate, self.server.run(arrivals), self.server)
        return self._loads[rate]
