"""The graphs of an archive or an ONNX file as stages to be drawn, each compared with the one before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ingot.bounds.protobuf import DamagedError
from ingot.errors import InvalidArchive, InvalidArgument
from ingot.export.graphs import onnx
from ingot.export.graphs.changes import Change, compare
from ingot.export.report import GraphView, Report
from ingot.model_store import Archive, Variant

# The graphs of an export report that are drawn, by their titles. The rewritten ONNX graph is that of the variant.
_CAPTURED = {"FX graph as captured": ("captured", "captured FX"), "FX graph rewritten": ("rewritten", "rewritten FX")}
# Some ten seconds to draw.
_MOST_NODES, _MOST_INPUTS = 20_000, 60_000
_TRANSLATED, _REWRITTEN = "ONNX graph as translated", "ONNX graph rewritten"


@dataclass(frozen=True)
class Stage:
    """A graph to be drawn.

    Attributes:
        name: the name that chooses it.
        title: its title.
        graph: the graph.
        other: the title of the graph that it is compared with, or empty.
        marks: how its nodes differ from that one, by name.
    """

    name: str
    title: str
    graph: GraphView
    other: str = ""
    marks: Mapping[str, Change] = field(default_factory=dict)


def of_file(content: bytes, called: str) -> Stage:
    """Return the graph of an ONNX file.

    Raises:
        InvalidArgument: it is not an ONNX model, or too large to be drawn.
    """
    try:
        return _drawable(Stage("onnx", "ONNX", onnx.of_bytes("ONNX", content)))
    except DamagedError as error:
        raise InvalidArgument(f"{called} is not an ONNX model: {error}") from error


def of_archive(archive: Archive, exported: tuple[Variant, Report] | None) -> list[Stage]:
    """Return the graphs of an archive, in the order in which they were made.

    Args:
        archive: the archive.
        exported: its export report, and the variant that was exported; None if the archive has no report.

    Raises:
        InvalidArchive: a graph is missing or damaged.
        InvalidArgument: one is too large to be drawn.
    """
    views = {view.title: view for view in exported[1].graphs if view.nodes} if exported is not None else {}
    symbols = {symbol: name for view in views.values() for symbol, name in view.symbols.items()}
    modules = {
        node.name: node.module for title in (_TRANSLATED, _REWRITTEN) if title in views for node in views[title].nodes
    }
    captured = [Stage(*_CAPTURED[title], view) for title, view in views.items() if title in _CAPTURED]
    first = exported[0] if exported is not None else None
    own = list(_stored(first, modules)) if first is not None else []
    before = [Stage("translated", "ONNX before rules", views[_TRANSLATED])] if _REWRITTEN in views and own else []
    found = [*_compared(captured), *_compared([*before, *own])]
    for variant in archive.variants:
        if first is None or variant.descriptor.digest != first.descriptor.digest:
            stages = list(_stored(variant, modules))
            found += [_compared([own[0], stage])[1] if len(own) == len(stages) == 1 else stage for stage in stages]
    return [replace(_drawable(stage), graph=stage.graph.with_names(symbols)) for stage in found]


def _drawable(stage: Stage) -> Stage:
    nodes, inputs = len(stage.graph.nodes), sum(len(node.inputs) for node in stage.graph.nodes)
    if nodes > _MOST_NODES or inputs > _MOST_INPUTS:
        raise InvalidArgument(
            f"the graph '{stage.title}' has {nodes:,} nodes with {inputs:,} inputs, too many to draw: at most "
            f"{_MOST_NODES:,} and {_MOST_INPUTS:,}; ingot profile lists the operators of a model"
        )
    return stage


def _stored(variant: Variant, modules: Mapping[str, str]) -> Iterator[Stage]:
    """Yield the ONNX graphs of a variant: one, or its parts."""
    if not variant.has_graphs:
        return
    graphs = list(variant.graphs())
    for number, descriptor in enumerate(graphs, 1):
        part = f"-{number}" if len(graphs) > 1 else ""
        try:
            view = onnx.of_bytes(variant.name, variant.read_graph(descriptor), modules)
        except DamagedError as error:
            raise InvalidArchive(f"the graph of variant '{variant.name}' is not an ONNX model: {error}") from error
        yield Stage(f"{variant.name}{part}", f"ONNX {variant.name}{part}", view)


def _compared(stages: list[Stage]) -> list[Stage]:
    """Return stages with their differences: of the first from the second, of the others from the one before."""
    found = list(stages)
    for index, (before, after) in enumerate(pairwise(stages)):
        old, new = compare(before.graph, after.graph)
        if index == 0:
            found[0] = replace(before, other=after.title, marks=old)
        found[index + 1] = replace(after, other=before.title, marks=new)
    return found
