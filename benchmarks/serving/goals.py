"""The goals: figures from the records of a run, as ratios within each round, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

COMPILED = "ingot, compiled"

Record = dict[str, Any]
Values = list[float]


@dataclass(frozen=True)
class Goal:
    """A figure. ``least`` or ``most`` is its limit; without either it is only reported. ``values`` returns the figure
    of every round that has it from the records of a run.
    """

    title: str
    values: Callable[[Sequence[Record]], Values]
    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def goal(self) -> str:
        if self.least is None and self.most is None:
            return ""
        sign, number = ("≥", self.least) if self.least is not None else ("≤", self.most)
        return f"{sign} {number:g}{self.unit or 'x'}"

    def met(self, values: Values) -> str:
        """Return whether every round meets it, or in how many it is met."""
        if not self.goal or not values:
            return ""
        least, most = (-math.inf if self.least is None else self.least), (math.inf if self.most is None else self.most)
        count = sum(least <= value <= most for value in values)
        return "yes" if count == len(values) else f"in {count} of {len(values)} rounds" if count else "no"


def closed(contestant: str, model: str, form: str, clients: int) -> dict[str, Any]:
    """Return the key fields of a record of a closed loop."""
    return {"kind": "closed", "contestant": contestant, "model": model, "format": form, "clients": clients}


def by_round(records: Sequence[Record], what: dict[str, Any], key: str) -> dict[int, float]:
    """Return one figure of the records that match, by round."""
    return {r["round"]: r[key] for r in records if all(r.get(name) == value for name, value in what.items())}


def ratio(one: dict[str, Any], other: dict[str, Any], key: str) -> Callable[[Sequence[Record]], Values]:
    """Divide round by round."""

    def values(records: Sequence[Record]) -> Values:
        above, below = by_round(records, one, key), by_round(records, other, key)
        return [above[number] / below[number] for number in above if below.get(number)]

    return values


def goals() -> list[Goal]:
    """Return the rows of the table."""
    return [*_cost(), *_latency(), *_throughput(), *_goodput(), *_start()]


def _cost() -> list[Goal]:
    rows = [
        Goal(
            f"tiny, 32 clients, {form}: the server's CPU a request, source over compiled",
            ratio(closed("ingot", "tiny", form, 32), closed(COMPILED, "tiny", form, 32), "cpu_us"),
            least=least,
        )
        for form, least in (("json", 1.9), ("binary", 2.0), ("grpc", 1.9))
    ]
    rows += [
        Goal(
            f"tiny, 32 clients, {form}: the server's CPU a request, compiled, against mosec",
            ratio(closed(COMPILED, "tiny", form, 32), closed("mosec", "tiny", form, 32), "cpu_us"),
            most=most,
        )
        for form, most in (("json", 0.5), ("binary", 0.55))
    ]
    ours, grpcio = closed("ingot", "tiny", "binary", 32), closed("ingot, grpcio", "tiny", "grpc", 32)
    return [
        *rows,
        Goal("tiny, 32 clients: the server's CPU a request, binary", _figure(ours, "cpu_us"), most=25, unit=" us"),
        Goal("the same, gRPC", _figure({**ours, "format": "grpc"}, "cpu_us"), most=20, unit=" us"),
        Goal("the same, gRPC by grpcio", _figure(grpcio, "cpu_us"), unit=" us"),
    ]


def _latency() -> list[Goal]:
    ours = closed("ingot", "tiny", "binary", 1)
    return [
        Goal(
            "tiny, 1 client, binary: p50 against the naive FastAPI server, in JSON",
            ratio(ours, closed("fastapi", "tiny", "json", 1), "p50_ms"),
            most=0.6,
        ),
        Goal(
            "the same, against that server with raw bytes",
            ratio(ours, closed("fastapi", "tiny", "binary", 1), "p50_ms"),
        ),
    ]


def _throughput() -> list[Goal]:
    rows = [
        Goal(
            f"tiny, 32 clients, {form}: requests/s{how} against mosec",
            ratio(closed(name, "tiny", form, 32), closed("mosec", "tiny", form, 32), "rate"),
            least=least,
        )
        for name, how, form, least in (
            ("ingot", "", "json", 1.3),
            ("ingot", "", "binary", 1.3),
            (COMPILED, ", compiled,", "json", 2.0),
            (COMPILED, ", compiled,", "binary", 1.8),
        )
    ]
    grpc = closed("ingot", "tiny", "grpc", 32)
    bare = {"kind": "bare", "contestant": "h2", "model": "tiny"}
    rows += [
        Goal("tiny, 32 streams, gRPC: requests/s against the faster of KServe and MLServer*", _best_grpc, least=8),
        Goal("tiny, 32 streams, gRPC: against a bare transport's echo", ratio(grpc, bare, "rate"), least=0.7),
    ]
    rows += [
        Goal(
            f"wide, 32 clients, {form}: share of the raw engine's rate at batch 32",
            ratio(closed("ingot", "wide", form, 32), {"kind": "raw", "model": "wide", "batch": 32}, "rate"),
            least=0.95,
        )
        for form in ("binary", "grpc")
    ]
    rows += [
        Goal(
            f"{name}, 8 clients, binary: share of the raw engine's best rate",
            _share_of_engine(name),
            least=0.98,
        )
        for name in ("minilm", "cnn")
    ]
    return rows


def _goodput() -> list[Goal]:
    rows = []
    for name in ("wide", "minilm"):
        ours = {"kind": "goodput", "contestant": "ingot", "model": name}
        theirs = {**ours, "contestant": "mosec"}
        rows += [
            Goal(
                f"{name}, goodput within 50 ms at 1x the capacity: against mosec",
                ratio({**ours, "share": 1.0}, {**theirs, "share": 1.0}, "rate"),
                least=1.2,
            ),
            Goal(f"{name}, goodput within 50 ms at 3x: share of the capacity", _share_of_capacity(name), least=0.95),
        ]
    return rows


def _start() -> list[Goal]:
    ours, theirs = closed("ingot", "tiny", "binary", 32), closed("mosec", "tiny", "binary", 32)
    return [
        Goal("tiny, start to first answer, from an archive: against mosec", ratio(ours, theirs, "start_s"), most=1.0),
        Goal("tiny, resident memory (PSS) after the load: against mosec", ratio(ours, theirs, "memory"), most=1.0),
    ]


def _figure(what: dict[str, Any], key: str) -> Callable[[Sequence[Record]], Values]:
    return lambda records: list(by_round(records, what, key).values())


def _best_grpc(records: Sequence[Record]) -> Values:
    """The slow peers take part in the first round only; every round of ours is compared with the best of them."""
    peers = [
        r["rate"]
        for r in records
        if not r["contestant"].startswith("ingot")
        and all(r.get(key) == value for key, value in (("kind", "closed"), ("model", "tiny"), ("format", "grpc")))
    ]
    ours = by_round(records, closed("ingot", "tiny", "grpc", 32), "rate")
    return [rate / max(peers) for rate in ours.values()] if peers else []


def _share_of_engine(name: str) -> Callable[[Sequence[Record]], Values]:
    def values(records: Sequence[Record]) -> Values:
        ours = by_round(records, closed("ingot", name, "binary", 8), "rate")
        engine = [by_round(records, {"kind": "raw", "model": name, "batch": batch}, "rate") for batch in (1, 8, 32)]
        return [rate / max(rates[number] for rates in engine) for number, rate in ours.items()]

    return values


def _share_of_capacity(name: str) -> Callable[[Sequence[Record]], Values]:
    ours = {"kind": "goodput", "contestant": "ingot", "model": name, "share": 3.0}
    return lambda records: [
        good / by_round(records, ours, "capacity")[number] for number, good in by_round(records, ours, "rate").items()
    ]
