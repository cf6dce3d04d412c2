"""``ingot compare``, which measures two models on the same data, and ``ingot diff``, which contrasts two archives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption, with_options
from ingot.cli.output import note, print_json, progress, say

if TYPE_CHECKING:
    from ingot.model_store import Variant
    from ingot.model_store.diff import Diff
    from ingot.steps import Values


Before = Annotated[
    str,
    typer.Argument(
        help="An archive file, or a reference such as digits:1; #variant names one of its variants.",
        autocompletion=references,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The data, the metric and the batch sizes of a comparison."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="The inputs: .npz, .npy, or a folder; of models with steps also .csv or .jsonl of texts, or a folder "
            "of files by class.",
            show_default="the golden inputs",
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric, such as accuracy:labels=y, top1, similarity or module:function.", show_default="cosine"
        ),
    ] = None
    transform: Annotated[str | None, typer.Option(help="The preprocessing of images, such as resize=256,crop=224.")] = (
        None
    )
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Batch size to time; repeatable.", show_default="1, 8, 32"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engines of both models run."""

    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu"
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per call.", show_default="one per core")] = (
        None
    )
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code", envvar="INGOT_ALLOW_CODE", help="Load variants of formats that can run their author's code."
        ),
    ] = False


@with_options
def compare(
    before: Before,
    after: Annotated[
        str, typer.Argument(help="The second model, with the same inputs and outputs.", autocompletion=references)
    ],
    *,
    compared: Comparison,
    report: Annotated[Path | None, typer.Option(help="Also write a report to this file: .html, .json or .txt.")] = None,
    engines: EngineOptions,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Compare two models on the same data: metric, agreement of the outputs, latency and size.

    The two are timed in turn. #variant after a model names one of its variants; otherwise the preferred one is used.
    The exit code is 0 whatever the result.

    Examples:

        ingot compare digits-fp32.ingot digits.ingot --data val.npz --metric accuracy:labels=y --report comparison.html
    """
    from ingot.cli.archives.report import check_suffix, save
    from ingot.model_store import Store
    from ingot.model_store.places import locate
    from ingot.quant.measure import limits

    located = locate(before, Store(store)), locate(after, Store(store))
    names = located[0].name, located[1].name
    if report is not None:
        check_suffix(report)
        check_out(report)
        check_apart(report, data=compared.data, **{"first model": names[0], "second model": names[1]})
    with progress("Opening") as step, limits.disk_watched():
        first, second = (side.open().variant(side.variant) for side in located)
        from ingot.quant.measure.comparison import compare as run
        from ingot.quant.options import check_threads

        check_threads(engines.threads)
        result = run(
            first,
            second,
            compared.data,
            metric=compared.metric,
            transform=compared.transform,
            batches=compared.batches or (1, 8, 32),
            device=engines.device,
            threads=engines.threads,
            allow_code=engines.allow_code,
            names=names,
            progress=step,
        )
    if report is not None:
        with limits.disk_watched(report.parent):
            save(report, result)
        note(f"wrote the comparison to {report}")
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    from ingot.quant.report.comparison import text

    say(text(result).rstrip("\n"))


def diff(
    before: Before,
    after: Annotated[str, typer.Argument(help="The second archive or variant.", autocompletion=references)],
    report: Annotated[Path | None, typer.Option(help="Also write a report to this file: .html, .json or .txt.")] = None,
    tensors: Annotated[
        int, typer.Option(min=0, help="Most changed tensors to show, and most rows of each other table.")
    ] = 20,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Show what changed between two archives: signature, sizes, weights, graph, accuracy and latency.

    Only the contents of the archives are compared, and from a registry only the compared parts are downloaded. Nothing
    is run but steps, such as tokenizers, and graphs for final answers that only one archive has recorded. Variants are
    matched by name: with #variant after both archives, those two are compared; after one, the other archive's variant
    of that name is used. The exit code is 0 whatever the result.

    The result has digests and sizes, with the number of bytes that both share; differences of name, inputs, outputs and
    variants; the accuracy, parity and latency that each archive recorded, with a note if data or machines differ; and
    the largest difference in golden cases of the same inputs.

    For steps it has the number of hard texts that get other ids, the largest difference of pixels, the labels that
    changed, the final answers to the raw goldens of both, and the inputs whose answers changed most.

    For graphs it has the weights and constants that changed, with ||after - before|| / ||before||, the largest absolute
    difference and the number of values; and counts of operators. This part needs ingot-serve\\[export].

    Examples:

        ingot diff digits:1 digits:2
        ingot diff digits.ingot#fp32 digits.ingot#int8 --report difference.html
    """
    from ingot.cli.archives.report import check_suffix, put
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
        found = run(*archives, variants=variants, labels=(before, after), progress=step, open_graph=_open_graph)
    if report is not None:
        put(report, _rendered(found, report.suffix, tensors))
        note(f"wrote the differences to {report}")
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        say(view.text(found, tensors).rstrip("\n"))


@contextmanager
def _open_graph(variant: Variant) -> Iterator[Callable[[Values], Values]]:
    """Yield a function that runs a variant's graph."""
    from ingot.runtime import load_engine
    from ingot.runtime.engines.loader import spec_of

    with closing(load_engine(spec_of(variant))) as engine:
        yield engine.run


def _rendered(found: Diff, suffix: str, tensors: int) -> str:
    """Return the differences in the format of a file's suffix."""
    from ingot.model_store.diff import view

    if suffix == ".json":
        return json.dumps(found.model_dump(mode="json"), indent=1)
    return view.html(found, tensors) if suffix == ".html" else view.text(found, tensors)
