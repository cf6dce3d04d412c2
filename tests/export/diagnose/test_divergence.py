"""Faults are planted in graphs and must be located."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.export import arguments
from ingot.export.capture import exported, recurrent, routes
from ingot.export.diagnose import intermediates
from ingot.export.diagnose.divergence import Divergence, find_divergence
from ingot.export.lower import onnx as lower_onnx
from ingot.export.program import Eager, Program, quiet
from ingot.export.proof.examples import Examples
from ingot.tensors import Array, parse_spec
from tests.export import models

aten = torch.ops.aten
TOLERANCE = 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = self.mlp(self.norm(x))
        return torch.softmax(y.clamp(-1, 1), -1)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, torch.split(x, 4, -1)[1].exp()


@dataclass(frozen=True)
class Case:
    eager: Eager
    program: Program
    inputs: Mapping[str, Array]

    def find(self, model: ir.Model | None = None, program: Program | None = None) -> Divergence | None:
        return find_divergence(program or self.program, self.eager, model, self.inputs, TOLERANCE)

    def found(self, model: ir.Model | None = None, program: Program | None = None) -> Divergence:
        divergence = self.find(model, program)
        assert divergence is not None
        return divergence

    def lower(self) -> ir.Model:
        return lower_onnx.lower(self.program, translations=recurrent.TRANSLATIONS)


def case(module: nn.Module, *texts: str) -> Case:
    specs = tuple(parse_spec(text)[0] for text in texts)
    eager = Eager(module.eval(), arguments.from_names(module, [spec.name for spec in specs], {}))
    examples = Examples(specs, {})
    inputs = examples.make(examples.default_sizes)
    task = routes.Task(eager, specs, {}, inputs, tuple(eager.run(inputs)))
    program, _ = routes.capture(task, "export", lambda captured: None)
    assert isinstance(program, Program)
    return Case(eager, program, inputs)


@pytest.fixture(scope="module")
def good() -> Case:
    torch.manual_seed(0)
    return case(Tower(), "x:float32[batch,seq,8]")


@pytest.fixture
def broken(good: Case) -> Case:
    """A copy, to plant faults in."""
    with quiet():
        return replace(good, program=replace(good.program, exported=copy.deepcopy(good.program.exported)))


@pytest.fixture(scope="module")
def model(good: Case) -> ir.Model:
    return good.lower()


def line_of(code: str) -> str:
    """Return ``file:line`` of the first line of this file that has ``code``."""
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if code in line)}"


def exchange(program: Program, old: Any, new: Any, index: int = -1) -> Program:
    """Replace an operator by another, as an exporter with a bug would."""
    node = [node for node in program.exported.graph.nodes if node.target == old][index]
    node.target = new
    return program


def change(model: ir.Model, name: str, edit: Callable[[Array], None]) -> ir.Model:
    """Change an initializer of a copy."""
    changed = model.clone()
    value = changed.graph.initializers[name]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    edit(array)
    value.const_value = ir.Tensor(array, name=name)
    return changed


def add_one(array: Array) -> None:
    array.flat[0] += 1


class TestGoodModels:
    @pytest.mark.matrix
    def test_a_good_model_has_no_divergence(self, good: Case, model: ir.Model) -> None:
        assert good.find() is None
        assert good.find(model) is None

    @pytest.mark.parametrize(
        ("module", "texts"),
        [
            (models.Net(), ["x:float32[batch,4]"]),
            (nn.LSTM(4, 8, batch_first=True), ["input:float32[batch,seq,4]"]),
            (
                models.Function(lambda x: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x * 2) + 1),
                ["x:float32[batch]"],
            ),
            (models.Function(lambda x: torch.view_as_real(torch.fft.fft(x))), ["x:float32[batch,8]"]),
            (models.Function(lambda x: x.clone().mul_(2).add_(x).relu_()), ["x:float32[batch,4]"]),
        ],
        ids=["norm", "lstm", "cond", "complex", "in-place"],
    )
    @pytest.mark.matrix
    def test_whatever_stands_in_the_graph(self, module: nn.Module, texts: list[str]) -> None:
        found = case(module, *texts)
        assert found.find(found.lower()) is None


class TestCapture:
    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("old", "new", "index", "module", "code"),
        [
            (aten.gelu.default, aten.relu.default, -1, "blocks.1.mlp.1", "y = self.mlp(self.norm(x))"),
            (aten.gelu.default, aten.relu.default, 0, "blocks.0.mlp.1", "y = self.mlp(self.norm(x))"),
            (aten.add.Tensor, aten.sub.Tensor, 1, "blocks.1", "x = x + self.attention(x, x"),
            (aten.softmax.int, aten.log_softmax.int, 0, "blocks.0", "return torch.softmax(y.clamp"),
            (aten.exp.default, aten.sin.default, 0, "", "return x, torch.split(x, 4"),
        ],
    )
    def test_an_exchanged_operator_is_named(
        self, broken: Case, old: Any, new: Any, index: int, module: str, code: str
    ) -> None:
        node = [node.name for node in broken.program.exported.graph.nodes if node.target == old][index]
        found = broken.found(program=exchange(broken.program, old, new, index))
        assert (found.stage, found.name, found.operator) == ("capture", node, str(new))
        assert (found.module, found.source) == (module, line_of(code))
        assert found.error > 0.01
        assert found.unknown == ()

    @pytest.mark.matrix
    def test_the_last_good_operations_and_the_shape_are_named(self, broken: Case) -> None:
        found = broken.found(program=exchange(broken.program, aten.gelu.default, aten.relu.default))
        assert found.last_good == ("linear_6",)
        assert found.shape == (3, 5, 16)

    def test_the_first_of_two_faults_is_named(self, broken: Case) -> None:
        exchange(broken.program, aten.gelu.default, aten.relu.default, 1)
        exchange(broken.program, aten.add.Tensor, aten.sub.Tensor, 0)
        assert broken.found().operator == "aten.sub.Tensor"

    def test_a_fault_without_effect_on_outputs_is_ignored(self) -> None:
        silent = case(models.Function(lambda x: x * 2 + torch.sin(x) * 0), "x:float32[batch,4]")
        assert silent.find(program=exchange(silent.program, aten.sin.default, aten.cos.default)) is None

    @pytest.mark.matrix
    def test_a_recaptured_graph_still_names_the_node(self, broken: Case) -> None:
        exchange(broken.program, aten.gelu.default, aten.relu.default)
        graph = broken.program.exported.module()
        for node in graph.graph.nodes:
            node.meta.clear()
        tensors, specs = broken.eager.tensors(broken.inputs), broken.program.signature.inputs
        again = exported.trace(exported.positional(graph), specs, {}, tensors)
        found = broken.found(program=Program(again, broken.program.signature))
        assert (found.name, found.operator) == ("relu", "aten.relu.default")
        assert (found.module, found.source) == ("", "")
        assert found.last_good == ("linear_6",)

    @pytest.mark.matrix
    def test_a_module_that_compiles_its_branches_is_compared_by_submodules(self) -> None:
        class Branching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.act = nn.GELU()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.act(x)
                return torch.cond(y.sum() > 0, lambda: y + 1, lambda: y * 2) * 3  # type: ignore[no-any-return]

        branching = case(Branching(), "x:float32[batch,4]")
        assert branching.find() is None
        found = branching.found(program=exchange(branching.program, aten.gelu.default, aten.relu.default))
        assert (found.operator, found.module) == ("aten.relu.default", "act")

    def test_weights_that_changed_are_found_where_they_are_used(self, broken: Case) -> None:
        broken.program.exported.state_dict["ingot_wrapped.blocks.0.norm.weight"] = nn.Parameter(torch.zeros(8))
        found = broken.found()
        assert found.name == "layer_norm"
        assert found.module == "blocks.0.norm"


class TestOnnx:
    @pytest.mark.parametrize(
        ("weight", "node", "operator", "module", "unknown"),
        [
            ("blocks.0.norm.weight", "layer_norm", "LayerNormalization", "blocks.0.norm", False),
            ("blocks.1.mlp.0.bias", "linear_6", "Add", "blocks.1.mlp.0", True),
            ("blocks.0.mlp.2.bias", "linear_3", "Add", "blocks.0.mlp.2", True),
            ("blocks.1.attention.out_proj.weight", "linear_5", "Gemm", "blocks.1.attention", False),
        ],
    )
    @pytest.mark.matrix
    def test_a_changed_weight_is_found_where_it_is_used(
        self, good: Case, model: ir.Model, weight: str, node: str, operator: str, module: str, unknown: bool
    ) -> None:
        found = good.found(change(model, weight, add_one))
        assert (found.stage, found.name, found.operator, found.module) == ("onnx", node, operator, module)
        assert bool(found.unknown) is unknown
        if unknown:  # a matrix product that the FX graph has not by itself
            assert [item.partition(" ")[2] for item in found.unknown] == ["(MatMul)"]
            assert len(found.last_good) == 1

    @pytest.mark.matrix
    def test_a_changed_attribute_is_found(self, good: Case, model: ir.Model) -> None:
        changed = model.clone()
        for index, node in enumerate([node for node in changed.graph if node.op_type == "LayerNormalization"]):
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5 if index else 1e-5)
        found = good.found(changed)
        assert (found.name, found.source) == ("layer_norm_1", line_of("y = self.mlp(self.norm(x))"))

    @pytest.mark.matrix
    def test_a_fault_inside_what_one_operator_became_is_narrowed_down(self, good: Case, model: ir.Model) -> None:
        changed = model.clone()
        softmax = next(node for node in changed.graph if node.op_type == "Softmax")
        softmax.attributes["axis"] = ir.AttrInt64("axis", 1)
        found = good.found(changed)
        assert found.name == "scaled_dot_product_attention"
        assert f"{softmax.outputs[0].name} (Softmax)" in found.unknown
        assert found.source == line_of("x = x + self.attention(x, x")

    @pytest.mark.matrix
    def test_the_second_output_alone_may_be_wrong(self, good: Case, model: ir.Model) -> None:
        changed = model.clone()
        exp = next(node for node in changed.graph if node.op_type == "Exp")
        exp.op_type = "Sin"
        found = good.found(changed)
        assert (found.name, found.operator) == ("output_1", "Sin")
        assert len(found.last_good) == 1

    @pytest.mark.matrix
    def test_a_wrong_optimization_is_distinguished_from_a_wrong_graph(
        self, good: Case, model: ir.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = intermediates.run_onnx

        def miscalculate(graph: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
            answers = run(graph, inputs)
            fused = len(answers) == 2
            return {name: value + 1 if fused else value for name, value in answers.items()}

        monkeypatch.setattr(intermediates, "run_onnx", miscalculate)
        found = good.found(model)
        assert (found.stage, found.operator) == ("onnx", "")
        assert found.name in ("output_0", "output_1")
        assert "an optimization of the engine is wrong" in found.text()

    @pytest.mark.matrix
    def test_a_fault_behind_a_branch_is_not_the_branchs(self) -> None:
        module = models.Function(lambda x: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x * 2) * 3)
        branching = case(module, "x:float32[batch]")
        model = branching.lower()
        (multiply,) = [node for node in model.graph if node.op_type == "Mul"]
        multiply.op_type = "Div"
        found = branching.found(model)
        assert found.operator == "Div"
        assert found.last_good


def test_a_divergence_as_text() -> None:
    found = Divergence(
        stage="onnx",
        name="linear",
        operator="Add",
        module="body.0",
        source="my_model.py:7",
        error=0.25,
        tolerance=1e-4,
        shape=(3, 8),
        last_good=("x",),
        unknown=("val_1 (MatMul)",),
    )
    assert found.text().split("\n") == [
        "the ONNX model diverges at 'linear' (Add)",
        "  module  body.0",
        "  line    my_model.py:7",
        "  error   2.5e-01 of the largest value, tolerance 1e-04",
        "  shape   [3, 8]",
        "  good    x",
        "  unknown val_1 (MatMul)",
    ]


def test_the_module_is_left_as_it_was() -> None:
    module = models.Counter(shown=True)
    before = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    eager = Eager(module.eval(), arguments.from_names(module, ["x"], {}))
    outputs, values = intermediates.of_module(eager, {"x": np.ones((2, 2), np.int64)}, operators=True)
    assert outputs["output"].tolist() == [[2, 2], [2, 2]]
    assert any(np.array_equal(value, outputs["output"]) for _, value in values)
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()] == before
