"""Models that do not accept all sizes and values: generated inputs, sizes found by trying, and messages."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.errors import ExportError, InvalidArgument, ParityError
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
@pytest.mark.matrix
def test_generated_indices_are_in_range_at_every_size(module: Callable[[], nn.Module], inputs: list[str]) -> None:
    archive = export_model(module(), inputs=inputs)
    assert archive.signature.ranges == {}  # sizes of 1 too


@pytest.mark.matrix
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


@pytest.mark.matrix
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


@pytest.mark.matrix
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
@pytest.mark.matrix
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
    assert "were generated" not in str(caught.value)


@pytest.mark.parametrize("function", [torch.floor_divide, torch.remainder, torch.fmod])
@pytest.mark.matrix
def test_divisors_need_other_values_and_not_another_datatype(function: Callable[..., torch.Tensor]) -> None:
    class Divide(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return function(a, b)

    with pytest.raises(ExportError, match="ZeroDivisionError") as caught:
        export_model(Divide(), inputs=["a:int64[n]", "b:int64[n]"])
    assert str(caught.value).endswith("it runs with b:int64[n]=1..9: declare it that way")
    export_model(Divide(), inputs=["a:int64[n]", "b:int64[n]=1..9"])


def test_divisors_that_are_1_by_accident_do_not_limit_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.export.proof.examples._SIZES", (1,))  # the first value of flags is always 1

    class Divide(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a // b

    with pytest.raises(ExportError) as caught:
        export_model(Divide(), inputs=["a:int64[batch,4]", "b:int64[batch,4]"])
    assert str(caught.value).endswith("it runs with b:int64[batch,4]=1..9: declare it that way")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.cell(x, self.h)
        return self.h


@pytest.mark.matrix
def test_a_state_with_the_size_of_the_first_call_is_the_cause() -> None:
    module = Recurrent()
    with pytest.raises(ExportError) as caught:
        export_model(module, inputs=["x:float32[batch,4]"])
    assert "the model's attribute 'h' keeps a state between calls" in str(caught.value)
    assert str(caught.value).endswith("accept the state as an input of forward and return its new value")
    assert module.h is None  # as the caller left it
    cell = nn.GRUCell(4, 4)
    export_model(cell, inputs=["input:float32[batch,4]", "hx:float32[batch,4]"])  # the remedy


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=ignored, need_weights=False)[0]  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, nn.TransformerDecoderLayer):
            return self.layer(x, x, tgt_key_padding_mask=ignored, memory_key_padding_mask=ignored)  # type: ignore[no-any-return]
        return self.layer(x, src_key_padding_mask=ignored)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "module",
    [
        Attention(),
        Layers(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
        Layers(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)),
    ],
    ids=["attention", "encoder", "decoder"],
)
@pytest.mark.matrix
def test_masks_where_true_means_ignore(module: nn.Module) -> None:
    archive = export_model(module, inputs=["x:float32[batch,seq,4]", "ignored:bool[batch,seq]"])
    assert archive.signature.ranges == {}  # sizes of 1 too
    assert not any("not compared" in note for note in notes(archive))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dims", ["batch,seq", "2,6"])
def test_an_encoder_that_clears_hidden_positions_is_refused_with_a_remedy(dims: str) -> None:
    """It does so for a batch whose samples are all padded at the end, which random masks of fixed sizes seldom are."""
    inputs = [f"x:float32[{dims},4]", f"ignored:bool[{dims}]"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
    model = Layers(encoder)
    with pytest.raises(ParityError, match=r"set model\.layer\.use_nested_tensor = False"):
        export_model(model, inputs=inputs)
    encoder.use_nested_tensor = False
    export_model(model, inputs=inputs)


@pytest.mark.matrix
def test_a_square_mask_has_one_dimension() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x @ x.mT).masked_fill(~mask, -1e4).softmax(-1) @ x

    archive = export_model(Attends(), inputs=["x:float32[batch,seq,4]", "mask:bool[seq,seq]"])
    assert archive.signature.batch == "batch"
    assert archive.signature.inputs[1].shape == ("seq", "seq")


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 4, mode="max")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(ids, offsets)  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_offsets_of_an_example_stay_in_order() -> None:
    example = torch.tensor([1, 4, 2, 7, 3, 9, 30]), torch.tensor([0, 2, 5])
    export_model(Bags(), example, inputs=["ids:int64[n]", "offsets:int64[batch]"])


@pytest.mark.matrix
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
    assert re.search(r"not unit vectors \(at .*\); the sizes n=3 and the values were generated", str(caught.value))
    assert all(str(caught.value).count(remedy) == 1 for remedy in ("n=2..", "n=..512:32", "--example"))
    with pytest.raises(ExportError, match=r"not unit vectors \(at .*\); the values were generated: pass real ones"):
        export_model(Function(refuse), inputs=["x:float32[3,4]"])


@pytest.mark.matrix
def test_a_layer_in_a_branch_of_torch_cond_is_not_counted_and_runs() -> None:
    layer = nn.Linear(3, 3)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: x.clone(), (x,))  # type: ignore[no-any-return]

    assert export_model(Branches(), inputs="x:float32[batch,3]").variants
