"""The route that ``auto`` takes, and the failure that it shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.errors import ExportError
from ingot.export import export_model
from tests.export.models import Function

GRAPHS = ["nodes:float32[n,6]", "graph:int64[n]"]


class Pool(nn.Module):
    """Sums the nodes of each graph; how many graphs there are is a value, which only ``strict`` can read."""

    def __init__(self, largest: int = 0) -> None:
        super().__init__()
        self.largest = largest

    def forward(self, nodes: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        if self.largest and nodes.shape[0] > self.largest:
            nodes = nodes * 2
        return nodes.new_zeros(int(graph.max()) + 1, 6).index_add(0, graph, nodes.cos() + nodes.cos())


@pytest.mark.matrix
def test_a_number_of_graphs_is_captured_and_rewritten() -> None:
    archive = export_model(Pool(), inputs=GRAPHS)
    notes = archive.variant().serving.provenance.notes
    assert any("torch.export, strict" in note for note in notes)
    assert not [note for note in notes if "left out" in note]


def test_the_failure_of_the_route_that_came_farthest_is_shown() -> None:
    with pytest.raises(ExportError, match=r"torch.export, strict cannot capture .*declare them as n=\.\.20"):
        export_model(Pool(largest=20), inputs=GRAPHS)


class Tolerant(nn.Module):
    """Calls a layer with arguments that only some layers accept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.layer(x, None)  # type: ignore[no-any-return]
        except TypeError:
            return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_a_module_may_catch_the_error_of_a_layer() -> None:
    archive = export_model(Tolerant(), inputs="x:float32[batch,4]")
    assert archive.variant().serving.provenance.notes[0].startswith("captured by torch.export, torch ")


@pytest.mark.matrix
def test_a_module_may_catch_the_error_of_an_operator() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.exp() + torch.ones(3)
        except RuntimeError:
            return x * 2

    assert export_model(Function(model), inputs="x:float32[batch,4]").signature.batch == "batch"
