"""``ingot quantize``."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.archives.inspect import describe
from ingot.cli.archives.report import check_suffix, save
from ingot.cli.archives.transfers import transferring
from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption, with_options
from ingot.cli.output import note, print_json, printable, progress, say, seconds, size, stdout
from ingot.errors import InvalidArgument
from ingot.report.text import one_line

if TYPE_CHECKING:
    from ingot.quant import Quantized
    from ingot.quant.config import Recipe
    from ingot.quant.report.records import Report

# The exit code when the model is written unchanged.
NOTHING = 3
# The longest reason shown, in characters; some engines quote their whole source.
_MOST = 160


@dataclass(frozen=True, kw_only=True)
class Search:
    """The data and the limits of a search."""

    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            "--data",
            help="Real inputs: .npz, .npy, a folder of .npy files or images, or recorded traffic; of a model with "
            "steps also .csv or .jsonl of texts, or a folder of files by class; of a decoder also a .txt.",
        ),
    ] = None
    validate: Annotated[
        str | None, typer.Option(help="Data for the metric, in the same formats.", show_default="a part of --calibrate")
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            help="static-int8, dynamic-int8, weight-int8, weight-int4, bf16 or fp16.",
            show_default="the fastest within the budget",
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            help="The measure of accuracy, such as accuracy:labels=y.",
            show_default="cosine; of raw data that of its labels, or answers; of a decoder perplexity",
        ),
    ] = None
    max_drop: Annotated[float, typer.Option(help="The largest accepted drop of the metric.")] = 0.01
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A layer to keep in floating point, or a prefix of layer names; repeatable."),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the recipe as NAME=VALUE, such as calibration=mse; repeatable."),
    ] = None
    batch: Annotated[
        list[int] | None, typer.Option(help="Batch size to optimize and time; repeatable.", show_default="1, 8, 32")
    ] = None
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="An engine that may run the result, onnxruntime or openvino; repeatable.",
            show_default="those installed",
        ),
    ] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads per call.", show_default="one per core")] = None
    budget: Annotated[
        str | None, typer.Option(help="Time for the search, such as 90s, 5m or 1h; a bare number is seconds.")
    ] = None
    transform: Annotated[str | None, typer.Option(help="The preprocessing of images, such as resize=256,crop=224.")] = (
        None
    )
    seed: Annotated[int, typer.Option(help="Seed of the split and selection of data.")] = 0


@with_options
def quantize(
    model: Annotated[
        str, typer.Argument(help="An archive file, or a reference such as digits:1.", autocompletion=references)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive file to write.")],
    *,
    search: Search,
    report: Annotated[Path | None, typer.Option(help="Write the report to this file: .html, .json or .txt.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Keep a recipe's result even if it is slower or less exact.")
    ] = False,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Make an archive's model smaller and faster, and measure the loss of accuracy.

    Candidates are measured on this machine, and the fastest one within the budget is added to the archive. If there is
    none, the archive is written unchanged and the exit code is 3. An interrupted search continues when the same command
    is run again.

    Examples:

        ingot quantize digits.ingot --calibrate digits.npz --metric accuracy:labels=label --max-drop 0.005 -o q.ingot
        ingot quantize digits.ingot --recipe dynamic-int8 --out q.ingot
        ingot quantize sst2.ingot --data reviews.csv --out q.ingot
    """
    began = time.monotonic()
    given = {"model": model, "calibration": search.calibrate, "validation": search.validate}
    check_out(out)
    check_apart(out, **given)
    if report is not None:
        check_out(report)
        check_suffix(report)
        check_apart(report, **given, archive=out)
    journal = out.with_name(f".{out.name}.search")
    with progress("Loading", log=True) as step:
        from ingot.model_store import Store
        from ingot.model_store.places import locate
        from ingot.quant import QuantConfig, run
        from ingot.quant.measure import limits

        located = locate(model, Store(store)).whole()
        config = QuantConfig(
            recipe=_recipe(search.recipe, search.option or []),
            metric=search.metric,
            max_drop=search.max_drop,
            keep=tuple(search.keep or ()),
            batches=tuple(search.batch or (1, 8, 32)),
            threads=search.threads,
            engines=tuple(search.engine) if search.engine else None,  # type: ignore[arg-type]  # checked there
            budget=seconds("--budget", search.budget) if search.budget is not None else None,
            seed=search.seed,
            force=force,
        )
        result = run(
            located.open(),
            search.calibrate,
            config=config,
            validate=search.validate,
            transform=search.transform,
            journal=journal,
            progress=step,
            began=began,
        )
    with transferring(f"Writing {out.name}", log=True) as transfer, limits.disk_watched(out.parent):
        result.archive.save(out, transfer)
    if report is not None:
        with limits.disk_watched(report.parent):
            save(report, result.report)
    if result.journal is not None:
        result.journal.remove()
    if as_json:
        print_json(
            {
                **describe(result.archive),
                "verdict": result.verdict,
                "reason": result.reason,
                "report": result.report.model_dump(mode="json"),
            }
        )
    else:
        _show(result, out)
    if report is not None:
        note(f"wrote the report to {report}")
    if result.verdict != "quantized":
        raise typer.Exit(NOTHING)


def _recipe(name: str | None, options: list[str]) -> Recipe | None:
    """Return a recipe by its name, with its options."""
    from ingot.quant.config import RECIPES

    if name is None or name == "auto":
        if options:
            raise InvalidArgument("--option belongs to a recipe; name the recipe with --recipe")
        return None
    if name not in RECIPES:
        raise InvalidArgument(f"there is no recipe '{name}'; there are: auto, {', '.join(RECIPES)}")
    kind = RECIPES[name]
    known = {item.name: item for item in fields(kind) if item.name != "keep"}
    values: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            raise InvalidArgument(
                f"'{text}' is not an option of {name}; there are: {', '.join(f'{item}=...' for item in known)}"
            )
        values[key] = _value(text, known[key].default, value)
    return kind(**values)


def _value(text: str, default: Any, value: str) -> Any:
    """Return an option's value as its default's type."""
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise InvalidArgument(f"'{text}': it must be true or false")
        return value.lower() == "true"
    try:
        return type(default)(value)
    except ValueError:
        raise InvalidArgument(f"'{text}': {value} is not a number") from None


def _show(result: Quantized, out: Path) -> None:
    report = result.report
    if len(report.candidates) > 1:
        _show_candidates(report)
    for remark in report.notes:
        note(f"note: {remark}")
    if report.audit is not None and report.audit.floats:
        note(f"note: float operators left between integer ones: {', '.join(report.audit.floats[:8])}")
    if result.verdict != "quantized":
        note(f"warning: {result.reason}; the model is written unchanged")
        say(f"{out}: {result.archive.name}, unchanged")
        return
    if result.reason:
        note(f"warning: the result {result.reason}")
    _show_result(result, out)


def _show_candidates(report: Report) -> None:
    """Print the candidates as in the report, which also has intervals and recipes."""
    from rich.table import Table
    from rich.text import Text

    from ingot.quant.report import words
    from ingot.report.units import number, times

    title = Text(printable(f"{report.metric} may drop by {report.budget:g}"))
    table = Table("candidate", "speed-up", "drop", "size", "", title=title, title_justify="left", title_style="")
    for item in words.by_speed(report.candidates):
        drop = number(item.drop.value) if item.drop is not None else ""
        speed = times(words.mean(item.speedups.values()))
        outcome = Text(one_line(words.outcome(item), _MOST))
        table.add_row(Text(item.name), speed, drop, size(item.size) if item.size else "", outcome)
    stdout().print(table)


def _show_result(result: Quantized, out: Path) -> None:
    from ingot.report.units import number

    report, chosen = result.report, result.report.chosen
    if report.before is not None and report.after is not None:
        held = "held-out " if report.data.held_out else ""
        before, after, low, high = map(
            number, (report.before.value, report.after.value, report.after.low, report.after.high)
        )
        interval = "" if report.after.low == report.after.high else f" (95 %: {low} to {high})"
        rows = f"{report.data.evaluation_rows} {held}samples"
        note(f"{report.metric}: {before} before, {after} after{interval}, on {rows}")
    if chosen is not None and chosen.speedups:
        speedups = ", ".join(f"{value:.2f}x at batch {rows}" for rows, value in chosen.speedups.items())
        note(f"speed compared with the original: {speedups}")
    variant = result.archive.variant(report.variant)
    say(f"{out}: {result.archive.name}, {variant.name} {size(variant.size)}, the original {size(report.size)}")
