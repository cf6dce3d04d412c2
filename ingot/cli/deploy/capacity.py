"""``ingot deploy capacity``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli import output
from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption, with_options
from ingot.cli.output import note, print_json, progress, say
from ingot.cli.serving.bench import read_shape, read_times
from ingot.errors import InvalidArgument

if TYPE_CHECKING:
    from ingot.deploy.capacity.calibration import Site
    from ingot.deploy.capacity.server import Server, Traffic
    from ingot.model_store import Variant
    from ingot.tensors import Array

Protocol = Literal["binary", "json", "grpc"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The load, and the latency that replicas must hold under it."""

    slo: Annotated[str, typer.Option(metavar="<p99=50ms>", help="The latency that each replica is to hold.")]
    rate: Annotated[
        float | None, typer.Option(help="Requests per second of all replicas.", show_default="the rate of the file")
    ] = None
    arrivals: Annotated[
        str,
        typer.Option(metavar="poisson|<file>", help="How requests arrive: at random, or at the times of this file."),
    ] = "poisson"
    headroom: Annotated[
        float, typer.Option(min=0, max=0.95, help="The share of each replica's capacity to leave unused.")
    ] = 0.2
    cost: Annotated[str, typer.Option(metavar="<0.25/h>", help="The price of a replica per hour, in any currency.")] = (
        ""
    )


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The machine of one replica, and the origin of its latencies."""

    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of a replica.")] = "cpu"
    cores: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="CPU cores of a replica.",
            show_default="the cores of the machine where latencies were measured",
        ),
    ] = None
    protocol: Annotated[Protocol, typer.Option(help="Protocol of the requests.")] = "binary"
    overhead: Annotated[
        str,
        typer.Option(
            metavar="<time>",
            help="CPU time of a request outside the engine, such as 60us.",
            show_default="a constant of the protocol",
        ),
    ] = ""
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure latencies and overhead on this machine, in some 25 seconds, with a server and load.",
        ),
    ] = False
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name:n,n,...>",
            help="With --measure, the shape of an input; repeatable.",
            show_default="that of the archive's first golden case",
        ),
    ] = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of inputs by name, as given."""
        return dict(map(read_shape, self.shape or []))


@with_options
def capacity(
    model: Annotated[
        str,
        typer.Argument(
            help="An archive file, or a reference such as digits:prod; #variant chooses the variant.",
            autocompletion=references,
        ),
    ],
    *,
    demand: Demand,
    variant: Annotated[
        str, typer.Option(help="The variant that is served.", show_default="the archive's preferred one")
    ] = "",
    replica: Annotated[Replica, "Replica"],
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="With --measure, load formats that can run their author's code.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page with a plot to this .html file.")] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Plan how many replicas keep a latency target at a request rate, by simulation.

    The latencies of the engine by batch size are those that the archive recorded, or are measured here.

    Examples:

        ingot deploy capacity digits:prod --rate 2000 --slo p99=50ms --cost 0.25/h --report capacity.html
        ingot deploy capacity digits:prod#int8 --rate 2000 --slo p99=50ms --cores 1 --measure
    """
    from ingot.bench.measurement import Objective
    from ingot.deploy.capacity import report as reports
    from ingot.deploy.capacity.plan import Plan, Request
    from ingot.deploy.capacity.server import Traffic
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    objective = Objective.parse(demand.slo)
    traffic = Traffic(() if demand.arrivals == "poisson" else read_times(Path(demand.arrivals)))
    request = Request(
        rate=_rate(demand.rate, traffic),
        objective=objective,
        headroom=demand.headroom,
        cost=_cost(demand.cost),
    )
    located = locate(model, Store(store))
    if variant and located.variant not in (None, variant):
        raise InvalidArgument(f"--variant {variant} and '{model}' name different variants; give one of them")
    if replica.measure and replica.overhead:
        raise InvalidArgument("--measure measures the overhead; leave --overhead out")
    if replica.shapes and not replica.measure:
        raise InvalidArgument("--shape needs --measure: the archive has latencies of one shape only")
    if report is not None:
        check_out(report)
        check_apart(report, model=located.name)
    with progress("Opening", log=replica.measure) as step:
        chosen = located.open().unpacked().variant(variant or located.variant)
        name = f"{located.name}#{chosen.name}"
        server, origin = (
            _measured(name, chosen, _site(replica, store, allow_code=allow_code), step)
            if replica.measure
            else _recorded(name, chosen, replica)
        )
        plan = Plan(request, server, traffic, step)
        source = reports.Source(**origin, command=shlex.join(["ingot", *sys.argv[1:]]))
        if report is not None:
            report.write_text(reports.html(plan, source), encoding="utf-8")
        content = reports.json(plan, source) if as_json else {}
    if report is not None:
        note(f"wrote {report}")
    if as_json:
        print_json(content)
    else:
        say(reports.text(plan, source))
    for remark in source.notes:
        note(f"note: {remark}")


def _site(replica: Replica, store: Path | None, *, allow_code: bool) -> Site:
    """Return where a replica is measured."""
    from ingot.deploy.capacity.calibration import Site
    from ingot.runtime.machine import devices

    return Site(
        cores=replica.cores or devices.cpu_count(),
        device=replica.device,
        protocol=replica.protocol,
        allow_code=allow_code,
        store=store,
        shapes=replica.shapes,
    )


def _measured(name: str, variant: Variant, where: Site, step: Callable[[str], None]) -> tuple[Server, dict[str, Any]]:
    """Return a replica as it is measured on this machine, and the fields of a source."""
    from ingot.deploy.capacity import calibration
    from ingot.runtime.machine import devices

    server = calibration.measure(name, variant, where, step)
    profile = f"measured now on {devices.describe()}"
    return server, {
        "model": name,
        "profile": profile,
        "overhead": f"measured, {where.protocol}",
        "sample": _sizes(calibration.example(variant, where.shapes)),
        "notes": [*where.notes(), *([] if where.shapes else _of_one_size(variant))],
    }


def _recorded(name: str, variant: Variant, replica: Replica) -> tuple[Server, dict[str, Any]]:
    """Return a replica by the archive's record, and the fields of a source."""
    from ingot.deploy.capacity import recorded
    from ingot.deploy.capacity.simulation import Overhead

    if replica.overhead:
        time, origin = Overhead(request=_overhead(replica.overhead)), "as given"
    else:
        time, origin = recorded.OVERHEADS[replica.protocol], f"a constant for small requests, {replica.protocol}"
    server, notes = recorded.recorded(variant, device=replica.device, cores=replica.cores, overhead=time)
    profile = f"recorded on {variant.serving.evidence.machine}"
    return server, {
        "model": name,
        "profile": profile,
        "overhead": origin,
        "sample": _sizes(recorded.sample(variant)),
        "notes": [*notes, *_of_one_size(variant)],
    }


def _sizes(inputs: Mapping[str, Array]) -> str:
    from ingot.tensors import DType  # with numpy, which --help does not need

    return ", ".join(f"{name} {DType.of(array).value}{list(array.shape)}" for name, array in inputs.items())


def _of_one_size(variant: Variant) -> list[str]:
    """Return a remark if requests of other sizes take another time."""
    from ingot.deploy.capacity import recorded

    if not recorded.varies(variant):
        return []
    shapes = " ".join(
        f"--shape {name}:{','.join(map(str, array.shape))}" for name, array in recorded.sample(variant).items()
    )
    return [f"the plan is for requests of these sizes only; to plan for yours, measure them: --measure {shapes}"]


def _rate(given: float | None, traffic: Traffic) -> float:
    rate = traffic.rate if given is None else given
    if given is None and not rate:
        raise InvalidArgument("--rate is missing: give the requests per second of all replicas")
    if not 0 < rate < 1e7:
        raise InvalidArgument(
            f"--rate {rate:g} is not a rate; give requests per second, more than 0 and below 10 million"
        )
    return rate


def _overhead(text: str) -> float:
    seconds = output.seconds("--overhead", text)
    if not 0 < seconds < 1:
        raise InvalidArgument(
            f"--overhead {text} must be over 0 and under 1 s: the CPU time per request outside the engine, such as 60us"
        )
    return seconds


def _cost(text: str) -> float | None:
    """Return the price of an hour."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(/h)?", text.strip())
    if text and not found:
        raise InvalidArgument(f"--cost '{text}' is not a price per hour; write it as 0.25/h")
    return float(found[1]) if found else None
