"""Pipelines of a configuration file as pictures: their inputs, nodes and outputs, and what each reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ingot.config.pipelines import Condition, Node, PipelineConfig, Ref, Refs
from ingot.report import diagrams, pages
from ingot.report.diagrams import Box


def html(name: str, pipelines: Sequence[PipelineConfig]) -> str:
    """Return a page with a drawing of each pipeline."""
    drawn = [(each.name, drawing(each)) for each in pipelines]
    return pages.page(name, "pipelines", "hover over a box for its details", drawn, "", diagrams.STYLE)


def svg(pipeline: PipelineConfig) -> str:
    """Return a pipeline as an SVG file."""
    return diagrams.image(drawing(pipeline), pipeline.name)


def drawing(pipeline: PipelineConfig) -> str:
    """Return a pipeline as SVG of a page: boxes for its inputs, nodes and outputs."""
    table = pipeline.table
    boxes = [Box(name, kind="value", note=f"input {name}") for name in table.inputs]
    boxes += [_box(name, node) for name, node in table.nodes.items()]
    places = {name: len(table.inputs) + index for index, name in enumerate(table.nodes)}
    inputs = {name: index for index, name in enumerate(table.inputs)}
    edges = dict.fromkeys(
        (_place(ref, inputs, places), places[name]) for name, node in table.nodes.items() for ref in node.reads
    )
    for name, refs in table.results.items():
        edges |= dict.fromkeys((_place(ref, inputs, places), len(boxes)) for ref in refs)
        boxes.append(Box(name, [("", _read(refs))], kind="value", note=f"output {name}"))
    return diagrams.draw(boxes, [*edges], f"pipeline {pipeline.name}")


def _place(ref: Ref, inputs: Mapping[str, int], nodes: Mapping[str, int]) -> int:
    return nodes[ref.node] if ref.node else inputs[ref.name]


def _box(name: str, node: Node) -> Box:
    lines = [*_lines(node)]
    title = f"{name}: {node.model or node.step}"
    note = "\n".join([title, *(f"{key} {value}".strip() for key, value in lines)])
    return Box(title, lines, kind="compute" if node.model else "shape", note=note)


def _lines(node: Node) -> Iterator[tuple[str, str]]:
    for key, refs in node.sources.items():
        yield key, _read(refs)
    if node.columns:
        yield "each", ", ".join(node.columns) + (f" ({node.count})" if node.count else "")
    for condition in node.conditions:
        yield "when", _said(condition)


def _read(refs: Refs) -> str:
    return " or ".join(map(str, refs))


def _said(condition: Condition) -> str:
    parts = {"=": condition.equals, ">": condition.above, "<": condition.below}
    return " ".join([condition.value, *(f"{sign} {value}" for sign, value in parts.items() if value is not None)])
