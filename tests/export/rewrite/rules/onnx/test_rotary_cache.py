from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import nn

from ingot.export.rewrite.rules.onnx import RotaryCache
from tests.export.rewrite.rules.onnx.support import SIZES, apply, export, operators, parse, run, untouched


class Rope(nn.Module):
    """Rotary embedding of x [B, H, S, D] as in transformers' Llama, by positions from 0 on."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10000 ** (-torch.arange(0, 8, 2) / 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[2], dtype=torch.float32)[None, :, None]
        angles = positions * self.frequencies
        doubled = torch.cat((angles, angles), -1)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * doubled.cos()[:, None] + turned * doubled.sin()[:, None]


def rotated(batch: str, angles: str) -> ir.Model:
    return parse(
        f"""g (float[{batch},4,seq,8] x, float[{angles}] angles) => (float[{batch},4,seq,8] y) {{
            cosine = Cos(angles)
            sine = Sin(angles)
            y = RotaryEmbedding(x, cosine, sine)
        }}""",
        23,
    )


@pytest.mark.matrix
def test_the_exporters_form_at_opset_23_runs_for_more_than_one_row() -> None:
    example = torch.randn(2, 4, 5, 8)
    broken = export(Rope(), example, seq=2, opset=23)
    assert operators(broken)["RotaryEmbedding"] == 1
    with pytest.raises(InvalidArgument, match="cos_cache"):
        run(broken, SIZES[0])
    repaired = apply(RotaryCache(), broken, 1, sizes=({"batch": 1, "seq": 5},))  # the one size that both run at
    session = ort.InferenceSession(ir.to_proto(repaired).SerializeToString(), providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    np.testing.assert_allclose(actual, Rope()(example).numpy(), atol=1e-6)


def test_angles_for_each_row_are_not_repeated() -> None:
    untouched(RotaryCache(), rotated("batch", "batch,seq,4"))
    untouched(RotaryCache(), rotated("1", "1,seq,4"))
