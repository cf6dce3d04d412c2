"""Models that do not accept all sizes and values: generated inputs, sizes found by trying, and messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.errors import ExportError, InvalidArgument
from ingot.export import export_model
from ingot.model_store import Archive
from ingot.tensors import Range
from tests.export.models import Function


def notes(archive: Archive) -> tuple[str, ...]:
    return archive.variant().serving.provenance.notes


EDGES = ["nodes:float32[n,6]", "edges:int64[2,e]"]


class GraphConvolution(nn.Module):
    """Sums messages over edges, weighted by degrees, with a self-loop at each node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        own = torch.arange(nodes.shape[0])
        source, target = torch.cat([edges[0], own]), torch.cat([edges[1], own])
        degree = torch.zeros(nodes.shape[0]).index_add(0, target, torch.ones_like(target, dtype=torch.float32))
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        hidden = self.linear(nodes)
        return torch.zeros_like(hidden).index_add(0, target, hidden[source] * weight[:, None])


class MeanPool(nn.Module):
    def forward(self, nodes: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4, 6).index_add(0, graph, nodes)
        count = torch.zeros(4).index_add(0, graph, torch.ones_like(graph, dtype=torch.float32))
        return total / count.clamp(min=1)[:, None]


class ScatterPool(nn.Module):
    def forward(self, nodes: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, 6).scatter_add(0, graph[:, None].expand(-1, 6), nodes)


class SmallTable(nn.Module):
    """Its second table has one row, so that no index of it may be 1."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(1, 4))

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self.words[ids] + self.kinds[kinds]


class Gather(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(1, index)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (GraphConvolution, EDGES),
        (MeanPool, ["nodes:float32[n,6]", "graph:int64[n]"]),
        (ScatterPool, ["nodes:float32[n,6]", "graph:int64[n]"]),
        (SmallTable, ["ids:int64[batch,seq]", "kinds:int64[batch,seq]"]),
        (Gather, ["x:float32[batch,n]", "index:int64[batch,m]"]),
    ],
)
@pytest.mark.one_case
def test_generated_indices_are_in_range_at_every_size(module: Callable[[], nn.Module], inputs: list[str]) -> None:
    archive = export_model(module(), inputs=inputs)
    assert archive.signature.ranges == {}  # sizes of 1 too


def test_the_indices_of_the_goldens_reach_all_nodes() -> None:
    (golden, *_) = export_model(GraphConvolution(), inputs=EDGES).variant().goldens()
    assert golden.inputs["edges"].max() == len(golden.inputs["nodes"]) - 1


def _spread(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 2:
        raise ValueError("give two rows or more")
    return x - x.mean(0)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize(
    ("module", "spec", "found", "note"),
    [
        (Function(_spread), "x:float32[n,6]", {"n": Range(2)}, "n=1 (ValueError: give two rows or more)"),
        (Positions(), "x:float32[batch,seq,4]", {"seq": Range(1, 20)}, "seq=33 (RuntimeError: The size of tensor a"),
    ],
)
def test_sizes_that_the_module_rejects_are_not_declared(
    module: nn.Module, spec: str, found: dict[str, Range], note: str
) -> None:
    archive = export_model(module, inputs=[spec])
    assert archive.signature.ranges == found
    (dim, bounds), *_ = found.items()
    assert any(note in text and f"the archive accepts {dim}={bounds}" in text for text in notes(archive))


def test_sizes_that_depend_on_each_other_are_proved_together() -> None:
    def attend(query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        if memory.shape[1] < query.shape[1]:
            raise ValueError("the memory is too short")
        return query.sum(1) + memory.sum(1)

    class Attend(nn.Module):
        def forward(self, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return attend(query, memory)

    archive = export_model(Attend(), inputs=["query:float32[batch,q,4]", "memory:float32[batch,m,4]"])
    assert archive.signature.ranges == {}
    assert any("not proved at m=1 with batch=3, q=5" in text for text in notes(archive))


class UNet(nn.Module):
    """Halves an image ``depth`` times, doubles it again and joins it with the image."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(1, 1, 3, 2, 1) for _ in range(depth))
        self.up = nn.ModuleList(nn.ConvTranspose2d(1, 1, 2, 2) for _ in range(depth))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = image
        for layer in (*self.down, *self.up):
            hidden = layer(hidden)
        return torch.cat([hidden, image], 1)


@pytest.mark.parametrize(
    ("module", "spec", "found"),
    [
        (UNet(1), "image:float32[batch,1,h,w]", {"h": Range(2, None, 2), "w": Range(2, None, 2)}),
        (UNet(2), "image:float32[batch,1,h=10..97,8]", {"h": Range(12, 96, 4)}),
        (nn.Conv2d(1, 1, (13, 1)), "input:float32[batch,1,h,w]", {"h": Range(13)}),
    ],
)
@pytest.mark.one_case
def test_steps_and_least_sizes_are_found(module: nn.Module, spec: str, found: dict[str, Range]) -> None:
    archive = export_model(module, inputs=[spec])
    assert archive.signature.ranges == found
    shown = ", ".join(f"{dim}={bounds}" for dim, bounds in found.items())
    assert any(f"found by trying, the archive accepts {shown}" in text for text in notes(archive))


class Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


@pytest.mark.parametrize(
    ("module", "inputs", "remedy"),
    [
        (nn.Linear(6, 4), ["input:float32[batch,5]"], "it runs with input:float32[batch,6]: declare it that way"),
        (nn.Linear(6, 4), ["input:float32[batch,width]"], "it runs with input:float32[batch,6]: declare it that way"),
        (nn.Linear(6, 4), ["input:int64[batch,6]"], "it runs with input:float32[batch,6]: declare it that way"),
        (nn.Embedding(9, 4), ["input:float32[batch,seq]"], "it runs with input:int64[batch,seq]: declare it that way"),
        (
            nn.Linear(6, 4),
            ["input:float32[batch,seq=2..64,5]"],
            "it runs with input:float32[batch,seq=2..64,6]: declare it that way",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(8)),
            ["input:float32[batch,1,h=4..64,w=4..64]"],
            "it runs with input:float32[batch,3,h=10..64,w=10..64]: declare it that way",
        ),
        (Sum(), ["a:float32[batch,s]", "b:float32[batch,t]"], "it runs with b:float32[batch,s]: declare it that way"),
    ],
)
def test_a_wrong_declaration_is_named_and_sizes_are_not_blamed(
    module: nn.Module, inputs: list[str], remedy: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        export_model(module, inputs=inputs)
    assert str(caught.value).endswith(remedy)
    assert "generated" not in str(caught.value)


def test_indices_of_a_type_that_the_engine_does_not_take() -> None:
    class Collect(nn.Module):
        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    with pytest.raises(ExportError) as caught:
        export_model(Collect(), inputs=["x:float32[n,6]", "edges:int32[2,e=1..9]"])
    assert str(caught.value).endswith("; declare inputs that are indices as int64: --input 'edges:int64[2,e=1..9]'")


def test_a_model_that_runs_on_nothing_made_up() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("these are not unit vectors")

    with pytest.raises(ExportError) as caught:
        export_model(Function(refuse), inputs=["x:float32[n,4]"])
    assert "not unit vectors; the sizes n=3 and the values were generated" in str(caught.value)
    assert all(str(caught.value).count(remedy) == 1 for remedy in ("n=2..", "n=..512:32", "--example"))
    with pytest.raises(ExportError, match="not unit vectors; the values were generated: pass real ones with --example"):
        export_model(Function(refuse), inputs=["x:float32[3,4]"])
