"""One round: every contestant in turn on every model, so that other load on the machine affects all of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.contestants import Contestant, Ingot, Start, contestants
from benchmarks.serving.goals import Record, by_round, closed
from benchmarks.serving.loads import (
    H2load,
    Load,
    Wrk,
    WrongAnswer,
    checked_wrk,
    finish_h2load,
    open_loop,
    python_load,
    start_h2load,
)
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import SERVER_CORE, NoAnswer, Process, free_ports, pinned
from benchmarks.serving.wires import OpenBinary, OpenGrpc, OpenJson, Wire, framed

SLO_MS = 50.0
OFFERED = (0.5, 1.0, 2.0, 3.0)
GOODPUT = ("ingot", "ingot, compiled", "mosec")
GREETING = OpenJson()


@dataclass(frozen=True)
class Plan:
    """What a run measures, and for how long.

    Attributes:
        build: where models, environments and logs are.
        seconds: of a load on a fast model; slow models get three times as much.
        open_seconds: of an open loop.
        clients: closed loops, by how many clients.
        goodput: models that get open loops too.
        formats: those that are measured, of the models'.
        wrk: whether ``wrk`` is the load generator; otherwise the client in Python.
    """

    build: Path
    peers: Sequence[str]
    models: Sequence[str]
    rounds: int = 3
    seconds: float = 1.2
    open_seconds: float = 5.0
    clients: Sequence[int] = (1, 8, 32)
    goodput: Sequence[str] = ("wide", "minilm")
    formats: Sequence[str] = ("json", "binary", "grpc")
    wrk: bool = True


class Run:
    """A run in progress. ``records`` are the measurements. ``failures`` are errors: a run with any has failed, but
    continues with the rest. ``absent`` are peers that do not start here, with their messages.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.records: list[Record] = []
        self.failures: list[str] = []
        self.absent: dict[str, str] = {}

    def round(self, number: int) -> None:
        """Measure all once."""
        names = [*self.plan.peers]
        # Contestants of every round rotate among themselves; the others run in the first round only.
        names.sort(key=lambda name: not contestants()[name].thorough)
        thorough = sum(contestants()[name].thorough for name in names)
        first = number % max(thorough, 1)
        turned = [*names[first:thorough], *names[:first], *names[thorough:]]
        for name in self.plan.models:
            served = model(name, self.plan.build)
            if name in ("tiny", "wide") and self.plan.wrk:
                try:
                    self._bare(number, served)
                except (WrongAnswer, NoAnswer) as error:
                    self._failed(f"bare transports, {served.name}: {error}")
            for contestant in (contestants()[peer] for peer in turned):
                if contestant.name in self.absent:
                    continue
                if contestant.name == "ingot":  # other figures are shares of it
                    self._raw(number, served)
                if name in contestant.models and (contestant.thorough or number == 0):
                    self._contestant(number, contestant, served)
            if name in self.plan.goodput:
                self._goodput(number, served, [peer for peer in turned if peer in GOODPUT])

    def _contestant(self, number: int, contestant: Contestant, served: Model) -> None:
        for formats in contestant.processes([form for form in served.spec.formats if form in self.plan.formats]):
            try:
                self._process(number, contestant, served, formats)
            except (WrongAnswer, SystemExit) as error:
                self._failed(f"{contestant.name}, {served.name} {'/'.join(formats)}: {error}")
            except NoAnswer as error:
                if isinstance(contestant, Ingot):
                    raise
                self.absent[contestant.name] = str(error)
                _say(f"{contestant.name} is left out: {error}")

    def _failed(self, what: str) -> None:
        self.failures.append(what)
        _say(f"FAILED {what}")

    def _process(self, number: int, contestant: Contestant, served: Model, formats: Sequence[str]) -> None:
        with serving(contestant, served, formats[0], self.plan.build) as server:
            for form in formats:
                load = self._loader(contestant, served, form, server)
                for clients in self.plan.clients:
                    if served.spec.exact or clients != 32:
                        found = load(clients)
                        self._add(
                            "closed",
                            number,
                            contestant.name,
                            served,
                            format=form,
                            clients=clients,
                            memory=server.process.usage().memory,
                            start_s=server.seconds,
                            **asdict(found),
                        )

    def _loader(self, contestant: Contestant, served: Model, form: str, server: Server) -> Any:
        seconds, wire = self.plan.seconds, contestant.wires[form]
        if form == "grpc":
            h2load = H2load(served, wire, server.start.grpc_port, server.start.work)
            return lambda clients: h2load.load(server.process, clients, seconds)
        port = server.start.port
        if served.spec.exact and self.plan.wrk:
            wrk = checked_wrk(served, wire, port, server.start.work)
            return lambda clients: wrk.load(server.process, clients, seconds)
        build = self.plan.build
        slow = seconds if served.spec.exact else 3 * seconds
        return lambda clients: python_load(contestant.name, served, form, port, build, server.process, clients, slow)

    def _raw(self, number: int, served: Model) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.limits.raw", served.name, "--build", str(self.plan.build)]
        command += ["--seconds", str(self.plan.seconds if served.spec.exact else 3 * self.plan.seconds)]
        output = subprocess.run(pinned(command, SERVER_CORE), check=True, capture_output=True, text=True).stdout
        for batch, rate in json.loads(output).items():
            self._add("raw", number, "engine", served, batch=int(batch), rate=rate)

    def _bare(self, number: int, served: Model) -> None:
        """Measure bare transports that answer as many bytes as Ingot does."""
        width = served.expected.shape[1]
        wires: tuple[tuple[Wire, int], ...] = ((OpenJson(), 110 + 13 * width), (OpenBinary(), 140 + 4 * width))
        with tempfile.TemporaryDirectory() as work:
            for wire, size in wires:
                request = wire.request(served, 0).http()
                with bare("http_echo", size, Path(work)) as (process, port):
                    process.wait(port, request)
                    wrk = Wrk([request], [b""], port, Path(work))
                    found = wrk.load(process, 32, self.plan.seconds)
                    self._add("bare", number, "http", served, format=wire.format, clients=32, **asdict(found))
            with bare("h2_echo", 40 + 4 * width, Path(work)) as (process, port):
                found = self._bare_grpc(served, process, port, Path(work))
                self._add("bare", number, "h2", served, format="grpc", clients=32, **asdict(found))

    def _bare_grpc(self, served: Model, process: Process, port: int, work: Path) -> Load:
        request = OpenGrpc().request(served, 0)
        body, log = work / "body", work / "h2load.log"
        body.write_bytes(framed(request.body))
        start_h2load(request.path, body, log, port, 32, 0.4).communicate()
        before = process.usage().cpu
        started = start_h2load(request.path, body, log, port, 32, self.plan.seconds)
        load = finish_h2load(started, log, self.plan.seconds, None)
        cpu = process.usage().cpu - before
        return Load(load.requests, load.rate, load.p50_ms, load.p99_ms, 0, 1e6 * cpu / load.requests)

    def _goodput(self, number: int, served: Model, names: Sequence[str]) -> None:
        """Offer multiples of the best contestant's rate in this round's closed loop."""
        capacity = max(
            (
                by_round(self.records, closed(name, served.name, "binary", clients), "rate").get(number, 0.0)
                for name in names
                for clients in self.plan.clients
            ),
            default=0.0,
        )
        if not capacity:
            return
        for name in names:
            try:
                self._offer(number, contestants()[name], served, capacity)
            except (WrongAnswer, NoAnswer, SystemExit) as error:
                self._failed(f"{name}, {served.name} goodput: {error}")

    def _offer(self, number: int, contestant: Contestant, served: Model, capacity: float) -> None:
        build, seconds = self.plan.build, self.plan.open_seconds
        with serving(contestant, served, "binary", build, slo_ms=SLO_MS) as server:
            for share in OFFERED:
                rate = share * capacity
                port = server.start.port
                found = open_loop(contestant.name, served, "binary", port, build, rate, seconds, seed=number)
                times = found.pop("latencies")
                good = sum(1e3 * time <= SLO_MS for time in times) / found["seconds"]
                values = {"share": share, "capacity": capacity, "rate": good, "answered": len(times), **found}
                self._add("goodput", number, contestant.name, served, **values)

    def _add(self, kind: str, number: int, contestant: str, served: Model, **values: Any) -> None:
        # Fields of the record win over equally named ones of the load.
        record = {"kind": kind, "round": number, "contestant": contestant, "model": served.name, **values}
        self.records.append(record)
        shown = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in values.items()
            if key in ("format", "clients", "batch", "share", "rate", "p50_ms", "cpu_us", "refused")
        )
        _say(f"{number} {served.name} {contestant} {kind} {shown}")


@dataclass(frozen=True)
class Server:
    """A contestant that runs, and the seconds that it took to its first answer."""

    process: Process
    start: Start
    seconds: float


@contextlib.contextmanager
def serving(
    contestant: Contestant, served: Model, form: str, build: Path, slo_ms: float | None = None
) -> Iterator[Server]:
    """Run a contestant until the block ends; it has answered once when the block begins.

    Raises:
        NoAnswer: it does not answer.
    """
    with tempfile.TemporaryDirectory() as work:
        port, grpc_port = free_ports(2)
        start = Start(served, port, grpc_port, form, build, Path(work), slo_ms)
        (build / "logs").mkdir(exist_ok=True)
        log = build / "logs" / f"{contestant.name}-{served.name}-{form}.log"
        process = Process(contestant.command(start), contestant.environment(start), log)
        try:
            wire = GREETING if form == "grpc" else contestant.wires[form]
            seconds, _ = process.wait(start.port, wire.request(served, 0).http(), refusals=slo_ms is not None)
            yield Server(process, start, seconds)
        finally:
            process.close()


@contextlib.contextmanager
def bare(name: str, size: int, work: Path) -> Iterator[tuple[Process, int]]:
    """Run a bare transport until the block ends.

    Raises:
        NoAnswer: it does not listen.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", f"benchmarks.serving.limits.{name}", str(port), str(size)]
    process = Process(command, {}, work / "log")
    try:
        process.listens(port)
        yield process, port
    finally:
        process.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
