"""Reductions, pooling and interpolation: of nothing, of infinite numbers, and at sizes where products are rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.export.capture import functions
from ingot.export.lower import deviations
from ingot.runtime import EngineSpec, load_engine
from tests.export.lower.test_exact_math import INF, NAN, OfOne
from tests.export.models import Function

Functions = Mapping[str, Callable[[Tensor], Tensor]]

OF_ROWS: Functions = {
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "logsumexp of all": lambda x: torch.logsumexp(x, (0, 1), keepdim=True),
    "any": lambda x: (x > 1).any(1),
    "all": lambda x: x.isfinite().all(1),
    "variance": lambda x: x.var(1),
    "deviation": lambda x: x.std(1, correction=0),
    "mean": lambda x: x.mean(1),
    "variance and mean of all": lambda x: torch.stack(torch.var_mean(x.nan_to_num(0, 1, -1))),
    "least of all": lambda x: torch.amin(x.nan_to_num()),
    "least and largest": lambda x: torch.aminmax(x.nan_to_num()).max,
}
ROWS = [
    [-INF, 1, 2, 3],
    [-INF, -INF, -INF, -INF],
    [INF, 1, -INF, 3],
    [-INF, -100, -101, -132],
    [1, NAN, 2, 3],
    [1, 2, 3, 4],
]
OF_CHOSEN: Functions = {
    "any": lambda x: (x[x > 50] > 1).any(),
    "all": lambda x: (x[x > 50] > 1).all(),
    "mean": lambda x: x[x > 50].mean(),
    "mean of wide numbers": lambda x: x[x > 50].mean(dtype=torch.float64),
    "deviation": lambda x: x[x > 50].std(),
    "variance": lambda x: x[x > 50].var(correction=0),
    "product": lambda x: x[x > 50].prod(),
}
POOLS: Functions = {
    "1-D": lambda x: functional.max_pool1d(x[:, :, 0], 2),
    "2-D": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "2-D, indices": lambda x: functional.max_pool2d(x, 2, return_indices=True)[1],
    "indices of one image": lambda x: functional.max_pool2d(x[0], 3, 2, 1, 1, True, return_indices=True)[1],
    "1-D, indices": lambda x: functional.max_pool1d(x[:, :, 0], 2, dilation=2, return_indices=True)[1],
    "3-D": lambda x: functional.max_pool3d(x, 2),
    "average": lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=2),
    "average of volumes": lambda x: functional.avg_pool3d(x, 2, padding=1, divisor_override=3),
    "average without padding": lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "interpolated": lambda x: functional.interpolate(x[:, :, 0, 2:5], size=1, mode="linear"),
    "after relu": lambda x: functional.max_pool2d(functional.relu(x), 2),
}
# Windows at the end reach beyond the padding, or would start there, and are cut or left out.
CUT: Functions = {
    "divisor": lambda x: functional.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=5),
    "divisor, padding": lambda x: functional.avg_pool2d(x, 3, 2, 1, True, divisor_override=5),
    "divisor, padding not counted": lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False, 5),
    "divisor, long steps": lambda x: functional.avg_pool2d(x, (2, 3), (3, 5), (1, 0), True, divisor_override=-3),
    "divisor, volumes": lambda x: functional.avg_pool3d(x, 2, 3, 1, True, False, 7),
    "images": lambda x: functional.avg_pool2d(x, 3, 2, 1, True),
    "padding not counted": lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False),
    "volumes": lambda x: functional.avg_pool3d(x, 2, 3, 1, True, False),
    "lines": lambda x: functional.avg_pool1d(x[:, 0], 3, 2, 1, True, False),
}
RESIZED: Functions = {
    "linear": lambda x: functional.interpolate(x[:, :, 0], scale_factor=0.7, mode="linear"),
    "linear, size": lambda x: functional.interpolate(x[:, :, 0], size=9, mode="linear", align_corners=True),
    "bilinear": lambda x: functional.interpolate(x, scale_factor=0.7, mode="bilinear"),
    "bilinear, corners": lambda x: functional.interpolate(x, scale_factor=0.7, mode="bilinear", align_corners=True),
    "bicubic": lambda x: functional.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "nearest": lambda x: functional.interpolate(x, scale_factor=0.7),
    "nearest, size": lambda x: functional.interpolate(x, size=(7, x.shape[3] * 2)),
    "nearest, twice": lambda x: functional.interpolate(x, scale_factor=2),
    "places beyond the image": lambda x: functional.grid_sample(x, x.permute(0, 2, 3, 1) * 1e9, align_corners=False),
    "places beyond the image, border": lambda x: functional.grid_sample(
        x, x.permute(0, 2, 3, 1) * 1e9, "nearest", "border", align_corners=True
    ),
    "volumes": lambda x: functional.grid_sample(
        x[:, None], torch.stack((x, x.flip(-1), x * 1e9), -1), align_corners=False
    ),
    "volumes, reflection": lambda x: functional.grid_sample(
        x[:, None], torch.stack((x, x.flip(-1), x * 2), -1), "nearest", "reflection", align_corners=True
    ),
    "infinite places": lambda x: torch.cat(
        [
            functional.grid_sample(x, x.where(x < 1, INF).permute(0, 2, 3, 1), mode, border, align_corners=False)
            for mode, border in (("bilinear", "zeros"), ("bilinear", "border"), ("bicubic", "border"))
        ]
    ),
    "nearest-exact": lambda x: functional.interpolate(x, scale_factor=1.3, mode="nearest-exact"),
}


def check(functions: Functions, declared: str, *inputs: Tensor, close: float = 1e-6) -> None:
    archive = export_model(OfOne(functions), inputs=declared)
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    for x in inputs:
        outputs = engine.run({"x": x.numpy()})
        for (name, function), actual in zip(functions.items(), outputs.values(), strict=True):
            expected = function(x)
            found = torch.from_numpy(actual)
            assert found.shape == expected.shape, name
            assert torch.allclose(found.double(), expected.double(), close, close, equal_nan=True), (
                name,
                found,
                expected,
            )


@pytest.mark.matrix
def test_rows_of_infinite_numbers() -> None:
    check(OF_ROWS, "x:float32[n,4]", torch.tensor(ROWS))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_selections_of_nothing() -> None:
    check(OF_CHOSEN, "x:float32[n]", torch.tensor([1.0, 2, 3]), torch.tensor([60.0, 1, 2]), torch.tensor([60.0, 70]))


@pytest.mark.matrix
def test_pooling_keeps_minus_infinity() -> None:
    rows = torch.tensor([[-INF] * 8, [1, -INF, -INF, -INF, 2, -INF, INF, -INF], [torch.finfo().min] * 4 + [-INF] * 4])
    check(POOLS, "x:float32[batch,3,8,8]", rows[None, :, None].repeat(2, 1, 8, 1))


@pytest.mark.matrix
def test_averages_of_windows_that_reach_beyond_the_end() -> None:
    generator = torch.Generator().manual_seed(1)
    images = (torch.randn(2, 3, *shape, generator=generator) for shape in ((8, 8), (7, 10), (9, 11)))
    check(CUT, "x:float32[batch,3,height=4..,width=4..]", *images)


@pytest.mark.matrix
def test_sizes_and_pixels_of_interpolation() -> None:
    generator = torch.Generator().manual_seed(1)
    images = (torch.randn(1, 2, *shape, generator=generator) for shape in ((180, 50), (7, 10), (33, 21)))
    check(RESIZED, "x:float32[batch,2,height,width]", *images, close=1e-3)


def test_that_half_precision_is_not_rounded_is_stated_once() -> None:
    """ONNX Runtime computes it in single precision on CPUs, so 300 * 300 is finite."""

    def model(x: Tensor) -> Tensor:
        half = x.half()
        return (torch.sigmoid(half * half) + half).float()

    lines = deviations.of(torch.export.export(Function(model), (torch.randn(2, 4),)))
    assert [line.split()[0] for line in lines] == ["mul", "sigmoid"]
    assert "in float16 are not rounded on CPUs: finite beyond 65504" in lines[0]
    assert deviations.of(torch.export.export(Function(lambda x: x.half().float()), (torch.randn(2, 4),))) == ()


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_what_an_infinity_changes_is_stated_where_it_may_be_noticed() -> None:
    def model(x: Tensor) -> list[Tensor]:
        resized = [
            functional.interpolate(x, (9, 9), mode="bilinear", align_corners=corners) for corners in (True, False)
        ]
        groups = torch.native_group_norm(x, None, None, len(x), 4, 36, 2, 1e-5)
        layers = torch.native_layer_norm(x, [6], None, None, 1e-5)
        states = [layer(x[0])[0] for layer in recurrent]
        states += [torch.fft.hfft2(x), torch.fft.ihfftn(x), torch.fmod(x, 0.3)]
        return [*resized, groups[1], layers[1], functional.group_norm(x, 2), functional.layer_norm(x, [6]), *states]

    recurrent = nn.ModuleList([nn.LSTM(6, 3), nn.GRU(6, 3)])
    module = Function(model)
    module.recurrent = recurrent
    with functions.dynamic(module):
        exported = torch.export.export(module, (torch.randn(2, 4, 6, 6),))
    assert [line.split()[0] for line in deviations.of(exported)] == [
        *("upsample_bilinear2d", "native_group_norm", "native_layer_norm", "lstm", "gru", "fft_hfft2", "fft_ihfftn"),
        "fmod",
    ]


@pytest.mark.matrix
def test_samples_of_volumes_need_opset_20() -> None:
    module = OfOne({"volumes": RESIZED["volumes"]})
    with pytest.raises(ExportError, match="cannot be expressed in opset 18: GridSample needs opset 20"):
        export_model(module, inputs="x:float32[batch,2,3,4]", opset=18)
