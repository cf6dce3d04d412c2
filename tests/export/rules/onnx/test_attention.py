from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from ingot.export.rewrite.rules.onnx.attention import Attention
from tests.export.rules.onnx.support import Several, apply, export, floats, operators, parse, untouched

EXAMPLE = torch.randn(2, 5, 16)


class Sdpa(nn.Module):
    """Self-attention of 4 heads of 4 by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = None if keep is None else keep[:, None, None, :].expand(batch, 1, length, length) > 0
        y = self.attend(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, 16))  # type: ignore[no-any-return]


class Eager(Sdpa):
    """The same written out, as transformers does without SDPA."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) / 2.0
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, -1e9)
        return scores.softmax(-1) @ v


def test_attention_of_pytorch_becomes_one_kernel() -> None:
    found = operators(apply(Attention(), export(Several(Sdpa(), Eager()), EXAMPLE, seq=1), 2))
    assert found["com.microsoft.MultiHeadAttention"] == 2
    assert not found["Softmax"]


def test_a_mask_goes_with_it() -> None:
    model = export(Several(Sdpa(), Eager()), EXAMPLE, torch.ones(2, 5, dtype=torch.int64), seq=1)
    assert operators(model)["IsNaN"] == 1
    found = operators(apply(Attention(), model, 2))
    assert found["com.microsoft.MultiHeadAttention"] == 2
    assert not found["IsNaN"]


def test_from_opset_23_on_it_becomes_the_operator_of_onnx() -> None:
    model = export(Eager(), EXAMPLE, torch.ones(2, 5, dtype=torch.int64), seq=1, opset=23)
    found = operators(apply(Attention(), model, 1))
    assert found["Attention"] == 1
    assert not found["Softmax"]


def attention(
    turned: str = "Transpose <perm = [0, 1, 3, 2]> (k)",
    scores: str = "Mul(product, scale)",
    masked: str = "Add(scores, mask)",
    weights: str = "Softmax <axis = -1> (masked)",
    result: str = "MatMul(weights, v)",
    k: str = "batch,2,total,4",
    mask: str = "batch,1,seq,total",
    outputs: str = "float[batch,2,seq,4] y",
    opset: int = 20,
) -> ir.Model:
    return parse(
        f"""g (float[batch,2,seq,4] q, float[{k}] k, float[batch,2,total,4] v, float[{mask}] mask) => ({outputs})
        <float scale = {{0.3}}, float zero = {{0}}> {{
            turned = {turned}
            product = MatMul(q, turned)
            scores = {scores}
            masked = {masked}
            weights = {weights}
            y = {result}
        }}""",
        opset,
        {"each": floats(4)},
    )


CROSSED = ({"batch": 2, "seq": 5, "total": 7}, {"batch": 3, "seq": 1, "total": 4})


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize(
    "mask", ["batch,1,seq,total", "1,2,1,total", "seq,total", "1,total", "total", "batch,2,1,total"]
)
def test_masks_of_every_shape_that_broadcasts(mask: str, opset: int) -> None:
    apply(Attention(), attention(mask=mask, opset=opset), 1, sizes=CROSSED)


@pytest.mark.parametrize("opset", [20, 23])
def test_keys_may_be_turned_from_their_projection_at_once(opset: int) -> None:
    model = attention(turned="Transpose <perm = [0, 2, 3, 1]> (k)", k="batch,total,2,4", opset=opset)
    apply(Attention(), model, 1, sizes=CROSSED)


def test_without_a_scale_it_is_one() -> None:
    model = attention(scores="Add(mask, product)", masked="Abs(mask)", weights="Softmax <axis = -1> (scores)")
    assert operators(apply(Attention(), model, 1, sizes=CROSSED))["com.microsoft.MultiHeadAttention"] == 1


@pytest.mark.parametrize(
    "model",
    [
        attention(turned="Transpose <perm = [0, 1, 3, 2]> (v)", result="MatMul(weights, k)", k="batch,1,total,4"),
        attention(turned="Transpose <perm = [0, 1, 3, 2]> (k)", k="1,2,total,4"),
        attention(weights="Softmax <axis = -2> (masked)"),
        attention(weights="Sigmoid(masked)"),
        attention(scores="Neg(product)"),
        attention(scores="Mul(product, mask)", masked="Identity(scores)"),
        attention(masked="Mul(scores, mask)"),
        attention(mask="batch,1,seq,1"),
        attention(outputs="float[batch,2,seq,4] y, float[batch,2,seq,total] weights"),
        attention(
            weights="Softmax <axis = -1> (masked) nan = IsNaN(weights) safe = Where(nan, zero, weights)",
            result="MatMul(safe, v)",
        ),
    ],
    ids=[
        "heads are broadcast",
        "the batch is broadcast",
        "softmax of another axis",
        "no softmax",
        "a negative scale",
        "a scale for each score",
        "a factor for a mask",
        "a mask for each query",
        "the weights are an output",
        "rows that may be masked as a whole",
    ],
)
def test_what_only_looks_like_it_is_left(model: ir.Model) -> None:
    untouched(Attention(), model, sizes=CROSSED)
