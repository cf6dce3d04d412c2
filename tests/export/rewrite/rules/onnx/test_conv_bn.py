from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.onnx import ConstantFolding, ConvBn
from tests.export.rewrite.rules.onnx.support import apply, export, floats, operators, parse, untouched


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(6 * 36, 5), nn.BatchNorm1d(5))
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.uniform_(part.weight, 0.5, 2)
                nn.init.normal_(part.bias)
                nn.init.normal_(part.running_mean)  # type: ignore[arg-type]
                nn.init.uniform_(part.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.down(x)))  # type: ignore[no-any-return]


def network(
    conv: str = "Conv <kernel_shape = [1, 1]> (x, w)",
    norm: str = "BatchNormalization <epsilon = 1e-3> (conv, gamma, beta, mean, variance)",
    more: str = "",
    outputs: str = "float[batch,4,2,2] y",
) -> ir.Model:
    weights = {"w": floats(4, 3, 1, 1), "gamma": floats(4), "beta": floats(4), "mean": floats(4)}
    return parse(
        f"""g (float[batch,3,2,2] x) => ({outputs}) {{
            conv = {conv}
            y = {norm}
            {more}
        }}""",
        weights={**weights, "variance": np.abs(floats(4)) + 1},
    )


@pytest.mark.matrix
def test_normalizations_go_into_the_layers_before_them() -> None:
    # PyTorch's exporter folds them itself unless ``optimize=False``, which leaves constants to fold first.
    model = ConstantFolding()(export(Net(), torch.randn(2, 3, 6, 6), optimize=False)).graph
    assert operators(model)["BatchNormalization"] == 3
    found = apply(ConvBn(), model, 3, tolerance=2e-5)
    assert not operators(found)["BatchNormalization"]
    assert operators(found)["Conv"] == operators(found)["ConvTranspose"] == operators(found)["Gemm"] == 1
    assert not [name for name in found.graph.initializers if "running" in name]


def test_a_file_of_another_exporter_is_folded_too() -> None:
    assert operators(apply(ConvBn(), network(), 1)) == {"Conv": 1}


@pytest.mark.parametrize(
    "model",
    [
        network(outputs="float[batch,4,2,2] y, float[batch,4,2,2] conv"),
        network(more="z = Conv <kernel_shape = [1, 1]> (x, w)", outputs="float[batch,4,2,2] y, float[batch,4,2,2] z"),
        network(
            conv="Conv <kernel_shape = [1, 1]> (x, w) early = Relu(conv)",
            norm="BatchNormalization (early, gamma, beta, mean, variance)",
        ),
    ],
    ids=["the convolution is an output", "its weights are shared", "something in between"],
)
def test_normalizations_that_cannot_be_folded_are_left(model: ir.Model) -> None:
    untouched(ConvBn(), model)


def test_weights_passed_by_the_caller_are_left() -> None:
    model = parse(
        """g (float[batch,3,2,2] x, float[4] gamma) => (float[batch,4,2,2] y) {
            conv = Conv <kernel_shape = [1, 1]> (x, w)
            y = BatchNormalization (conv, gamma, beta, mean, variance)
        }""",
        weights={"w": floats(4, 3, 1, 1), "beta": floats(4), "mean": floats(4), "variance": np.abs(floats(4)) + 1},
    )
    untouched(ConvBn(), model)


def test_a_normalization_that_is_trained_is_left() -> None:
    model = network()
    norm = next(node for node in model.graph if node.op_type == "BatchNormalization")
    norm.attributes.add(ir.AttrInt64("training_mode", 1))
    assert ConvBn()(model).matches == 0
