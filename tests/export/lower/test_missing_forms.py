"""Operators that PyTorch's exporter has no ONNX form for, or refuses as they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ingot.export import export_model
from ingot.runtime import load_engine
from tests.export.models import Function

SDPA = functional.scaled_dot_product_attention


def check(function: Callable[[Tensor], Any], inputs: str, *examples: Tensor) -> None:
    """Export a function of one tensor, and compare the graph with it in ONNX Runtime at sizes of the test's own."""
    archive = export_model(Function(function), inputs=inputs, rewrite="none")
    engine = load_engine(archive.variants[0].path())
    for x in examples:
        actual = [torch.from_numpy(array) for array in engine.run({"x": x.numpy()}).values()]
        expected = function(x)
        torch.testing.assert_close(actual, [expected] if torch.is_tensor(expected) else list(expected))
    engine.close()


def attentions(x: Tensor) -> tuple[Tensor, ...]:
    query, key, value = x, x.flip(-1), x * 2
    some = x[..., :1] > x[..., :1].transpose(-2, -1)  # one row attends to nothing
    return (
        SDPA(query, key, value),
        SDPA(query, key, value, query @ key.transpose(-2, -1)),
        SDPA(query, key, value, some),
        SDPA(query, key, value, is_causal=True),
        SDPA(query, key, value, scale=0.3, dropout_p=0.0),
    )


@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (3, 2, 2)], ids=lambda dims: f"{len(dims) + 2}-D")
def test_attention_with_queries_of_any_rank(leading: tuple[int, ...]) -> None:
    dims = ",".join(["batch", *map(str, leading[1:]), "seq", "4"] if leading else ["seq", "4"])
    more = torch.randn(*(2 for _ in leading[:1]), *leading[1:], 10, 4)
    check(attentions, f"x:float32[{dims}]", torch.randn(*leading, 6, 4), more)


def test_causal_attention_to_more_keys_than_queries() -> None:
    check(lambda x: SDPA(x[:, 2:], x, x, is_causal=True), "x:float32[batch,seq=3..,4]", torch.randn(2, 7, 4))


def test_attention_whose_width_is_dynamic() -> None:
    check(lambda x: SDPA(x, x, x), "x:float32[batch,5,width=2..]", torch.randn(2, 5, 3), torch.randn(1, 5, 8))
