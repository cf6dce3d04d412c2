"""ONNX forms of interpolation, with sizes and pixels computed as PyTorch computes them.

``Resize`` multiplies sizes by scales in single precision, PyTorch in double: 180 * 0.7 would be 126, not 125.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir, opset18, opset20
from onnxscript.function_libs.torch_lib.ops import core

from ingot.export.lower.forms.exact_math import ints, like
from ingot.export.lower.forms.size_arithmetic import named, to_double

aten = torch.ops.aten
op: Any = opset18

# A share of a scale that single precision resolves, and that moves no pixel visibly.
_NUDGE = 2.0**-22
# PyTorch's numbers of modes, and a place that is beyond images of up to 1e5 pixels, in units of half an image.
_LINEAR, _CUBIC, _ZEROS, _REFLECTION = 0, 2, 0, 2
_FAR = 1e4


def _spatial(x: Any) -> Any:
    return to_double(op.Shape(x, start=2))


def _scaled_sizes(x: Any, factors: Sequence[float]) -> Any:
    """Return the sizes of the result as PyTorch computes them, as doubles."""
    return op.Floor(op.Mul(_spatial(x), op.Constant(value=ir.tensor(list(factors), ir.DataType.DOUBLE))))


def _scales(x: Any, factors: Sequence[float]) -> Any:
    """Return scales with which ``Resize`` computes PyTorch's sizes: the factors, or next to them where these differ."""
    plain = op.Constant(value=ir.tensor(list(factors), ir.DataType.FLOAT))
    if not all(float(factor).is_integer() for factor in factors):
        before, wanted = _spatial(x), _scaled_sizes(x, factors)
        made = to_double(op.Floor(op.Mul(op.Cast(before, to=ir.DataType.FLOAT), plain)))
        up, down = (to_double(1 + sign * _NUDGE) for sign in (1, -1))
        near = op.Mul(op.Div(op.Max(made, wanted), before), op.Where(op.Less(made, wanted), up, down))
        plain = op.Where(op.Equal(made, wanted), plain, op.Cast(near, to=ir.DataType.FLOAT))
    return op.Concat(op.Constant(value_floats=[1.0, 1.0]), plain, axis=0)


def _size_list(x: Any, output_size: Any) -> Any:
    """Return all sizes of a result from those of its spatial dimensions: a tensor, or numbers and tensors."""
    if isinstance(output_size, list | tuple):
        output_size = op.Concat(
            *(
                op.Constant(value_ints=[size]) if isinstance(size, int) else op.Reshape(size, [1])
                for size in output_size
            ),
            axis=0,
        )
    return op.Concat(op.Shape(x, end=2), op.Cast(output_size, to=ir.DataType.INT64), axis=0)


def _smooth(mode: str, **options: Any) -> Callable[..., Any]:
    """Return a form of linear or cubic interpolation, whose arguments are those of the operators ``.vec``."""

    def interpolate(x: Any, output_size: Any, align_corners: bool, scale_factors: Sequence[float] | None = None) -> Any:
        corners = "align_corners" if align_corners else "half_pixel"
        attributes = {"mode": mode, "coordinate_transformation_mode": corners, **options}
        if scale_factors is None:
            return op.Resize(x, None, None, _size_list(x, output_size), **attributes)
        if align_corners:  # the scales follow from the sizes
            return op.Resize(x, None, None, _size_list(x, _scaled_sizes(x, scale_factors)), **attributes)
        return op.Resize(x, None, _scales(x, scale_factors), None, **attributes)

    return interpolate


def _linear(x: Any, output_size: Any, align_corners: bool, scale_factors: Sequence[float] | None = None) -> Any:
    """Express ``aten.upsample_linear1d`` by an image of height 1.

    PyTorch's decomposition computes ``a + (b - a) * 0`` at the places of pixels, which is NaN where one is infinite.
    """
    sizes = None if output_size is None else [1, *output_size]
    factors = None if scale_factors is None else [1.0, *scale_factors]
    return op.Squeeze(_smooth("linear")(op.Unsqueeze(x, [2]), sizes, align_corners, factors), [2])


def _nearest(*, centered: bool) -> Callable[..., Any]:
    """Return a form of ``aten.upsample_nearest``, or of ``aten._upsample_nearest_exact`` if ``centered``.

    ``Resize`` divides places by a scale, where PyTorch multiplies them by its inverse, and its rounding differs.
    """

    def interpolate(x: Any, output_size: Any = None, scale_factors: Sequence[float] | None = None) -> Any:
        rank = len(x.shape)
        if scale_factors is not None and not centered and all(factor in (1, 2, 4, 8) for factor in scale_factors):
            options = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            return op.Resize(x, None, _scales(x, scale_factors), None, **options)
        kind = ir.DataType.DOUBLE if x.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
        for index, axis in enumerate(range(2, rank)):
            size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
            if scale_factors is None:
                made = output_size[index]
                made = (
                    op.Constant(value_int=made)
                    if isinstance(made, int)
                    else op.Reshape(made, op.Constant(value_ints=[]))
                )
                ratio = op.Div(op.Cast(size, to=kind), op.Cast(made, to=kind))
            else:
                factor = scale_factors[index]
                made = op.Cast(op.Floor(op.Mul(to_double(size), to_double(factor))), to=ir.DataType.INT64)
                ratio = op.Constant(value=ir.tensor(1 / factor, kind))
            places = op.Cast(op.Range(op.Constant(value_int=0), made, op.Constant(value_int=1)), to=kind)
            if centered:
                places = op.Add(places, op.Constant(value=ir.tensor(0.5, kind)))
            last = op.Sub(size, op.Constant(value_int=1))
            chosen = op.Min(op.Cast(op.Floor(op.Mul(places, ratio)), to=ir.DataType.INT64), last)
            x = op.Gather(x, chosen, axis=axis)
        return x

    return interpolate


def grid_sample(x: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """Express ``aten.grid_sampler``; ONNX Runtime's kernel converts far places to integers, which overflow.

    At infinite places PyTorch's weights are NaN. Volumes need opset 20.
    """
    places = grid
    if padding_mode != _REFLECTION:  # all places beyond the image are alike
        grid = op.Clip(grid, like(-_FAR, grid), like(_FAR, grid))
    if len(x.shape) == 5:
        mode, padding = ("linear", "nearest")[interpolation_mode], ("zeros", "border", "reflection")[padding_mode]
        return opset20.GridSample(x, grid, mode=mode, padding_mode=padding, align_corners=align_corners)
    found = core.aten_grid_sampler_2d(x, grid, interpolation_mode, padding_mode, align_corners)
    linear, cubic = interpolation_mode == _LINEAR, interpolation_mode == _CUBIC
    if not (linear and padding_mode == _ZEROS) and not (cubic and padding_mode != _REFLECTION):
        return found
    undefined = op.ReduceSum(op.Mul(places, like(0.0, places)), ints(-1), keepdims=0)  # NaN at NaN and infinity, else 0
    return op.Add(found, op.Unsqueeze(undefined, ints(1)))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.upsample_nearest1d.vec: named("nearest", _nearest(centered=False)),
    aten.upsample_nearest2d.vec: named("nearest", _nearest(centered=False)),
    aten.upsample_nearest3d.vec: named("nearest", _nearest(centered=False)),
    aten._upsample_nearest_exact1d.vec: named("nearest_exact", _nearest(centered=True)),
    aten._upsample_nearest_exact2d.vec: named("nearest_exact", _nearest(centered=True)),
    aten._upsample_nearest_exact3d.vec: named("nearest_exact", _nearest(centered=True)),
    aten.upsample_linear1d.vec: _linear,
    aten.upsample_bilinear2d.vec: named("bilinear", _smooth("linear")),
    aten.upsample_trilinear3d.vec: named("trilinear", _smooth("linear")),
    aten.grid_sampler.default: grid_sample,
    aten.grid_sampler_2d.default: grid_sample,
    aten.grid_sampler_3d.default: grid_sample,
    aten.upsample_bicubic2d.vec: named("bicubic", _smooth("cubic", cubic_coeff_a=-0.75)),
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
