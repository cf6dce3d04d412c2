"""The export report: each step of an export with its proof. It is stored in the archive.

This file holds its documents and the journal that collects them; view.py and page.py show it as text and as HTML.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ingot.model_store.format.evidence import ParityEvidence
from ingot.model_store.format.manifest import Serving
from ingot.report.units import size

Progress = Callable[[str], None]
"""Called with the name of each step as it begins, for a progress display."""

MAX_BYTES = 16 << 20
"""Bytes of a stored report that are read, enough for 40,000 nodes in all its graphs."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count, bounded because reports come from untrusted archives and are computed with when shown."""


def named(text: str, symbols: Mapping[str, str]) -> str:
    """Return a text, such as a shape, with the user's names of sizes in place of symbols."""
    return re.sub(r"\b[A-Za-z_]\w*", lambda match: symbols.get(match[0], match[0]), text) if symbols else text


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Attempt(_Record):
    """A route of the capture that was tried; ``failure`` is empty for the one that succeeded."""

    route: str
    failure: str = ""


class Rewrite(_Record):
    """One rewrite rule; see :class:`ingot.export.rewrite.passes.manager.PassRecord`."""

    rule: str
    kind: str
    matches: Count
    error: float | None = None
    rejected: str = ""


class Node(_Record):
    """One operation of a graph. ``module`` is the path of its submodule, such as ``layers.0.attn``.

    ``name`` is that of its first result, whose type is ``dtype`` and ``shape``; ``more_outputs`` names the others.
    """

    name: str
    operator: str
    inputs: tuple[str, ...] = ()
    shape: str = ""
    module: str = ""
    source: str = ""
    dtype: str = ""
    more_outputs: tuple[str, ...] = ()
    attributes: dict[str, str] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.name, *self.more_outputs)


class GraphView(_Record):
    """A graph as the report shows it, with the count of each operator.

    ``inputs`` and ``weights`` are types by name, such as ``float32[batch,3]``; ``outputs`` are the values that the
    graph returns, by the output's name. ``symbols`` are the user's names of sizes in ``shape``.
    """

    title: str
    nodes: tuple[Node, ...]
    operators: dict[str, Count]
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    weights: dict[str, str] = {}
    symbols: dict[str, str] = {}

    @property
    def size(self) -> int:
        """The number of nodes, also of a graph whose nodes are not kept."""
        return sum(self.operators.values())

    def with_names(self, symbols: Mapping[str, str]) -> GraphView:
        """Return the graph with the user's names in place of symbols in the shapes."""
        nodes = tuple(node.model_copy(update={"shape": named(node.shape, symbols)}) for node in self.nodes)
        return self.model_copy(update={"nodes": nodes})


class Stage(_Record):
    """One stage of the pipeline and its proof."""

    name: str
    seconds: float
    detail: str = ""
    parity: tuple[ParityEvidence, ...] = ()


class Report(_Record):
    """The whole export."""

    schema_version: int = 1
    name: str
    source: str
    created: str
    versions: dict[str, str] = {}
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    batch: str | None = None
    attempts: tuple[Attempt, ...] = ()
    stages: tuple[Stage, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    graphs: tuple[GraphView, ...] = ()
    sizes: dict[str, Count] = {}
    outside_opset: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def bounded(self) -> Report:
        """Return the report without the nodes of its graphs if it exceeds :data:`MAX_BYTES`."""
        if len(self.model_dump_json(indent=1).encode()) <= MAX_BYTES:
            return self
        counts = tuple(GraphView(title=item.title, nodes=(), operators=item.operators) for item in self.graphs)
        return self.model_copy(update={"graphs": counts})


def stored(name: str, count: int) -> str:
    """Return the size of a part of the archive as text. A graph without separate weights holds them itself."""
    return "in the graph" if name == "weights" and not count else size(count)


@dataclass
class StageRecord:
    """A stage in progress; the stage sets its detail and proof."""

    detail: str = ""
    parity: tuple[ParityEvidence, ...] = ()


class Journal:
    """Collects the steps of an export for its report.

    Args:
        progress: called with the name of each step as it begins.
    """

    def __init__(self, progress: Progress):
        self.progress = progress
        self.attempts: list[Attempt] = []
        self.rewrites: list[Rewrite] = []
        self.graphs: list[GraphView] = []
        self.notes: list[str] = []
        self.outside_opset: tuple[str, ...] = ()
        self.conditions: tuple[str, ...] = ()
        self._stages: list[Stage] = []

    @contextlib.contextmanager
    def stage(self, name: str, step: str = "") -> Iterator[StageRecord]:
        """Time a stage, and record it when it succeeds."""
        if step:
            self.progress(step)
        begin = time.perf_counter()
        entry = StageRecord()
        yield entry
        seconds = time.perf_counter() - begin
        self._stages.append(Stage(name=name, seconds=round(seconds, 3), detail=entry.detail, parity=entry.parity))

    @contextlib.contextmanager
    def tentative(self) -> Iterator[None]:
        """Forget what was recorded in the block if it fails, for callers that try another way."""
        before = self.mark()
        try:
            yield
        except Exception:  # and is raised again
            self._forget(before)
            raise

    def mark(self) -> tuple[int, ...]:
        """Return a point to go back to by :meth:`rewind`."""
        return tuple(map(len, self._records))

    def rewind(self, mark: tuple[int, ...], failure: str) -> None:
        """Forget what was recorded after a mark, except the attempts: the last one failed after its capture."""
        self._forget(mark)
        self.attempts[-1] = Attempt(route=self.attempts[-1].route, failure=failure)

    def _forget(self, mark: tuple[int, ...]) -> None:
        for records, count in zip(self._records, mark, strict=True):
            del records[count:]

    @property
    def _records(self) -> tuple[list[Any], ...]:
        return self._stages, self.rewrites, self.graphs, self.notes

    def note(self, *notes: str) -> None:
        """Add remarks to the archive's provenance."""
        self.notes.extend(notes)

    def report(self, serving: Serving, sizes: dict[str, int]) -> Report:
        """Return the report of the variant that ``serving`` describes."""
        return Report(
            name=serving.name,
            source=serving.provenance.source,
            created=serving.provenance.created,
            versions=serving.provenance.versions,
            inputs=tuple(map(str, serving.signature.inputs)),
            outputs=tuple(map(str, serving.signature.outputs)),
            batch=serving.signature.batch,
            attempts=tuple(self.attempts),
            stages=tuple(self._stages),
            rewrites=tuple(self.rewrites),
            graphs=tuple(self.graphs),
            sizes=sizes,
            notes=tuple(self.notes),
            outside_opset=self.outside_opset,
            conditions=self.conditions,
        )
