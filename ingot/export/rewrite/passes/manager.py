"""Passes over a graph of either kind, run in order, each followed by a proof.

A pass is ``requires -> call -> ensures`` and returns a :class:`PassResult`, as in onnx-ir. There are two kinds of
graph, and so two kinds of pass: :class:`FxPass` rewrites a ``torch.fx.GraphModule``, :class:`OnnxPass` an
``onnx_ir.Model``. A small rewrite rule is a pass whose ``call`` is one pattern and its replacement.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import onnx_ir as ir
from torch import fx

from ingot.errors import ExportError
from ingot.export.program import quiet

log = logging.getLogger(__name__)

Graph = TypeVar("Graph")


@dataclass(frozen=True)
class PassResult(Generic[Graph]):
    """A graph after a pass, and in how many places the pass changed it."""

    graph: Graph
    matches: int

    @property
    def modified(self) -> bool:
        return self.matches > 0


@dataclass(frozen=True)
class PassRecord:
    """The outcome of one pass, for the export report.

    ``error`` is the largest deviation from the original model that was measured after it, as a share of an output's
    largest value; None if it changed nothing. ``rejected`` is why its result was discarded, or empty.
    """

    rule: str
    kind: str
    matches: int
    error: float | None = None
    rejected: str = ""


class Pass(ABC, Generic[Graph]):
    """A rewrite of a graph.

    ``call`` receives a copy of the graph, whose nodes it may change in place. Weights are shared with other copies, so
    a changed tensor must be a new one.
    """

    name: ClassVar[str]
    """The name in ``--rule`` and in the report, such as ``conv-bn``."""
    kind: ClassVar[str]
    """``fx`` or ``onnx``."""
    default: ClassVar[bool] = True
    """Whether it runs unless other rules are chosen."""
    tidies: ClassVar[bool] = False
    """Whether the ONNX rule of the same name does the same later. A graph that only such rules changed need not be
    captured again."""

    remark: ClassVar[str] = ""
    """A note on each export that the rule changed, for rules that change results on some inputs; empty for none."""

    def requires(self, graph: Graph) -> None:
        """Check the preconditions of the pass.

        Raises:
            ExportError: the pass cannot handle this graph.
        """

    @abstractmethod
    def call(self, graph: Graph) -> PassResult[Graph]:
        """Rewrite the graph."""

    def ensures(self, graph: Graph) -> None:
        """Check the postconditions of the pass.

        Raises:
            ExportError: the pass has broken it.
        """

    @abstractmethod
    def copy(self, graph: Graph) -> Graph:
        """Return a copy with its own nodes and shared weights."""

    def __call__(self, graph: Graph) -> PassResult[Graph]:
        """Run the three steps on a copy."""
        graph = self.copy(graph)
        self.requires(graph)
        result = self.call(graph)
        if result.modified:
            self.ensures(result.graph)
        return result


class FxPass(Pass[fx.GraphModule]):
    """A pass over ``ExportedProgram.module()``: the captured graph before its operators are decomposed."""

    kind = "fx"

    def copy(self, graph: fx.GraphModule) -> fx.GraphModule:
        with quiet():  # torch warns about its own copies
            return fx.GraphModule(graph, copy.deepcopy(graph.graph))

    def ensures(self, graph: fx.GraphModule) -> None:
        graph.graph.lint()
        graph.recompile()


class OnnxPass(Pass[ir.Model]):
    """A pass over an ONNX model."""

    kind = "onnx"

    def copy(self, graph: ir.Model) -> ir.Model:
        return graph.clone()


Proof = Callable[[Graph], float]
"""Returns the largest deviation of a graph from the original model; raises ``ParityError`` above the tolerance."""


class PassManager(Generic[Graph]):
    """Runs passes in order. A pass that fails, or whose result is not equal, is rolled back and recorded.

    Args:
        passes: all of one kind.
        prove: called after each pass that changed something.
    """

    def __init__(self, passes: Sequence[Pass[Graph]], prove: Proof[Graph]):
        self._passes = passes
        self._prove = prove

    def run(self, graph: Graph) -> tuple[Graph, tuple[PassRecord, ...]]:
        """Return the rewritten graph and a record of each pass."""
        records = []
        for rule in self._passes:
            matches = 0
            try:
                with quiet():
                    result = rule(graph)
                matches = result.matches
                error = self._prove(result.graph) if result.modified else None
            except Exception as failure:  # rules may be the user's, and may meet graphs that their author never saw
                if not isinstance(failure, ExportError):
                    log.debug("pass %s failed", rule.name, exc_info=True)
                reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
                records.append(PassRecord(rule.name, rule.kind, matches, rejected=reason))
                continue
            records.append(PassRecord(rule.name, rule.kind, matches, error))
            if result.modified:
                graph = result.graph
        return graph, tuple(records)
