"""The export report: each step of an export with its proof. It is stored in the archive.

This file holds its documents and the journal that collects them; view.py and page.py show it as text and as HTML.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ingot.model_store.format.evidence import ParityEvidence
from ingot.model_store.format.manifest import Serving
from ingot.report.units import size

Progress = Callable[[str], None]
"""Called with the name of each step as it begins, for a progress display."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count, bounded because reports come from untrusted archives and are computed with when shown."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Attempt(_Record):
    """One rung of the capture ladder; ``failure`` is empty for the one that succeeded."""

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
    """One operation of a graph. ``module`` is the path of its submodule, such as ``layers.0.attn``."""

    name: str
    operator: str
    inputs: tuple[str, ...] = ()
    shape: str = ""
    module: str = ""
    source: str = ""


class GraphView(_Record):
    """A graph as the report shows it, with the count of each operator."""

    title: str
    nodes: tuple[Node, ...]
    operators: dict[str, Count]


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
