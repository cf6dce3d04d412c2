"""``ingot profile``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption, with_options
from ingot.cli.output import duration, note, print_json, printable, progress, stdout
from ingot.errors import InvalidArgument
from ingot.report import units

if TYPE_CHECKING:
    from ingot.runtime.profiling.operators import OperatorTime, Profile

# Rows of the table.
_SHOWN = 25


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The engine calls that are measured, and the rows of the table."""

    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Rows of an engine call; repeatable.", show_default="1, 32"),
    ] = None
    by: Annotated[Literal["operator", "node"], typer.Option(help="What a row of the table stands for.")] = "operator"
    calls: Annotated[int, typer.Option(min=3, max=10_000, help="Engine calls that count, per batch size.")] = 50
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads of the engine.")] = 1


@with_options
def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="An archive file, or a reference such as digits:1; #variant chooses the variant.",
            autocompletion=references,
        ),
    ],
    measured: Measurement,
    trace: Annotated[
        Path | None, typer.Option(help="Write the calls to this .json file, for chrome://tracing or Perfetto.")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Load formats that can run their author's code; ONNX cannot.")
    ] = False,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Measure how the time of a stored model is spent on its operators, on the CPU.

    Examples:

        ingot profile digits:1#int8 --batch 1 --batch 32 --trace calls.json
    """
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    located = locate(model, Store(store))
    if trace is not None:
        if trace.suffix != ".json":
            raise InvalidArgument(f"--trace is {trace}; the file's name must end in .json")
        check_out(trace)
        check_apart(trace, model=located.name)
    with progress("Opening") as step:
        variant = located.open().unpacked().variant(located.variant)
        from ingot.runtime.profiling.operators import Profiler

        profiler = Profiler(variant, threads=measured.threads, calls=measured.calls, allow_code=allow_code)
        profiles = []
        for rows in dict.fromkeys(measured.batches or ([1] if variant.signature.batch is None else [1, 32])):
            step(f"Profiling {units.counted(rows, 'row')}")
            profiles.append(profiler.profile(rows))
    if trace is not None:
        trace.write_text(json.dumps({"traceEvents": profiler.events}))
        note(f"wrote the calls to {trace}; open it in chrome://tracing or ui.perfetto.dev")
    if as_json:
        print_json({"model": located.name, "variant": variant.name, "profiles": [_content(each) for each in profiles]})
    else:
        _print(f"{located.name}, variant {variant.name}", profiles, measured.by)


def _content(profile: Profile) -> dict[str, Any]:
    operators = [vars(each) for each in profile.operators]
    return {"rows": profile.rows, "seconds": profile.seconds, "operators": operators}


def _print(title: str, profiles: Sequence[Profile], by: str) -> None:
    from rich.table import Table

    def key(each: OperatorTime) -> str:
        return printable(each.operator if by == "operator" else each.node)

    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(profiles))
    nodes: dict[str, float] = defaultdict(float)
    kinds: dict[str, str] = {}
    for index, each in enumerate(profiles):
        for operator in each.operators:
            times[key(operator)][index] += operator.seconds
            kinds[key(operator)] = printable(operator.operator)
            if index == len(profiles) - 1:
                nodes[key(operator)] += operator.calls
    table = Table(title=title, caption="median times of an engine call, and shares of the time in operators")
    table.add_column(by)
    table.add_column("operator" if by == "node" else "nodes", justify="left" if by == "node" else "right")
    for each in profiles:
        table.add_column(units.counted(each.rows, "row"), justify="right")
        table.add_column("", justify="right")
    ordered = sorted(times, key=lambda name: -times[name][-1])
    for name in ordered[:_SHOWN]:
        cells = [cell for index, each in enumerate(profiles) for cell in _cells(times[name][index], each)]
        table.add_row(name, kinds[name] if by == "node" else f"{nodes[name]:g}", *cells)
    if rest := ordered[_SHOWN:]:
        sums = [sum(times[name][index] for name in rest) for index in range(len(profiles))]
        cells = [cell for index, each in enumerate(profiles) for cell in _cells(sums[index], each)]
        table.add_row(f"{len(rest)} others", "", *cells)
    table.add_section()
    table.add_row("in operators", "", *(cell for each in profiles for cell in (duration(each.in_operators), "")))
    table.add_row("whole call, profiler off", "", *(cell for each in profiles for cell in (duration(each.seconds), "")))
    table.add_row(
        "rows per second", "", *(cell for each in profiles for cell in (f"{each.rows / each.seconds:,.0f}", ""))
    )
    stdout().print(table, markup=False)


def _cells(seconds: float, profile: Profile) -> tuple[str, str]:
    return duration(seconds), f"{seconds / (profile.in_operators or 1):.0%}"
