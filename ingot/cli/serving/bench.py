"""``ingot bench``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli import interrupts, output
from ingot.cli.connection import ClientAccess, api_key, naming_key_options
from ingot.cli.options import with_options
from ingot.cli.output import note, print_json, say, stdout
from ingot.errors import InvalidArgument, Unavailable, write_error
from ingot.report import units

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from ingot.bench.measurement import Bench, Objective, Point
    from ingot.bench.plan import Arrivals
    from ingot.bench.results import Report
    from ingot.bench.target import Protocol

_CLIENTS = "1,4,16,64"


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model under load."""

    url: Annotated[str, typer.Argument(help="http://host:port or grpc://host:port; with TLS https:// or grpcs://.")]
    model: Annotated[str, typer.Argument(help="The model's name on the server.")]
    version: Annotated[str, typer.Option(help="The model's version.", show_default="the server's choice")] = ""
    protocol: Annotated[
        str,
        typer.Option(
            metavar="<name>",
            help="binary, json, grpc, grpc-stream, torchserve or openai.",
            show_default="binary over HTTP, grpc over gRPC",
        ),
    ] = ""

    def known_protocol(self) -> Protocol | None:
        """Return the protocol; None if none was named.

        Raises:
            InvalidArgument: it is unknown.
        """
        from ingot.bench.target import PROTOCOLS

        found = next((name for name in PROTOCOLS if name == self.protocol), None)
        if self.protocol and found is None:
            raise InvalidArgument(f"--protocol '{self.protocol}' is not one of {', '.join(PROTOCOLS)}")
        return found


@dataclass(frozen=True, kw_only=True)
class Load:
    """The times at which requests are sent."""

    clients: Annotated[
        str,
        typer.Option(
            "--clients",
            "-c",
            metavar="<n,n,...>",
            help="Closed loop: each client sends its next request when the last one is answered.",
            show_default=_CLIENTS,
        ),
    ] = ""
    rate: Annotated[
        str,
        typer.Option(
            metavar="<n,n,...>",
            help="Open loop: requests per second, whatever the server does. Latencies count from when each is due.",
        ),
    ] = ""
    times: Annotated[
        Path | None,
        typer.Option(
            help="Open loop: replay requests at the times of this file, seconds from the start, one per line."
        ),
    ] = None
    slo: Annotated[
        str,
        typer.Option(metavar="<p99=50ms>", help="Find the highest rate that holds this latency."),
    ] = ""
    arrivals: Annotated[str, typer.Option(metavar="<name>", help="Of --rate and --slo: poisson or fixed.")] = "poisson"

    @property
    def open(self) -> bool:
        """Whether requests are sent at times that do not depend on responses."""
        return bool(self.rate or self.times or self.slo)

    def check(self) -> None:
        """Raise InvalidArgument if options contradict each other."""
        if sum(map(bool, (self.clients, self.rate, self.times, self.slo))) > 1:
            raise InvalidArgument("--clients, --rate, --times and --slo exclude each other: give one of them")
        if self.arrivals not in ("poisson", "fixed"):
            raise InvalidArgument(f"--arrivals '{self.arrivals}' is not poisson or fixed")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of the requests."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="Inputs: an .npz file, requests as .json, what --record wrote; for torchserve any body; "
            "for openai bodies of /v1/completions as .json.",
            show_default="random values",
        ),
    ] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="<name:n,n,...>", help="The shape of a random input; repeatable."),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples per request.")] = 1
    seed: Annotated[int, typer.Option(help="Of random inputs and arrivals.")] = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The duration of a measurement, and the connections that send its load."""

    seconds: Annotated[
        int | None,
        typer.Option(min=1, help="Measure for this long.", show_default="until it is stable"),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, help="Seconds before each measurement.")] = 1
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=10,
            help="It is stable when rate and mean latency of three seconds in a row differ by no more than this share.",
        ),
    ] = 0.1
    most_seconds: Annotated[int, typer.Option(min=1, help="Measure no longer, stable or not.")] = 15
    connections: Annotated[
        int | None,
        typer.Option(
            min=1, help="Connections to the server.", show_default="one per client; gRPC: 1; open loops: 128; gRPC: 2"
        ),
    ] = None
    processes: Annotated[int, typer.Option(min=1, help="Processes that send the load.")] = 1
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a request has failed.")] = 60.0


@with_options
def bench(
    served: Served,
    load: Annotated[Load, "Load (one of these)"],
    inputs: Annotated[Inputs, "Inputs"],
    measurement: Annotated[Measurement, "Measurement"],
    access: Annotated[ClientAccess, "Access"],
    report: Annotated[Path | None, typer.Option(help="Write a page with plots to this .html file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line for each load to this .csv file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Load a server and report throughput and latency.

    The server can be Ingot, or any other that speaks the Open Inference Protocol (Triton, KServe, MLServer),
    TorchServe's API, or OpenAI's: then it also reports the time to the first token and between tokens.

    Ctrl-C ends the measurement, prints the results so far and exits with 130.

    Examples:

        ingot bench http://127.0.0.1:8000 digits --clients 1,8,32 --report load.html
        ingot bench grpc://127.0.0.1:8001 digits --slo p99=50ms
        ingot bench http://127.0.0.1:8000 qwen --protocol openai --clients 1,16
    """
    from ingot.bench.measurement import Bench, Objective, Rule
    from ingot.bench.results import Report
    from ingot.bench.target import Credentials, Target

    load.check()
    chosen = served.known_protocol()
    counts = _numbers("--clients", load.clients or ("" if load.open else _CLIENTS), whole=True)
    rates = _numbers("--rate", load.rate)
    recorded = () if load.times is None else read_times(load.times)
    objective = Objective.parse(load.slo) if load.slo else None
    shapes = dict(read_shape(text) for text in inputs.shape or [])
    rule = Rule(
        warmup=measurement.warmup,
        windows=measurement.seconds,
        tolerance=measurement.tolerance,
        most=measurement.most_seconds,
    )
    url, model, version = served.url, served.model, served.version
    known = Credentials(
        key=api_key(access.key_file),
        ca_file=access.ca_file,
        cert_file=access.cert_file,
        cert_key_file=access.cert_key_file,
    )
    connections, processes = measurement.connections, measurement.processes
    with (
        naming_key_options(),
        Target(url, model, version=version, protocol=chosen, credentials=known, timeout=measurement.timeout) as target,
    ):
        payload = target.payload(inputs.data, shapes, inputs.batch, inputs.seed)
        target.check(payload)
        arrivals: Arrivals = "fixed" if load.arrivals == "fixed" else "poisson"
        plan = target.plan(payload, arrivals=arrivals, seed=inputs.seed)
        title = f"{model}{f':{version}' if version else ''} at {url}, {target.protocol}"
        note(f"{title}: {payload.text}")
        best, interrupted = None, False
        with _Screen(title, quiet=as_json) as screen:
            runner = Bench(target, plan, payload.samples, rule, processes=processes, show=screen.show)
            try:
                if objective is not None:
                    best = _search(runner, objective, connections, screen)
                else:
                    for point in _points(runner, [int(count) for count in counts], rates, recorded, connections):
                        screen.keep(point)
            except KeyboardInterrupt:
                interrupted = True
    made = Report(
        target=title,
        payload=payload.text,
        command=shlex.join(["ingot", *sys.argv[1:]]),
        points=screen.points,
        objective=objective,
        best=best,
    )
    if interrupted:
        if not made.points:
            raise typer.Exit(130)
        note("these are the results so far")
    _finish(made, report, csv, as_json=as_json, processes=processes)
    if interrupted:
        raise typer.Exit(130)


def _points(
    runner: Bench, clients: Sequence[int], rates: Sequence[float], times: Sequence[float], connections: int | None
) -> Iterator[Point]:
    for count in clients:
        yield runner.closed(count, connections)
    for rate in rates:
        yield runner.opened(rate, connections)
    if times:
        yield runner.replayed(times, connections)


def _search(runner: Bench, objective: Objective, connections: int | None, screen: _Screen) -> Point | None:
    best: Point | None = None
    for point, held in runner.search(objective, connections):
        screen.keep(point)
        if held and (best is None or point.offered > best.offered):
            best = point
    return best


class _Screen:
    """The table, which is redrawn while it grows on a terminal, and otherwise printed at the end."""

    def __init__(self, title: str, *, quiet: bool):
        self.points: list[Point] = []
        self._title = title
        self._quiet = quiet
        self._live: Live | None = None
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> _Screen:
        from rich.live import Live

        if not self._quiet and stdout().is_terminal:
            self._live = Live(self._table([]), console=stdout(), refresh_per_second=4, transient=True)
            self._shown.enter_context(self._live)
            self._shown.enter_context(interrupts.displayed(self._live.console.print))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        if not self._quiet and self.points:
            stdout().print(self._table(self.points))

    def show(self, point: Point) -> None:
        """Show a point that is being measured."""
        if self._live is not None:
            self._live.update(self._table([*self.points, point]))
        elif point.done and not self._quiet:
            late = f", p99 {output.duration(point.quantile(0.99))}" if len(point.total.latencies) else ""
            note(f"{point.name}: {units.rate(point.total.rate)} requests/s{late}")

    def keep(self, point: Point) -> None:
        """Add a measured point."""
        self.points.append(point)

    def _table(self, points: Sequence[Point]) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        from ingot.bench.results import LEGEND, shown

        titles, rows = shown(points)
        table = Table(title=self._title, caption=LEGEND, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for cells in rows:
            table.add_row(*cells)
        return table


def _finish(made: Report, page: Path | None, csv: Path | None, *, as_json: bool, processes: int) -> None:
    from ingot.bench.results import warnings

    for path, content in ((page, made.html), (csv, made.csv)):
        if path is not None:
            try:
                path.write_text(content(), encoding="utf-8")
            except OSError as error:
                raise write_error(f"cannot write {path}", error) from error
            note(f"wrote {path}")
    if as_json:
        print_json(made.json())
    for point in made.points:
        for text in (*warnings(point, processes), *_errors(point)):
            note(text)
    if made.objective is not None and not as_json:
        say(made.verdict())
    if not any(len(point.total.latencies) for point in made.points):
        remedy = "; measure longer, with --seconds, or give a higher --rate"
        raise Unavailable("no request was answered" + remedy * (not any(point.total.failed for point in made.points)))
    if made.objective is not None and made.best is None:
        raise typer.Exit(1)


def _errors(point: Point) -> list[str]:
    most = point.total.errors.most_common(3)
    return [f"{point.name}: {count:,} requests failed: {text}" for text, count in most]


def _numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    """Return the positive numbers of a list."""
    try:
        found = [int(part) if whole else float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [-1]
    if any(not 0 < number < 1e7 for number in found):
        raise InvalidArgument(
            f"{option} '{text}' is not a list of {'counts' if whole else 'rates'}; write it as 1,8,32"
        )
    return [float(number) for number in found]


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the name and the sizes of ``image:1,3,224,224``. Raises InvalidArgument for another form."""
    name, colon, sizes = text.rpartition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not colon or not name or not shape or min(shape) < 0:
        raise InvalidArgument(f"--shape '{text}' is not a shape; write it as image:1,3,224,224")
    return name, shape


def read_times(path: Path) -> tuple[float, ...]:
    """Return the times of a file; the first field of each line counts, so that other columns may follow."""
    try:
        lines = path.read_text().splitlines()
        fields = [line.replace(",", " ").split() for line in lines if line[:1] != "#"]
        found = sorted(float(field[0]) for field in fields if field)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not a file of times, a number of seconds in each line: {error}") from error
    if not found or not all(0 <= time <= 86400 for time in found):
        raise InvalidArgument(f"{path} holds no times from 0 to 86400 seconds")
    return tuple(found)
