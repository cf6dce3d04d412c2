"""``ingot diff``: what changed between two archives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives import Json, StoreOption, check_apart, check_out
from ingot.cli.output import note, print_json, progress, say

if TYPE_CHECKING:
    from ingot.model_store.diff import Diff


def diff(
    before: Annotated[
        str,
        typer.Argument(help="An archive file, or a reference such as digits:1; #variant names one of its variants."),
    ],
    after: Annotated[str, typer.Argument(help="What is compared with it.")],
    report: Annotated[Path | None, typer.Option(help="Write it to this file too: .html, .json or .txt.")] = None,
    tensors: Annotated[
        int, typer.Option(min=0, help="How many changed tensors, and rows of other tables, are shown.")
    ] = 20,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Show what changed between two archives: signature, sizes, weights, graph, accuracy and latency."""
    from ingot.cli.report import check_suffix, put
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    first, second = locate(before, Store(store)), locate(after, Store(store))
    if report is not None:
        check_suffix(report)
        check_out(report)
        check_apart(report, **{"first archive": first.name, "second archive": second.name})
    from ingot.model_store.diff import diff as run
    from ingot.model_store.diff import view

    with progress("Opening") as step:
        archives, variants = (first.open(), second.open()), (first.variant, second.variant)
        found = run(*archives, variants=variants, labels=(before, after), progress=step)
    if report is not None:
        put(report, _shown(found, report.suffix, tensors))
        note(f"the difference is in {report}")
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        say(view.text(found, tensors).rstrip("\n"))


def _shown(found: Diff, suffix: str, tensors: int) -> str:
    from ingot.model_store.diff import view

    if suffix == ".json":
        return json.dumps(found.model_dump(mode="json"), indent=1)
    return view.html(found, tensors) if suffix == ".html" else view.text(found, tensors)
