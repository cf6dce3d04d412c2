"""ONNX forms of losses of which PyTorch's exporter ignores an argument, or refuses a kind of target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import nn

from ingot.export.lower.forms.exact_math import ints, like

aten = torch.ops.aten
op: Any = opset18

_NONE, _MEAN = 0, 1


def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Express ``aten.cross_entropy_loss``; the exporter ignores smoothing, and refuses targets that are shares.

    Args:
        x: the scores [batch, classes, ...], or [classes].
        target: the classes [batch, ...], or the shares of the classes, with the shape of ``x``.
        weight: of the classes [classes].
        reduction: 0 for the loss of each target, 1 for their mean, 2 for their sum.
        ignore_index: the class of targets that are left out.
        label_smoothing: the part of each target that all classes share.
    """
    alone = len(x.shape) == 1
    if alone:
        x, target = _as_batch(x), _as_batch(target)
    if target.dtype.is_floating_point():
        losses = _of_shares(x, target, weight, label_smoothing)
        count = op.Size(losses)
    elif alone or label_smoothing:
        losses = _of_classes(x, target, weight, ignore_index, label_smoothing)
        count = _count(target, weight, ignore_index)
    else:
        return nn.aten_cross_entropy_loss(x, target, weight, reduction, ignore_index)
    if reduction == _NONE:
        return op.Squeeze(losses, ints(0)) if alone else losses
    total = op.ReduceSum(losses, keepdims=0)
    return op.Div(total, op.CastLike(count, total)) if reduction == _MEAN else total


def _as_batch(x: Any) -> Any:
    made = op.Unsqueeze(x, ints(0))
    made.dtype, made.shape = x.dtype, ir.Shape([1, *x.shape])
    return made


def _of_shares(x: Any, target: Any, weight: Any, smoothing: float) -> Any:
    if smoothing:
        target = op.Add(op.Mul(target, like(1 - smoothing, x)), _share(x, smoothing))
    return _summed(op.Mul(_logarithms(x, weight), target))


def _of_classes(x: Any, target: Any, weight: Any, ignore_index: int, smoothing: float) -> Any:
    losses = nn.aten_cross_entropy_loss(x, target, weight, _NONE, ignore_index)
    if not smoothing:
        return losses
    every = op.Where(_is(target, ignore_index), like(0.0, x), _summed(_logarithms(x, weight)))
    return op.Add(op.Mul(losses, like(1 - smoothing, x)), op.Mul(every, _share(x, smoothing)))


def _count(target: Any, weight: Any, ignore_index: int) -> Any:
    """Return the sum of the targets' weights, or their number."""
    ignored, zero = _is(target, ignore_index), op.Constant(value_int=0)
    if weight is None:
        return op.ReduceSum(op.Where(ignored, zero, op.Constant(value_int=1)), keepdims=0)
    weights = op.Gather(weight, op.Where(ignored, zero, target))
    return op.ReduceSum(op.Where(ignored, like(0.0, weight), weights), keepdims=0)


def _is(target: Any, index: int) -> Any:
    return op.Equal(target, op.Constant(value_int=index))


def _summed(x: Any) -> Any:
    return op.Neg(op.ReduceSum(x, ints(1), keepdims=0))


def _logarithms(x: Any, weight: Any) -> Any:
    logarithms = op.LogSoftmax(x, axis=1)
    return logarithms if weight is None else op.Mul(logarithms, op.Reshape(weight, ints(-1, *[1] * (len(x.shape) - 2))))


def _share(x: Any, smoothing: float) -> Any:
    """Return the part of a target that each class gets."""
    return op.Div(like(smoothing, x), op.CastLike(op.Squeeze(op.Shape(x, start=1, end=2), ints(0)), x))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.cross_entropy_loss.default: cross_entropy}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
