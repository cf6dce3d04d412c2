"""Complex numbers inside a model, including operators that PyTorch's exporter lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ingot.export import export_model
from ingot.runtime import EngineSpec, load_engine
from tests.export.models import Function

WEIGHTS = torch.complex(torch.randn(3, 3), torch.randn(3, 3))


def assigned(z: Tensor) -> Tensor:
    """Assign to slices, to an index and to all of a tensor."""
    result = torch.zeros_like(z)
    result[..., :2] = z[..., 1:] * 2
    result[1:, 0] = z[1:, 2]
    other = torch.ones_like(z)
    other[:, -1] = 1 + 2j  # type: ignore[assignment]
    other[:, 1] = z.real[:, 0]
    return result + other


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z.unsqueeze(1) * z.unsqueeze(-1),
        lambda z: z.unsqueeze(-2) + WEIGHTS,
        lambda z: z[:, 1] * z[0, -1],
        lambda z: z.select(-1, 2),
        lambda z: z.unsqueeze(1).expand(-1, 2, -1) * 2,
        lambda z: torch.cat([z, torch.zeros_like(z)], dim=-1),
        lambda z: z @ WEIGHTS,
        lambda z: torch.bmm(z.unsqueeze(1), WEIGHTS.expand(z.shape[0], 3, 3)),
        lambda z: torch.einsum("bi,ij->bj", z, WEIGHTS),
        lambda z: torch.einsum("bi->ib", z),
        lambda z: z[:, torch.tensor([2, 0])],
        lambda z: torch.fft.ifft(z, n=5),
        lambda z: torch.fft.hfft(z, dim=0)[: len(z), :1] * z,
        lambda z: torch.fft.ihfft2(z.real, norm="ortho") * z[:, :2],
        assigned,
    ],
    ids=[
        "unsqueeze",
        "unsqueeze-from-the-end",
        "index",
        "select",
        "expand",
        "zeros",
        "mm",
        "bmm",
        "einsum",
        "einsum-of-one",
        "indices",
        "fourier-of-more",
        "fourier-of-a-half",
        "fourier-to-a-half",
        "assignment",
    ],
)
@pytest.mark.one_case
def test_it_equals_the_model(function: Callable[[Tensor], Tensor]) -> None:
    def whole(x: Tensor) -> Tensor:
        return torch.view_as_real(function(torch.view_as_complex(x)).resolve_conj())

    archive = export_model(Function(whole), inputs="x:float32[batch,3,2]", rewrite="none", batch_dim="batch")
    x = torch.randn(4, 3, 2)
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), whole(x))


@pytest.mark.matrix
def test_parts_whose_squares_overflow_or_vanish() -> None:
    def whole(x: Tensor) -> tuple[Tensor, ...]:
        z, finite = torch.view_as_complex(x), torch.view_as_complex(x.nan_to_num(1, 2, 3))
        return z.abs(), z.angle(), torch.view_as_real(z / (1e30 - 3e30j)), torch.view_as_real(finite.reciprocal())

    archive = export_model(Function(whole), inputs="x:float32[batch,2]")
    values = torch.tensor([0.0, -0.0, 2.5, 1e-25, -1e30, torch.inf, torch.nan])
    x = torch.cartesian_prod(values, values)
    outputs = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()})
    for actual, expected in zip(outputs.values(), whole(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), expected, equal_nan=True, atol=0, rtol=1e-5)
