"""ONNX forms of operators on complex numbers that PyTorch's exporter supports for real numbers only.

ONNX has no complex arithmetic: the exporter represents a complex tensor [...] as a real tensor [..., 2] of real and
imaginary parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core, fft
from torch import fx

from ingot.export import torch_internals
from ingot.export.lower.forms import missing_forms
from ingot.export.lower.forms.exact_math import atan2, ints, like
from ingot.export.lower.forms.tails import hypotenuse
from ingot.export.program import quiet

aten = torch.ops.aten
op: Any = opset18


def _axis(dim: int) -> int:
    """Return the dimension of the tensor of parts that corresponds to one of the complex tensor."""
    return dim if dim >= 0 else dim - 1


def _parts(x: Any) -> tuple[Any, Any]:
    parts = op.Gather(x, 0, axis=-1), op.Gather(x, 1, axis=-1)
    for part in parts:
        part.dtype = x.dtype
    return parts


def _of_parts(real: Any, imaginary: Any) -> Any:
    return op.Concat(op.Unsqueeze(real, [-1]), op.Unsqueeze(imaginary, [-1]), axis=-1)


def unsqueeze(x: Any, dim: int) -> Any:
    """Express ``aten.unsqueeze``."""
    return op.Unsqueeze(x, [_axis(dim)])


def select(x: Any, dim: int, index: Any) -> Any:
    """Express ``aten.select.int``."""
    return op.Gather(x, index, axis=_axis(dim))


def expand(x: Any, size: Sequence[Any], implicit: bool = False) -> Any:
    """Express ``aten.expand``."""
    return core.aten_expand(x, [*size, 2])


def zeros_like(x: Any, **options: Any) -> Any:
    """Express ``aten.zeros_like``."""
    return op.ConstantOfShape(op.Shape(x), value=ir.tensor(np.zeros(1, x.dtype.numpy())))


def ones_like(x: Any, **options: Any) -> Any:
    """Express ``aten.ones_like``."""
    return full_like(x, 1)


def full_like(x: Any, value: complex, **options: Any) -> Any:
    """Express ``aten.full_like`` and ``aten.fill`` with a number."""
    return op.Expand(_constant(value, x), op.Shape(x))


def copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Express ``aten.copy`` and ``aten.fill``, the values of an assignment to all of ``x``."""
    return op.Expand(source, op.Shape(x))


def slice_scatter(x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Express ``aten.slice_scatter``, an assignment to a slice."""
    return core.aten_slice_scatter(x, source, dim % (len(x.shape) - 1), start, end, step)


def select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    """Express ``aten.select_scatter``, an assignment to one index."""
    return core.aten_select_scatter(x, source, dim % (len(x.shape) - 1), index)


def pad(x: Any, places: Sequence[Any], value: float = 0.0) -> Any:
    """Express ``aten.constant_pad_nd`` with zeros, as a Fourier transform of more points does."""
    if value:
        raise ValueError("complex numbers can be padded with zeros only")
    return core.aten_constant_pad_nd(x, [0, 0, *places])


def product(left: Any, right: Any) -> Any:
    """Express ``aten.mm`` and ``aten.bmm``."""
    return _bilinear(op.MatMul, left, right)


def einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
    """Express ``aten.einsum`` of one or two tensors."""
    if len(tensors) == 1:
        return _of_parts(*(op.Einsum(part, equation=equation) for part in _parts(tensors[0])))
    left, right = tensors  # the exporter reports the ValueError of other counts with the operator's name
    return _bilinear(lambda a, b: op.Einsum(a, b, equation=equation), left, right)


def _bilinear(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    (a, b), (c, d) = _parts(left), _parts(right)
    return _of_parts(
        op.Sub(function(a, c), function(b, d)),
        op.Add(function(a, d), function(b, c)),
    )


def absolute(x: Any) -> Any:
    """Express ``aten.abs``; the exporter's squares overflow beyond 1e19."""
    return hypotenuse(*_parts(x))


def angle(x: Any) -> Any:
    """Express ``aten.angle``, with the signs of zeros."""
    real, imaginary = _parts(x)
    return atan2(imaginary, real)


def divide(x: Any, y: Any) -> Any:
    """Express ``aten.div``, with both numbers scaled by the larger part of the divisor: its square may overflow."""
    x, y = x if isinstance(x, ir.Value) else _constant(x, y), y if isinstance(y, ir.Value) else _constant(y, x)
    scale = op.ReduceMax(op.Abs(y), op.Constant(value_ints=[-1]), keepdims=1)
    (a, b), (c, d) = (_parts(_scaled(value, scale)) for value in (x, y))
    size = op.Add(op.Mul(c, c), op.Mul(d, d))
    real, imaginary = op.Add(op.Mul(a, c), op.Mul(b, d)), op.Sub(op.Mul(b, c), op.Mul(a, d))
    quotient = _of_parts(op.Div(real, size), op.Div(imaginary, size))
    return op.Where(op.Equal(scale, like(0.0, x)), op.Div(x, scale), quotient)


def _scaled(x: Any, scale: Any) -> Any:
    scaled = op.Div(x, scale)
    scaled.dtype = x.dtype
    return scaled


def reciprocal(x: Any) -> Any:
    """Express ``aten.reciprocal``."""
    return divide(1, x)


def inverse_of_half(x: Any, dim: Sequence[int], normalization: int, size: Any) -> Any:
    """Express ``aten._fft_c2r``.

    ONNX's inference takes the size of the half for that of a result of dynamic size, so the half is cut from ``x``:
    the size of what is cut is unknown to it.
    """
    if isinstance(size, ir.Value):
        axis = dim[-1] % (len(x.shape) - 1)
        half = op.Add(op.Div(op.Reshape(size, ints(-1)), ints(2)), ints(1))
        x = op.Slice(x, ints(0), half, ints(axis))
    return fft.aten__fft_c2r(x, dim, normalization, size)


def _constant(number: complex, typed: Any) -> Any:
    made = op.Constant(value=ir.tensor(np.array([complex(number).real, complex(number).imag], typed.dtype.numpy())))
    made.dtype = typed.dtype
    return made


def with_complex_values(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that makes real values complex before it assigns them to complex tensors.

    The exporter knows that a tensor is complex by its FX node only, where a translation cannot look.
    """

    def is_complex(value: Any) -> bool:
        return (
            isinstance(value, fx.Node)
            and isinstance(found := value.meta.get("val"), torch.Tensor)
            and found.is_complex()
        )

    def assigns(node: fx.Node) -> bool:
        return node.target is aten.copy_.default and is_complex(node.args[0]) and not is_complex(node.args[1])

    if not any(map(assigns, exported.graph.nodes)):
        return exported
    with quiet():
        copied = torch_internals.with_copied_graph(exported)
    graph = copied.graph_module.graph
    for node in filter(assigns, graph.nodes):
        real, dtype = node.args[1], node.args[0].meta["val"].dtype
        with graph.inserting_before(node):
            value = graph.call_function(aten._to_copy.default, (real,), {"dtype": dtype})
        value.meta = {**real.meta, "val": real.meta["val"].to(dtype)}
        node.update_arg(1, value)
    copied.graph_module.recompile()
    return copied


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten._conj_physical.default: core.aten_conj_complex,
    aten._fft_c2r.default: inverse_of_half,
    aten.abs.default: absolute,
    aten.angle.default: angle,
    aten.div.Tensor: divide,
    aten.reciprocal.default: reciprocal,
    aten.unsqueeze.default: unsqueeze,
    aten.select.int: select,
    aten.expand.default: expand,
    aten.zeros_like.default: zeros_like,
    aten.ones_like.default: ones_like,
    aten.full_like.default: full_like,
    aten.fill.Scalar: full_like,
    aten.fill.Tensor: copy,
    aten.copy.default: copy,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.constant_pad_nd.default: pad,
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.einsum.default: einsum,
    aten.roll.default: missing_forms.roll_complex,
    # Indices of the leading dimensions do not affect the last.
    aten.index.Tensor: core.aten_index,
}
"""By operator, for the exporter's registry."""
