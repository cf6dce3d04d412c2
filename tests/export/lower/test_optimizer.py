"""onnxscript's optimizer: a step that breaks a graph is left out, and constants are matched exactly."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.export.lower import optimizer
from ingot.runtime import load_engine
from tests.export.models import Function


class ClampedTwice(nn.Module):
    """Clamps one tensor by two pairs of buffers, for which onnxscript makes two initializers of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.low: Tensor
        self.high: Tensor
        self.lower: Tensor
        self.higher: Tensor
        for name, value in {"low": -1.0, "high": 1.0, "lower": -0.5, "higher": 0.5}.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(x, self.low, self.high) - 2 * torch.clamp(x, self.lower, self.higher)


def test_a_step_whose_result_does_not_load_is_left_out() -> None:
    archive = export_model(ClampedTwice(), inputs="x:float32[batch,4]")
    (note,) = [note for note in archive.variant().serving.provenance.notes if "optimizer" in note]
    assert "left out: FuseMaxMinToClip (" in note
    assert len(note) < 300


def test_numbers_near_zero_or_one_are_kept() -> None:
    def divide(x: Tensor) -> Tensor:
        return x * 1.000009 / (x.square().sum(-1, keepdim=True).sqrt() + 1e-9) + 1e-8

    archive = export_model(Function(divide), inputs="x:float32[batch,4]")
    rows = torch.tensor([[0.0] * 4, [1e-9, 0, 0, 0], [1, 2, 3, 4]])
    engine = load_engine(archive.variants[0].path())
    np.testing.assert_allclose(engine.run({"x": rows.numpy()})["output"], divide(rows).numpy(), rtol=1e-6)
    engine.close()


def test_each_step_is_accepted_or_undone() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 18]> f (float[n] x) => (float[n] y) '
        "{ zero = Constant <value_float = 0.0> () sum = Add (x, zero) lost = Neg (sum) y = Relu (sum) }"
    )

    def accept(graph: ir.Model) -> None:
        if "Add" not in {node.op_type for node in graph.graph}:
            raise ExportError("the sum is gone")

    optimized, rejected = optimizer.optimize_gradually(model, accept)
    assert {node.op_type for node in optimized.graph} == {"Add", "Relu"}
    assert [(name, str(error)) for name, error in rejected.items()] == [("the rule for Add", "the sum is gone")]
    assert {node.op_type for node in optimizer.optimize_gradually(model)[0].graph} == {"Relu"}


@pytest.mark.parametrize("value", [1e-9, -1e-9])
def test_a_rule_for_zero_takes_zero_only(value: float) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 18]> f (float[n] x) => (float[n] y) '
        f"{{ tiny = Constant <value_float = {value}> () y = Add (x, tiny) }}"
    )
    optimizer.optimize(model)
    assert [node.op_type for node in model.graph] == ["Add"]
