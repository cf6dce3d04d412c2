"""Python numbers that depend on a size: computed as Python computes them, in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ingot.export import export_model
from ingot.runtime import EngineSpec, load_engine
from tests.export.models import Function


def floats(x: Tensor) -> list[Tensor]:
    n = x.shape[1]
    root = math.sqrt(n)
    return [
        *(x * root, n / 3 - x, x ** (n / 7), x.double() * float(n) / 3, x.half() * root, x > n / 3),
        *(torch.where(x > 0, x, n / 3), x.clamp(max=n / 10), x.long() - n / 3, torch.full((2, n), root)),
    ]


def ranges(x: Tensor) -> list[Tensor]:
    n = x.shape[1]
    return [
        *(torch.arange(0.5, n), torch.arange(n, dtype=torch.float32), torch.arange(0, n * 0.1, 0.1)),
        *(torch.arange(n, 0, -2), torch.arange(1, n, dtype=torch.int32), torch.arange(n, dtype=torch.float16)),
    ]


def sizes(x: Tensor) -> list[Tensor]:
    n = x.shape[1]
    return [x.new_ones(math.ceil(n * 0.3)), x.new_ones(int(n * 0.29)), x.new_ones(math.floor(n / 3))]


def points(x: Tensor) -> list[Tensor]:
    """As the position embeddings of timm's dinov3."""
    n = x.shape[1]
    return [torch.linspace(-1, 1, n), torch.linspace(0, float(n - 1), n), torch.arange(0.5, float(n)) / float(n) * x]


@pytest.mark.one_case
@pytest.mark.parametrize("function", [floats, ranges, sizes, points])
def test_it_equals_the_model(function: Callable[[Tensor], list[Tensor]]) -> None:
    archive = export_model(Function(function), inputs="x:float32[2,n=2..400]")
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    for size in (50, 100, 110, 199):  # where a product with 0.3 or 0.1 in single precision rounds up
        x = torch.rand(2, size)
        for expected, actual in zip(function(x), engine.run({"x": x.numpy()}).values(), strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), expected)
    engine.close()


@pytest.mark.matrix
def test_batches_that_are_joined_and_split_again_keep_batching() -> None:
    """As in classifier-free guidance, which runs both halves of a batch at once."""

    def guided(x: Tensor) -> Tensor:
        with_text, without = torch.cat([x, x * 2]).chunk(2)
        return without + 3 * (with_text - without)

    archive = export_model(Function(guided), inputs="x:float32[batch,4]")
    assert archive.signature.batch == "batch"
    x = torch.randn(5, 4)
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), guided(x))
