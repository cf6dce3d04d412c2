"""Modules that ``quantize`` exports first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ingot
from ingot.errors import InvalidArgument
from ingot.quant import StaticInt8


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) * by
        return result


@pytest.mark.matrix
def test_a_module_is_exported_with_the_inputs_that_the_data_holds() -> None:
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((64, 32)).astype(np.float32),
        "by": rng.random((64, 1)).astype(np.float32),
        "labels": np.arange(64) % 2,
    }
    config = ingot.QuantConfig(recipe=StaticInt8(), force=True)
    archive = ingot.quantize(Scaled().eval(), data, config=config)
    assert {variant.name for variant in archive.variants} == {"fp32", "int8"}
    assert [str(spec) for spec in archive.signature.inputs] == ["x:float32[batch,32]", "by:float32[batch,1]"]


@pytest.mark.parametrize("data", [None, {"other": np.ones((2, 3))}, [np.ones((2, 32), np.float32)]])
def test_data_without_the_names_of_its_inputs(data: object) -> None:
    with pytest.raises(InvalidArgument, match=r"as arrays by the names of its inputs \(x, by\)"):
        ingot.quantize(Scaled().eval(), data)  # type: ignore[arg-type]


def test_what_is_no_model() -> None:
    with pytest.raises(InvalidArgument, match="is neither an archive, a path nor a module"):
        ingot.quantize(3, {})  # type: ignore[arg-type]
