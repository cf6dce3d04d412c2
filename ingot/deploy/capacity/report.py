"""A plan as text and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ingot.deploy.capacity.plan import Load, Plan
from ingot.report import charts, pages
from ingot.report.units import counted, duration


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the figures of a plan are from.

    Attributes:
        model: the archive and its variant.
        profile: where the latencies of the engine are from.
        overhead: where the times around the engine are from.
        sample: the inputs of a request, whose sizes the latencies depend on.
        notes: what the plan does not cover.
        command: the command that makes the plan.
    """

    model: str
    profile: str
    overhead: str
    sample: str
    notes: Sequence[str] = ()
    command: str = ""


def title(plan: Plan) -> str:
    """Return the target of a plan in one line: its rate and its objective."""
    return f"{_rate(plan.request.rate)} requests per second with a {plan.request.objective}"


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan as terms and texts."""
    request = plan.request
    rows = [
        ("capacity of a replica", f"{_rate(plan.capacity)} requests per second within the objective"),
        ("replicas", f"{plan.replicas}, with {_rate(request.rate / plan.replicas)} requests per second each"),
        ("headroom", f"{plan.headroom:.0%} of the capacity is unused; at least {request.headroom:.0%} was asked for"),
        ("latencies", _latencies(plan.chosen)),
        ("mean batch", f"{plan.chosen.batch:.1f}"),
        ("one replica lost", _without_one(plan)),
    ]
    if plan.cost is not None and plan.cost_per_million is not None:
        rows.append(("cost", f"{plan.cost:,.4g} per hour, {plan.cost_per_million:,.3g} per million requests"))
    return rows


def basis(plan: Plan, source: Source) -> list[tuple[str, str]]:
    """Return the assumptions of the plan as terms and texts."""
    server, overhead = plan.server, plan.server.overhead
    cores = counted(server.cores, "core")
    if server.device != "cpu":
        sharing = f"{cores} for the event loop; the engine runs on {server.device}"
    else:
        threads = counted(server.threads, "thread")
        apart = "the event loop shares the engine's cores" if server.shared else "the event loop has a core"
        sharing = f"{cores}, engine calls on {threads}: {apart}"
    latencies = ", ".join(f"{rows}: {duration(seconds)}" for rows, seconds in sorted(server.seconds.items()))
    return [
        ("a replica", sharing),
        ("a request", source.sample),
        ("engine calls", f"{latencies} ({source.profile})"),
        (
            "time outside the engine",
            f"{duration(overhead.request)} per request and {duration(overhead.call)} per engine call"
            + (f", {duration(overhead.wire)} in the kernel and the network" if overhead.wire else "")
            + f" ({source.overhead})",
        ),
    ]


def text(plan: Plan, source: Source) -> str:
    """Return the plan for a terminal."""
    parts = [f"{source.model}: {title(plan)}", *_lines(summary(plan)), "", "based on", *_lines(basis(plan, source))]
    return "\n".join(parts)


def json(plan: Plan, source: Source) -> dict[str, Any]:
    """Return the plan for programs; times are in seconds."""
    return {**vars(source), "notes": list(source.notes), **plan.json()}


def html(plan: Plan, source: Source) -> str:
    """Return the plan as a page with a plot of latencies against the rate of a replica."""
    rows = [
        [
            _rate(load.rate),
            *(duration(each) for each in (load.p50, load.p99, load.p999)),
            f"{load.batch:.1f}",
            f"{load.busy:.0%}",
        ]
        for load in plan.curve
    ]
    head = ["requests per second", "p50", "p99", "p99.9", "mean batch", "busy"]
    sections = [
        ("Plan", _definitions(summary(plan))),
        ("Latency against the rate of one replica", chart(plan)),
        ("Simulated loads of one replica", pages.table(head, rows)),
        ("Basis", _definitions(basis(plan, source))),
        ("Notes", pages.listing(list(source.notes))),
    ]
    subtitle = escape(title(plan))
    return pages.page(source.model, "capacity plan", subtitle, sections, pages.code(source.command), charts.STYLE)


def chart(plan: Plan) -> str:
    """Return p50 and p99 against the rate, with the objective and the chosen load."""
    quantile = f"p{plan.request.objective.quantile * 100:g}"
    items = [
        charts.Curve("p50", tuple((load.rate, load.p50 * 1e3) for load in plan.curve), 0),
        charts.Curve("p99", tuple((load.rate, load.p99 * 1e3) for load in plan.curve), 1),
        charts.Curve("planned, p99", ((plan.chosen.rate, plan.chosen.p99 * 1e3),), "original"),
    ]
    limit = plan.request.objective.seconds * 1e3
    return charts.curves(
        items, ("requests per second", "latency in ms"), log=False, limit=(limit, f"objective: {quantile}")
    )


def _without_one(plan: Plan) -> str:
    lost, ceiling = plan.lost, plan.server.ceiling
    if lost is None:
        return "no replica is left; plan for at least 2"
    if lost.rate > ceiling:  # its queue grows for as long as that lasts
        return f"overload: {_rate(lost.rate)} requests per second each, and a replica answers at most {_rate(ceiling)}"
    return f"the objective {'still holds' if plan.survives else 'is missed'}: {_latencies(lost)}"


def _lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:{width}}{value}" for name, value in rows]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _latencies(load: Load) -> str:
    return ", ".join(
        f"{name} {duration(seconds)}" for name, seconds in (("p50", load.p50), ("p99", load.p99), ("p99.9", load.p999))
    )


def _definitions(rows: Sequence[tuple[str, str]]) -> str:
    return pages.definitions((escape(name), escape(text)) for name, text in rows)
