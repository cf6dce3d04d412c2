"""``ingot server top``: the load of a running server, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.connection import CaOption, CertKeyOption, CertOption, KeyOption, Server, only_server
from ingot.cli.options import Json
from ingot.cli.output import duration, note, print_json, printable, say, seconds, size, stdout
from ingot.cli.server.monitor import WINDOW, Monitor
from ingot.errors import IngotError, InvalidArgument

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

    from ingot.client.monitoring import ModelLoad, ServerLoad

_TIMEOUT = 10.0
_BAR = 20
_COLOURS = ("yellow", "magenta", "green", "blue")
_TITLES = ("model", "state", "variant", "device", "req/s", "rows/s", "p50", "p99", "queue", "batch")
_TEXTS = 4  # columns that are not numbers
# The columns of the table that are left out on a terminal of fewer characters.
_WIDE = 110
_LEFT_OUT = ("variant", "device", "rows/s")


def top(
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar="INGOT_MANAGEMENT_URL",
            help="Its HTTP port or management listener: http(s)://HOST:PORT, or a path of a Unix socket.",
            show_default="the one server of this user on this machine",
        ),
    ] = None,
    interval: Annotated[str, typer.Option(metavar="<time>", help="Time between two readings.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Print one table after one interval, and end.")] = False,
    key_file: KeyOption = None,
    ca_file: CaOption = None,
    cert_file: CertOption = None,
    cert_key_file: CertKeyOption = None,
    as_json: Json = False,
) -> None:
    """Show the load of a running server: models, rates, latencies, queues, errors, and where the time goes.

    Ctrl-C ends it with exit code 0. If the server does not answer at the first reading, the command fails; later it
    tries again until the server is back. A key needs the scopes infer and metrics, on a management port manage.

    Examples:

        ingot server top --server http://127.0.0.1:8000
        ingot server top --once --json
    """
    every = seconds("--interval", interval)
    if not 0.1 <= every <= 3600:
        raise InvalidArgument(f"--interval is '{interval}'; it must be from 100ms to 1h")
    if as_json and not once:
        raise InvalidArgument("--json prints one reading: add --once")

    def connect() -> Server:
        place = server or only_server("--server PLACE")
        return Server(place, key_file, ca_file, cert_file, cert_key_file, _TIMEOUT)

    monitor = Monitor(connect)
    try:
        monitor.poll()
        if once:
            time.sleep(every)
            found = monitor.poll()
            if as_json:
                print_json({"url": monitor.place, "version": monitor.version, **asdict(found)})
            else:
                _print(monitor.title, found)
        elif stdout().is_terminal:
            _watch(monitor, every)
        else:
            _follow(monitor, every, lambda found: _print(monitor.title, found), note)
    except KeyboardInterrupt:
        if once:
            raise typer.Exit(130) from None
    finally:
        monitor.close()


def _follow(
    monitor: Monitor, every: float, show: Callable[[ServerLoad], None], complain: Callable[[str], None]
) -> None:
    """Show the load repeatedly; if no server answers, show the error and try again."""
    while True:
        time.sleep(every)
        try:
            found = monitor.poll()
        except IngotError as error:  # also while a server stops
            complain(f"{error}\nTrying again every {every:g} s.")
        else:
            show(found)


def _watch(monitor: Monitor, every: float) -> None:
    """Redraw the load on the whole terminal until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    waiting = Text(f"{printable(monitor.title)}\n\nmeasuring", style="dim")
    shown: list[RenderableType] = [waiting]

    def show(found: ServerLoad) -> None:
        shown[:] = [_screen(monitor.title, found)]
        live.update(shown[0], refresh=True)

    def complain(text: str) -> None:
        live.update(Group(Text(printable(text), style="bold red"), *shown), refresh=True)

    live: Live
    with Live(waiting, console=stdout(), screen=True, auto_refresh=False) as live:
        live.refresh()
        _follow(monitor, every, show, complain)


def _screen(title: str, found: ServerLoad) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ingot.client.monitoring import STAGES

    narrow = stdout().width < _WIDE
    left_out = _LEFT_OUT if narrow else ()
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(_TITLES):
        if name not in left_out:
            table.add_column(name, justify="right" if index >= _TEXTS else "left", no_wrap=True)
    table.add_column("time", no_wrap=True)
    for model in found.models:
        # As Text: a name in brackets is not a style.
        cells = [Text(cell) for name, cell in zip(_TITLES, _cells(model), strict=True) if name not in left_out]
        table.add_row(*cells, _bar(model, _BAR // 2 if narrow else _BAR), style="" if model.state == "ready" else "red")
    legend = Text("time  ", style="dim")
    for stage, colour in zip(STAGES, _COLOURS, strict=True):
        legend.append("█", colour).append(f" {stage}  ")
    head, *rest = _lines(title, found)
    return Group(Text(head, style="bold"), table, legend, *(Text(line) for line in rest))


def _print(title: str, found: ServerLoad) -> None:
    """Print the load as lines of text, aligned, and a blank line."""
    head, *rest = _lines(title, found)
    say(head)
    rows = [
        (*_TITLES, "queue/batch/compute/encode"),
        *((*_cells(model), "/".join(f"{share:.0%}" for share in model.shares.values())) for model in found.models),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        aligned = [
            cell.rjust(width) if _TEXTS <= index < len(_TITLES) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(aligned).rstrip())
    for line in rest:
        say(line)
    say("")


def _lines(title: str, found: ServerLoad) -> list[str]:
    """Return the header, and the lines about candidates, decoders and errors."""
    parts = [title]
    if found.started is not None:
        parts.append(f"up {_age(time.time() - found.started)}")
    parts += [f"connections {found.connections:,}", f"in flight {found.in_flight:,}"]
    parts.append(f"errors/s {_count(found.errors_per_s)}")
    if found.resident_memory is not None:
        parts.append(f"memory {size(int(found.resident_memory))}")
    for gpu in found.gpus:
        memory = "" if gpu.used is None or gpu.total is None else f" {size(int(gpu.used))} of {size(int(gpu.total))}"
        parts.append(f"GPU {gpu.gpu}{memory}{'' if gpu.utilization is None else f' {gpu.utilization:.0%}'}")
    lines = ["  ".join(parts)]
    for canary in found.canaries:
        share = f"canary {canary.weight:g} %" if canary.weight else "shadow"
        shown = canary.worst_error if isinstance(canary.worst_error, str | None) else f"{canary.worst_error:.2g}"
        worst = "" if shown is None else f", worst error {shown}"
        ratio = "" if canary.latency_ratio is None else f", p99 {canary.latency_ratio:.2f} of the current model's"
        lines.append(
            f"{canary.name}:{canary.version}  {share}: {canary.agreed:,} answers agreed, {canary.differed:,} differed, "
            f"{canary.dropped:,} dropped{worst}{ratio}"
        )
    for decoder in found.decoders:
        lines.append(
            f"{decoder.name}:{decoder.version}  tokens/s {_count(decoder.tokens_per_s)}, first token "
            f"{_time(decoder.first_token)}, then {_time(decoder.between_tokens)} each, slots in use {decoder.slots:,}"
        )
    for error in sorted(found.errors, key=lambda each: (-each.recent, -each.count)):
        recent = f" (+{error.recent:,} in {WINDOW:g} s)" if error.recent else ""
        lines.append(f"{error.protocol}: {error.code.replace('_', ' ')} {error.count:,}{recent}")
    return [printable(line) for line in lines]


def _cells(model: ModelLoad) -> list[str]:
    return [
        printable(f"{model.name}:{model.version}"),
        printable(model.state),
        printable(model.variant),
        printable(model.device),
        _count(model.requests_per_s),
        _count(model.rows_per_s),
        _time(model.p50),
        _time(model.p99),
        _count(model.queue),
        "-" if model.mean_batch is None else f"{model.mean_batch:.1f}",
    ]


def _bar(model: ModelLoad, length: int) -> Text:
    """Return the shares as coloured blocks, whose ends are rounded so that all of them fill the bar."""
    from rich.text import Text

    bar, end, total = Text(), 0, 0.0
    for share, colour in zip(model.shares.values(), _COLOURS, strict=False):
        total += share
        width = round(length * total) - end
        bar.append("█" * width, colour)
        end += width
    return bar


def _count(value: float) -> str:
    return f"{value:,.1f}" if 0 < value < 10 and value != int(value) else f"{value:,.0f}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else duration(value)


def _age(value: float) -> str:
    """Return a duration in its two largest units."""
    whole = max(0, int(value))
    for unit, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name} {whole % unit // below}{smaller}"
    return f"{whole}s"
