from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from ingot.export.rewrite.rules.onnx.silu_gate import SiluGate
from tests.export.rules.onnx.support import apply, export, operators, parse, untouched


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def gate(silu: str = "Mul(x, sigmoid)", result: str = "Mul(silu, z)", outputs: str = "float[batch,4] y") -> ir.Model:
    return parse(
        f"""g (float[batch,4] x, float[batch,4] z) => ({outputs}) {{
            sigmoid = Sigmoid(x)
            silu = {silu}
            y = {result}
        }}"""
    )


def test_the_gate_of_swiglu_uses_the_kernel_for_silu() -> None:
    found = apply(SiluGate(), export(SwiGlu(), torch.randn(2, 5, 16), seq=1), 1)
    assert operators(found) == {"MatMul": 3, "com.microsoft.QuickGelu": 1, "Mul": 1}


def test_operands_may_stand_in_any_order() -> None:
    apply(SiluGate(), gate("Mul(sigmoid, x)", "Mul(z, silu)"), 1)


@pytest.mark.parametrize(
    "model",
    [
        gate(silu="Mul(z, sigmoid)"),
        gate(result="Add(silu, z)"),
        gate(outputs="float[batch,4] y, float[batch,4] silu"),
    ],
    ids=["gated by another", "a sum", "silu is an output"],
)
def test_what_only_looks_like_it_is_left(model: ir.Model) -> None:
    untouched(SiluGate(), model)
