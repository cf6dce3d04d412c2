from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import nn

from ingot.export.rewrite.rules.onnx.rotary import Rotary
from ingot.export.rewrite.rules.onnx.rotary_cache import RotaryCache
from tests.export.rules.onnx.support import SIZES, Several, apply, export, floats, operators, parse, run, untouched


class Rope(nn.Module):
    """Rotary embedding of x [B, H, S, D] as in transformers' Llama, by positions from 0 on."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10000 ** (-torch.arange(0, 8, 2) / 8))

    def angles(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[2], dtype=torch.float32)[None, :, None]
        return positions * self.frequencies

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = self.angles(x)
        doubled = torch.cat((frequencies, frequencies), -1)
        left, right = self.halves(x)
        return x * doubled.cos()[:, None] + torch.cat((-right, left), -1) * doubled.sin()[:, None]


class Chunked(Rope):
    """Halves by ``chunk``, and angles of the batch's own positions."""

    def angles(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[2], dtype=torch.float32)[None, :, None]
        return (positions + 100 * x[:, 0, :, :1].sign()) * self.frequencies

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = x.chunk(2, -1)
        return left, right


class Table(Rope):
    """Angles from a table, as GPT-J has them."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = torch.arange(64)[:, None] * self.frequencies
        self.register_buffer("cosines", torch.cat((frequencies, frequencies), -1).cos())
        self.register_buffer("sines", torch.cat((frequencies, frequencies), -1).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.halves(x)
        turned = torch.cat((-right, left), -1)
        return x * self.cosines[: x.shape[2]] + turned * self.sines[: x.shape[2]]


class Unequal(Table):
    """The halves of its angles differ, which the kernel cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sines", torch.rand(64, 8))


EXAMPLE = torch.randn(2, 4, 5, 8)


def test_rotary_embedding_of_pytorch_becomes_one_kernel_unless_the_halves_of_its_angles_differ() -> None:
    model = export(Several(Rope(), Chunked(), Table(), Unequal()), EXAMPLE, seq=2)
    assert operators(model)["Neg"] == 4
    found = operators(apply(Rotary(), model, 3))
    assert found["com.microsoft.RotaryEmbedding"] == 3
    assert found["Neg"] == 1


def test_from_opset_23_on_it_becomes_the_operator_of_onnx() -> None:
    found = operators(apply(Rotary(), export(Table(), EXAMPLE, seq=2, opset=23), 1))
    assert found["RotaryEmbedding"] == 1
    assert not found["Neg"]


def rotation(
    left: str = "Slice(x, zero, half, axis, one)",
    right: str = "Slice(x, half, end, axis, one)",
    turned: str = "Concat <axis = -1> (minus, left)",
    cosine: str = "Concat <axis = -1> (angles, angles)",
    result: str = "Add(straight, across)",
    angles: str = "1,1,seq,4",
    outputs: str = "float[batch,4,seq,8] y",
    opset: int = 20,
) -> ir.Model:
    return parse(
        f"""g (float[batch,4,seq,8] x, float[{angles}] angles) => ({outputs})
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] half = {{4}}, int64[1] five = {{5}},
         int64[1] end = {{8}}, int64[1] axis = {{3}}> {{
            other = Abs(angles)
            cosine = {cosine}
            sine = Concat <axis = -1> (angles, angles)
            left = {left}
            right = {right}
            minus = Neg(right)
            turned = {turned}
            straight = Mul(cosine, x)
            across = Mul(turned, sine)
            y = {result}
        }}""",
        opset,
        {"table": floats(1, 1, 1, 8)},
    )


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("angles", ["1,1,seq,4", "batch,1,seq,4", "1,seq,4", "seq,4"])
def test_angles_of_every_shape_that_broadcasts(angles: str, opset: int) -> None:
    apply(Rotary(), rotation(angles=angles, opset=opset), 1)


@pytest.mark.parametrize(
    "model",
    [
        rotation(left="Slice(x, half, end, axis, one)", right="Slice(x, zero, half, axis, one)"),
        rotation(left="Slice(x, one, five, axis, one)"),
        rotation(turned="Concat <axis = -1> (left, minus)"),
        rotation(cosine="Concat <axis = -1> (angles, other)"),
        rotation(cosine="Mul(table, table)"),
        rotation(result="Sub(straight, across)"),
        rotation(angles="1,4,seq,4"),
        rotation(angles="1,1,1,4"),
        rotation(outputs="float[batch,4,seq,8] y, float[batch,4,seq,8] turned"),
    ],
    ids=[
        "halves swapped",
        "halves that overlap",
        "turned the other way",
        "angles of unequal halves",
        "angles computed otherwise",
        "a difference",
        "angles for each head",
        "one angle for all",
        "an inner value is an output",
    ],
)
def test_what_only_looks_like_it_is_left(model: ir.Model) -> None:
    untouched(Rotary(), model)


def rotated(batch: str, angles: str) -> ir.Model:
    return parse(
        f"""g (float[{batch},4,seq,8] x, float[{angles}] angles) => (float[{batch},4,seq,8] y) {{
            cosine = Cos(angles)
            sine = Sin(angles)
            y = RotaryEmbedding(x, cosine, sine)
        }}""",
        23,
    )


def test_what_the_exporter_makes_of_it_at_opset_23_runs_for_more_than_one_row() -> None:
    broken = export(Rope(), EXAMPLE, seq=2, opset=23)
    assert operators(broken)["RotaryEmbedding"] == 1
    with pytest.raises(InvalidArgument, match="cos_cache"):
        run(broken, SIZES[0])
    repaired = apply(RotaryCache(), broken, 1, sizes=({"batch": 1, "seq": 5},))  # the one size that both run at
    session = ort.InferenceSession(ir.to_proto(repaired).SerializeToString(), providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {session.get_inputs()[0].name: EXAMPLE.numpy()})
    np.testing.assert_allclose(actual, Rope()(EXAMPLE).numpy(), atol=1e-6)


def test_angles_for_each_row_are_not_repeated() -> None:
    untouched(RotaryCache(), rotated("batch", "batch,seq,4"))
    untouched(RotaryCache(), rotated("1", "1,seq,4"))
