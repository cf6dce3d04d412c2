"""``ingot graph``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption
from ingot.cli.output import note, print_json, printable, progress, stdout
from ingot.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from ingot.export.graphs.stages import Stage
    from ingot.model_store.places import Located

# Operators in the table.
_SHOWN = 12


def graph(
    model: Annotated[
        str,
        typer.Argument(
            help="An archive file, a reference such as digits:1, an .onnx file, or an ingot.toml with pipelines; "
            "#variant draws only that variant.",
            autocompletion=references,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .html or .svg file to write.", show_default="NAME-graph.html"),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Draw only this graph: captured, rewritten, translated, a variant, or a pipeline.", show_default="all"
        ),
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Draw the graphs of a model: as captured, after the rewrite rules, as ONNX, and each quantized variant.

    Of a configuration file, its pipelines are drawn. Neither PyTorch nor the onnx package is needed.

    Examples:

        ingot graph digits:1
        ingot graph digits:1#int8 -o int8.svg
        ingot graph model.onnx
        ingot graph ingot.toml -o pipelines.html
    """
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    if output is not None:
        if output.suffix not in (".html", ".svg"):
            raise InvalidArgument(f"--output is {output}; the file's name must end in .html or .svg")
        check_out(output)
        check_apart(output, model=model)
    if model.endswith(".toml"):
        _pipelines(Path(model), output, stage, as_json=as_json)
        return
    located = locate(model, Store(store))
    with progress("Opening") as step:
        name, stages, notes = _read(located)
        if (chosen := stage or located.variant) is not None:
            stages = _chosen(stages, chosen)
        path = output or Path(f"{name.rpartition('/')[2]}-graph.html")
        if path.suffix == ".svg" and len(stages) > 1:
            raise InvalidArgument(f"an .svg file holds one graph; choose one by --stage: {_names(stages)}")
        step("Drawing")
        from ingot.cli.archives.report import put
        from ingot.export.graphs import page

        drawn = page.svg(name, stages[0]) if path.suffix == ".svg" else page.html(name, stages, notes)
        put(path, printable(drawn))
    if as_json:
        found = [
            {"stage": each.name, "nodes": len(each.graph.nodes), "operators": each.graph.operators} for each in stages
        ]
        print_json({"model": located.name, "file": str(path), "stages": found})
        return
    for kind in ("FX", "ONNX"):
        if of_kind := [each for each in stages if kind in each.title]:
            _print(kind, of_kind)
    note(f"wrote {path}; open it in a browser")


def _pipelines(file: Path, output: Path | None, chosen: str | None, *, as_json: bool) -> None:
    """Draw the pipelines of a configuration file, or one of them."""
    from ingot.cli.archives.report import put
    from ingot.config.configuration import Configuration
    from ingot.serving.pipelines import drawing

    listed = Configuration.of({}, file).pipelines
    found = [each for each in listed if chosen in (None, each.name)]
    names = ", ".join(each.name for each in listed) or "none"
    if not found:
        raise NotFound(f"{file} has no pipeline{f' {chosen!r}' if chosen else 's'}; it has: {names}")
    path = output or Path(f"{file.stem}-graph.html")
    if path.suffix == ".svg" and len(found) > 1:
        raise InvalidArgument(f"an .svg file holds one pipeline; choose one by --stage: {names}")
    put(path, printable(drawing.svg(found[0]) if path.suffix == ".svg" else drawing.html(file.name, found)))
    if as_json:
        nodes = [{"pipeline": each.name, "nodes": len(each.table.nodes)} for each in found]
        print_json({"model": str(file), "file": str(path), "pipelines": nodes})
        return
    note(f"wrote {path}; open it in a browser")


def _read(located: Located) -> tuple[str, list[Stage], list[str]]:
    """Return the model's name, its graphs, and what is not drawn."""
    from ingot.export.graphs import stages

    if located.path is not None and located.path.suffix == ".onnx":
        if located.variant is not None:
            raise InvalidArgument(
                f"{located.name} is an ONNX model, which has no variants; leave #{located.variant} out"
            )
        if not located.path.is_file():
            raise NotFound(f"there is no file {located.name}")
        return located.path.stem, [stages.of_file(located.path.read_bytes(), located.name)], []
    from ingot.cli.archives.report import exported

    archive = located.open()
    if located.variant is not None:
        archive.variant(located.variant)
    report = exported(archive)
    notes = [
        f"variant '{each.name}' has no ONNX graph: its format is {each.serving.format}"
        for each in archive.variants
        if not each.has_graphs
    ]
    if report is None:
        notes.append("the archive has no export report, which holds the graphs before ONNX: export the model again")
    found = stages.of_archive(archive, report)
    if not found:
        raise NotFound(f"{located.name} holds no graph: {'; '.join(notes)}")
    return archive.name, found, notes


def _chosen(stages: Sequence[Stage], name: str) -> list[Stage]:
    parts = re.compile(rf"{re.escape(name)}(-\d+)?")  # a partitioned variant has several
    found = [each for each in stages if parts.fullmatch(each.name)]
    if not found:
        raise NotFound(f"there is no graph '{name}'; choose one of {_names(stages)}")
    return found


def _names(stages: Sequence[Stage]) -> str:
    return ", ".join(each.name for each in stages)


def _print(kind: str, stages: Sequence[Stage]) -> None:
    """Print how often each operator occurs; those whose number changes first."""
    from rich.table import Table

    counts = {
        name: [each.graph.operators.get(name, 0) for each in stages] for each in stages for name in each.graph.operators
    }
    ordered = sorted(counts, key=lambda name: (len(set(counts[name])) == 1, -max(counts[name])))
    table = Table(title=f"{kind} operators")
    table.add_column("operator")
    for each in stages:
        table.add_column(each.title.replace(f"{kind} ", "").replace(f" {kind}", ""), justify="right")
    for name in ordered[:_SHOWN]:
        table.add_row(printable(name), *(str(count or "") for count in counts[name]))
    if rest := ordered[_SHOWN:]:
        table.add_row(
            f"{len(rest)} others",
            *(str(sum(column) or "") for column in zip(*(counts[name] for name in rest), strict=True)),
        )
    table.add_section()
    table.add_row("nodes", *(str(len(each.graph.nodes)) for each in stages))
    stdout().print(table, markup=False)
