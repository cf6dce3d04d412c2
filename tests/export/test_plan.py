"""Plans: figures measured on fake tensors are compared with sums by hand and with real modules."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from ingot.errors import ExportError, InvalidArgument
from ingot.export import export_model
from ingot.export.estimate.cost import Cost
from ingot.export.estimate.plan import Estimate, Support, Weights, lines, plan
from ingot.export.pipeline import Capture
from ingot.export.source import load_source
from ingot.model_store import Archive, MemoryEvidence
from tests.export import models
from tests.export.source.test_imported import torchscript


class Wide(nn.Module):
    """Two matrix products of 64 x 64, with one buffer and one number that is not a float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(64))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x))) * self.scale


X64 = "x:float32[batch,64]"
X4 = "x:float32[batch,4]"


@pytest.mark.matrix
def test_weights_and_costs_are_the_ones_of_paper() -> None:
    found = plan(Wide, inputs=X64)
    assert found.built == "fake"
    assert found.weights == (
        Weights("parameters", "float32", 3, 2 * 64 * 64 + 64, (2 * 64 * 64 + 64) * 4),
        Weights("buffers", "float32", 1, 64, 256),
        Weights("buffers", "int64", 1, 3, 24),
    )
    assert found.parameters == 8256
    floats = 8256 + 64
    assert found.sizes == {
        "fp32": floats * 4 + 24,
        "fp16": floats * 2 + 24,
        "bf16": floats * 2 + 24,
        "int8": floats + 24,
        "int4": floats // 2 + 24,
    }
    row = 64 * 4
    # The input, which the caller holds, and the inputs and outputs of an operator.
    assert found.costs == tuple(Cost({"batch": rows}, rows * 2 * 2 * 64 * 64, rows * 3 * row) for rows in (1, 8, 32))
    assert found.routes == (Support("export"),)
    assert found.formats == (Support("onnx"), Support("aoti"), Support("pt2"))
    assert found.notes == ()


@pytest.mark.matrix
def test_a_tensor_is_counted_until_nothing_refers_to_it_and_views_count_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            z = y.view(-1).view(x.shape).t()
            del y
            z = z.exp()
            return torch.cat([z.sum(0), z.sum(0)])

    (cost,) = plan(Chain, inputs="x:float32[10,10]").costs
    assert cost == Cost({}, 0, 3 * 400)


@pytest.mark.matrix
def test_attention_and_recurrent_layers_are_counted() -> None:
    attention = models.Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x))
    (cost, *_) = plan(lambda: attention, inputs="x:float32[batch,2,10,8]").costs
    assert cost.flops == 2 * (2 * 2 * 10 * 10 * 8)
    (cost, *_) = plan(lambda: nn.LSTM(4, 8, batch_first=True), inputs="input:float32[batch,seq=..7,4]").costs
    assert cost.sizes == {"batch": 1, "seq": 7}
    assert cost.flops == 7 * 2 * 4 * 8 * (4 + 8)


@pytest.mark.matrix
def test_shared_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.rows.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows(x))  # type: ignore[no-any-return]

    found = plan(Tied, inputs="x:int64[batch,seq]")
    assert found.weights == (Weights("parameters", "float32", 1, 40, 160),)


@pytest.mark.matrix
def test_batches_stay_within_their_range() -> None:
    for bounds, wanted in (("..9", [1, 8]), ("3..4", [3])):
        costs = plan(models.Net, inputs=f"x:float32[rows={bounds},4]", batch_dim="rows").costs
        assert [cost.sizes["rows"] for cost in costs] == wanted


@pytest.mark.matrix
def test_inputs_that_no_memory_holds_are_planned() -> None:
    side = 1 << 20
    declared = f"x:float32[batch,height=..{side},width=..{side}]"
    found = plan(lambda: models.Function(lambda x: x.sum(1)), inputs=declared)
    assert [cost.sizes["width"] for cost in found.costs] == [side] * 3
    assert found.costs[0].activations == 4 * side * (side + 1)


@pytest.mark.matrix
def test_an_archive_has_the_memory_plan_of_its_captured_graph(tmp_path: Path) -> None:
    row = 64 * 4
    archive = export_model(Wide(), inputs=X64)
    archive.save(tmp_path / "wide.ingot")
    found = Archive.open(tmp_path / "wide.ingot").variant().serving.evidence.memory
    assert found == MemoryEvidence(fixed=0, per_row=3 * row)
    assert found.at(64) == 64 * 3 * row
    bounds = archive.variant().serving.evidence.bounds
    assert bounds is not None
    usual, measured = bounds.calls
    assert str(usual).startswith("up to ")
    assert str(usual).endswith(" at batch 32")
    assert measured.measured >= row
    assert bounds.loosest is None
    parts = torch.ones(100, 64)
    mixed = models.Function(lambda x: torch.cat([x, parts * 2]).sum(0, keepdim=True) + x)
    found = export_model(mixed, inputs=X64).variant().serving.evidence.memory
    # The product is there even if the batch is empty, and then twice: while it is concatenated.
    assert found == MemoryEvidence(fixed=2 * 100 * row, per_row=2 * row)


@pytest.mark.matrix
@pytest.mark.parametrize("route", ["auto", "trace"])
def test_a_graph_whose_values_become_sizes_has_no_memory_plan(route: Capture) -> None:
    chosen = models.Function(lambda x: x[x[:, 0] > 0] if route == "auto" else x * 2)
    archive = export_model(chosen, inputs=X4, capture=route)
    assert archive.variant().serving.evidence.memory is None


class Huge(nn.Module):
    """8.6 GB of parameters, which no test may allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16384, 16384) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def on_meta_only() -> nn.Module:
    """Reads a number in its constructor, as drop paths do, which a fake tensor does not have."""
    rates = [rate.item() for rate in torch.linspace(0, 1, 8, device="cpu")]
    assert len(rates) == 8
    return Huge()


@pytest.mark.matrix
def test_huge_weights_are_never_allocated() -> None:
    program = (
        "import json\n"
        "from dataclasses import asdict\n"
        "from ingot.export.estimate.plan import plan\n"
        "from tests.export.test_plan import Huge, on_meta_only\n"
        "found = [asdict(plan(make, inputs='x:float32[batch,16384]')) for make in (Huge, on_meta_only)]\n"
        "peak = next(row for row in open('/proc/self/status') if row.startswith('VmHWM'))\n"
        "print(json.dumps([*found, int(peak.split()[1])]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    fake, meta, most = json.loads(done.stdout.splitlines()[-1])
    assert most * 1024 < 1.5e9
    assert (fake.pop("built"), meta.pop("built")) == ("fake", "meta")
    assert fake == meta
    assert fake["sizes"]["fp32"] == 8 * (16384 * 16384 + 16384) * 4
    assert [cost["flops"] for cost in fake["costs"]] == [rows * 8 * 2 * 16384**2 for rows in (1, 8, 32)]
    assert fake["formats"] == [{"name": name, "obstacle": ""} for name in ("onnx", "aoti", "pt2")]


class TestRealWeights:
    @pytest.mark.matrix
    def test_a_factory_that_needs_data_is_measured_as_it_is(self) -> None:
        def factory() -> nn.Module:
            module = models.Net()
            (module.body[3].p, _) = (rate.item() for rate in torch.linspace(0, 1, 2))
            return module

        found = plan(factory, inputs=X4)
        assert found.built == "real"
        assert "the weights were allocated" in found.notes[0]
        assert found.parameters == sum(item.numel() for item in models.Net().parameters())

    @pytest.mark.matrix
    def test_a_module_that_existed_is_left_as_it_was(self) -> None:
        module = models.Net().train()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        found = plan(lambda: module, inputs=X4)
        assert found.built == "real"
        assert all(part.training for part in module.modules())
        assert all(type(value) is torch.Tensor for value in module.state_dict().values())
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert found.costs == plan(models.Net, inputs=X4).costs


class TestObstacles:
    @pytest.mark.matrix
    def test_code_that_reads_values_has_no_costs_but_an_explanation(self) -> None:
        found = plan(models.Branch, inputs=X4)
        assert found.costs == ()
        assert "does not run on fake tensors: its code branches on the values of a tensor" in found.notes[0]
        assert [route.name for route in found.routes] == ["export", "strict", "inferred", "deferred", "oblivious"]
        assert all("models.py" in route.obstacle for route in found.routes)
        assert [way.obstacle for way in found.formats] == ["no route captures the model"] * 3

    @pytest.mark.matrix
    def test_an_obstacle_of_all_routes_is_reported_once(self) -> None:
        shown = "\n".join(lines(plan(models.Branch, inputs=X4)))
        assert shown.partition("\nCapture\n")[2].count("its code branches on the values") == 2  # the other is a note
        assert "\n  strict: the same as export\n" in shown
        assert "\n  pt2: the same as onnx\n" in shown

    @pytest.mark.parametrize("replaces", [False, True])
    @pytest.mark.matrix
    def test_a_model_that_changes_a_buffer_is_noted(self, replaces: bool) -> None:
        class Count(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.count: torch.Tensor
                self.register_buffer("count", torch.zeros(1))
                self.register_buffer("other", torch.zeros(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if replaces:
                    self.count = self.count + 1
                else:
                    self.count += 1
                return x * self.count

        expected = "the model changes count while it runs: --lift-state makes it inputs and outputs"
        assert plan(Count, inputs=X4).notes == (expected,)

    @pytest.mark.matrix
    def test_a_model_that_changes_an_input_or_a_parameter_is_noted(self) -> None:
        found = plan(lambda: models.Function(lambda x: x.add_(1) * 2), inputs=X4)
        assert "the model changes x while it runs: --lift-state" in found.notes[-1]

        class Trains(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.weight.mul_(0.9)
                return super().forward(x)

        expected = ("the model changes its parameter weight while it runs; make it a buffer",)
        assert plan(lambda: Trains(4, 4), inputs="x:float32[batch,4]").notes[-1:] == expected

    @pytest.mark.matrix
    def test_an_operator_without_onnx_form_leaves_other_formats(self) -> None:
        onnx, aoti, pt2 = plan(lambda: models.Function(torch.special.bessel_j0), inputs=X4).formats
        assert "bessel_j0" in onnx.obstacle
        assert (aoti, pt2) == (Support("aoti"), Support("pt2"))

    @pytest.mark.matrix
    def test_a_layer_of_dynamic_length_lowers_only_to_onnx(self) -> None:
        onnx, *others = plan(lambda: nn.LSTM(4, 8, batch_first=True), inputs="input:float32[batch,seq,4]").formats
        assert onnx == Support("onnx")
        assert all("dimension 'seq'" in way.obstacle and "export to ONNX" in way.obstacle for way in others)

    def test_an_impossible_plan_explains_why(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="the model's inputs are not described"):
            plan(models.Net)
        with pytest.raises(RuntimeError, match="no weights here"):
            plan(models.failing, inputs=X4)
        script = load_source(str(torchscript(models.Net(), tmp_path / "net.pt")))
        assert isinstance(script, nn.Module)
        with pytest.raises(ExportError, match="a TorchScript model has its weights"):
            plan(lambda: script, inputs=X4)


@pytest.mark.matrix
def test_an_example_describes_the_inputs() -> None:
    found = plan(models.Net, example_inputs=torch.ones(2, 4))
    assert [cost.sizes for cost in found.costs] == [{"batch": rows} for rows in (1, 8, 32)]


def test_a_plan_as_text() -> None:
    shown = Estimate(
        built="meta",
        weights=(Weights("parameters", "bfloat16", 1, 70_553_706_496, 141_107_412_992),),
        sizes={"fp32": 282_214_825_984, "int4": 35_276_853_248},
        costs=(
            Cost({"batch": 1, "seq": 512}, 999, 1023),
            Cost({"batch": 32, "seq": 512}, 72_000_000_000_000, 1_048_576),
        ),
        routes=(Support("export", "too deep"), Support("strict")),
        formats=(Support("onnx"),),
        notes=("a remark",),
    )
    assert lines(shown) == [
        "Weights",
        "  parameters  bfloat16  70.6 G in 1 tensors  131 GiB",
        "",
        "Size of the weights by precision",
        "  fp32   263 GiB",
        "  int4  32.9 GiB",
        "",
        "One run",
        "  batch  seq  activations  FLOPs",
        "  1      512       1023 B    999",
        "  32     512        1 MiB   72 T",
        "",
        "Capture",
        "  export: too deep",
        "  strict: possible",
        "",
        "Formats",
        "  onnx: possible",
        "",
        "The model was built on the meta device.",
        "note: a remark",
    ]
    assert json.loads(json.dumps(asdict(shown)))["costs"][0]["flops"] == 999
