from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.onnx import RmsNorm
from tests.export.rewrite.rules.onnx.support import Several, apply, export, floats, operators, parse, untouched


class LlamaNorm(nn.Module):
    """As transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class SquaredNorm(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


def loaded(model: ir.Model, folder: Path) -> Counter[str]:
    """Return the operators that ONNX Runtime runs after its own optimizations."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


@pytest.mark.matrix
def test_the_norms_of_pytorch_run_as_one_kernel_each(tmp_path: Path) -> None:
    model = export(Several(LlamaNorm(), nn.RMSNorm(16), SquaredNorm()), torch.randn(2, 5, 16), seq=1)
    assert "SimplifiedLayerNormalization" not in loaded(model, tmp_path)
    found = apply(RmsNorm(), model, 3)
    assert loaded(found, tmp_path)["SimplifiedLayerNormalization"] == 3
    onnx.checker.check_model(ir.to_proto(found))


@pytest.mark.matrix
def test_a_norm_in_half_precision_that_is_computed_in_single_runs_as_one_kernel(tmp_path: Path) -> None:
    model = export(LlamaNorm().half(), torch.randn(2, 5, 16).half(), seq=1)
    found = apply(RmsNorm(), model, 1, tolerance=2e-3)
    assert loaded(found, tmp_path)["SimplifiedLayerNormalization"] == 1


def test_the_form_that_the_engine_knows_is_left_before_opset_23() -> None:
    untouched(RmsNorm(), norm("Pow(x, two)", "Div(x, root)"))


@pytest.mark.matrix
def test_from_opset_23_on_it_becomes_the_operator() -> None:
    model = export(SquaredNorm(), torch.randn(2, 5, 16), seq=1, opset=23)
    assert operators(apply(RmsNorm(), model, 1)) == {"RMSNormalization": 1}


def test_half_precision_becomes_the_operator_without_its_casts() -> None:
    model = parse(
        """g (float16[batch,seq,16] x) => (float16[batch,seq,16] y)
        <float two = {2}, int64[1] axes = {-1}, float epsilon = {1e-6}> {
            wide = Cast <to = 1> (x)
            square = Pow(wide, two)
            mean = ReduceMean(square, axes)
            sum = Add(mean, epsilon)
            root = Sqrt(sum)
            normal = Div(wide, root)
            narrow = Cast <to = 10> (normal)
            y = Mul(narrow, scale)
        }""",
        23,
        {"scale": floats(16).astype(np.float16)},
    )
    found = apply(RmsNorm(), model, 1, tolerance=4e-3)
    assert operators(found) == {"RMSNormalization": 1}


def norm(
    square: str = "Mul(x, x)",
    normal: str = "Div(x, root)",
    mean: str = "ReduceMean(square, axes)",
    result: str = "Mul(normal, scale)",
    more: str = "",
    outputs: str = "float[batch,seq,16] y",
) -> ir.Model:
    return parse(
        f"""g (float[batch,seq,16] x) => ({outputs})
        <float two = {{2}}, float three = {{3}}, float[1] epsilon = {{1e-6}},
         int64[1] axes = {{-1}}, int64[1] other = {{1}}> {{
            square = {square}
            mean = {mean}
            sum = Add(epsilon, mean)
            root = Sqrt(sum)
            normal = {normal}
            y = {result}
            {more}
        }}""",
        weights={"scale": floats(16), "full": floats(5, 16)},
    )


def test_operands_may_stand_in_any_order() -> None:
    apply(RmsNorm(), norm(result="Mul(scale, normal)"), 1)


@pytest.mark.parametrize(
    "model",
    [
        norm(square="Mul(x, two)"),
        norm(square="Pow(x, three)", normal="Div(x, root)"),
        norm(normal="Div(root, x)"),
        norm(mean="ReduceMean(square, other)"),
        norm(mean="ReduceMean <noop_with_empty_axes = 1> (square)"),
        norm(mean="ReduceSum(square, axes)"),
        norm(result="Mul(normal, two)"),
        norm(result="Mul(normal, root)"),
        norm(more="z = Neg(root)", outputs="float[batch,seq,16] y, float[batch,seq,1] z"),
        norm(outputs="float[batch,seq,16] y, float[batch,seq,1] mean"),
    ],
    ids=[
        "not a square",
        "a cube",
        "upside down",
        "another axis",
        "no axis",
        "a sum",
        "a scale of one element",
        "a scale that is computed",
        "a value that is used elsewhere",
        "a value that is an output",
    ],
)
def test_similar_graphs_are_left(model: ir.Model) -> None:
    untouched(RmsNorm(), model)


def test_a_scale_of_more_than_one_axis_is_left() -> None:
    untouched(RmsNorm(), norm(result="Mul(normal, full)"), sizes=({"batch": 2, "seq": 5}, {"batch": 1, "seq": 5}))
