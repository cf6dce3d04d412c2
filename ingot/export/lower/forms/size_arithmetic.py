"""ONNX forms of arithmetic with sizes, in double precision as in Python.

The exporter computes in single precision: ``math.ceil(n * 0.3)`` of 50 would be 16, not 15. A float that depends on a
size is a tensor of type double in the graph; :func:`ingot.export.torch_internals.precise_numbers` lets the exporter
cast it where it meets a tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18
from torch import fx

from ingot.export.torch_internals import SIZE_FUNCTIONS

aten = torch.ops.aten
op: Any = opset18
_DOUBLE = ir.DataType.DOUBLE
_INT64 = ir.DataType.INT64

# The datatype of the parts of complex numbers.
_PARTS = {ir.DataType.COMPLEX64: ir.DataType.FLOAT, ir.DataType.COMPLEX128: ir.DataType.DOUBLE}


def to_double(x: Any) -> Any:
    """Return a number, or a tensor of any type, as a tensor of type double."""
    if isinstance(x, int | float):
        return op.Constant(value=ir.tensor(float(x), _DOUBLE))
    if x.dtype is _DOUBLE:
        return x
    value = op.Cast(x, to=_DOUBLE)
    value.dtype, value.shape = _DOUBLE, x.shape
    return value


def _computed(operator_name: str, *numbers: Any) -> Any:
    value = getattr(op, operator_name)(*map(to_double, numbers))
    value.dtype, value.shape = _DOUBLE, ir.Shape([])
    return value


def is_integer(x: Any) -> bool:
    """Return whether a number or a tensor is an integer."""
    return isinstance(x, int) or (not isinstance(x, float) and x.dtype.is_integer())


def _function(operator_name: str) -> Callable[..., Any]:
    """Return a form of a function of floats that ONNX has as an operator."""
    return named(operator_name, lambda *numbers: _computed(operator_name, *numbers))


def _arithmetic(operator_name: str) -> Callable[..., Any]:
    """Return a form of an operation whose result is an integer if both operands are."""

    def apply(x: Any, y: Any) -> Any:
        if is_integer(x) and is_integer(y):
            return getattr(op, operator_name)(*(op.Constant(value_int=n) if isinstance(n, int) else n for n in (x, y)))
        return _computed(operator_name, x, y)

    return named(operator_name, apply)


def _rounding(operator_name: str) -> Callable[..., Any]:
    return named(operator_name, lambda x: _to_integer(operator_name, x))


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form that was made by a function, with a name."""
    function.__name__ = name  # the exporter's registry reads it
    return function


def rounded(x: Any, digits: Any = None) -> Any:
    """Express ``round`` to an integer: ONNX rounds halves to even numbers as well."""
    if digits is not None:
        raise NotImplementedError("round() of a size to decimal places")
    return op.Cast(op.Round(to_double(x)), to=_INT64)


def _to_integer(operator_name: str, x: Any) -> Any:
    return x if is_integer(x) else op.Cast(_computed(operator_name, x), to=_INT64)


def floor_divide_sizes(x: Any, y: Any) -> Any:
    """Express ``operator.floordiv``, which rounds down; the exporter's division rounds towards zero.

    They differ below zero only, as in ``-(-size // 2)``, so dividing a size by a positive number stays one node.
    """
    if _is_positive(y) and _is_size(x):
        return op.Div(x, y)
    return op.Div(op.Sub(x, op.Mod(x, y)), y)


def _is_positive(y: Any) -> bool:
    if isinstance(y, ir.Value):
        constant = ir.convenience.get_const_tensor(y)
        return constant is not None and bool((constant.numpy() > 0).all())
    return isinstance(y, int) and y > 0


def _is_size(x: Any) -> bool:
    """Return whether a value is a size of a tensor, or one divided by positive numbers."""
    producer = x.producer() if isinstance(x, ir.Value) else None
    if producer is None or producer.op_type == "Shape":
        return producer is not None
    if producer.op_type == "Div" and not _is_positive(producer.inputs[1]):
        return False
    return producer.op_type in ("Gather", "Squeeze", "Div") and _is_size(producer.inputs[0])


def scalar_tensor(x: Any, dtype: int | None = None, **options: Any) -> Any:
    """Express ``aten.scalar_tensor`` of a number that may depend on a size; a complex number as two real ones."""
    kind = ir.DataType.FLOAT if dtype in (None, -1) else ir.DataType(dtype)
    if kind in _PARTS:
        if isinstance(x, int | float | complex):
            return op.Constant(value=ir.tensor([complex(x).real, complex(x).imag], _PARTS[kind]))
        zero = op.Constant(value=ir.tensor([0.0], _PARTS[kind]))
        return op.Concat(op.Reshape(op.Cast(x, to=_PARTS[kind]), [1]), zero, axis=0)
    return op.Constant(value=ir.tensor(x, kind)) if isinstance(x, int | float | bool) else op.Cast(x, to=kind)


def full(size: Any, x: Any, dtype: int | None = None, **options: Any) -> Any:
    """Express ``aten.full`` with a number that may depend on a size."""
    if dtype in (None, -1):
        integer = ir.DataType.BOOL if isinstance(x, bool) else _INT64
        dtype = integer if is_integer(x) else ir.DataType.FLOAT
    value = scalar_tensor(x, dtype)
    return op.Expand(value, size) if size else value


def arange(start: Any, end: Any, step: Any = 1, dtype: int | None = None, **options: Any) -> Any:
    """Express ``aten.arange.start_step``.

    The exporter's form takes the type of ``end``, and counts the steps in the type of the result.
    """
    exact = all(map(is_integer, (start, end, step)))
    kind = (_INT64 if exact else ir.DataType.FLOAT) if dtype in (None, -1) else ir.DataType(dtype)
    if exact:
        first, last, gap = (
            op.Constant(value_int=x) if isinstance(x, int) else op.Reshape(x, []) for x in (start, end, step)
        )
        values = op.Range(first, last, gap)
    else:
        count = _to_integer("Ceil", _computed("Div", _computed("Sub", end, start), step))
        places = op.Range(
            op.Constant(value_int=0), op.Reshape(count, op.Constant(value_ints=[])), op.Constant(value_int=1)
        )
        values = op.Add(to_double(start), op.Mul(to_double(step), op.Cast(places, to=_DOUBLE)))
    return values if exact and kind is _INT64 else op.Cast(values, to=kind)


def arange_end(end: Any, dtype: int | None = None, **options: Any) -> Any:
    """Express ``aten.arange``."""
    return arange(0, end, 1, dtype)


def arange_start(start: Any, end: Any, dtype: int | None = None, **options: Any) -> Any:
    """Express ``aten.arange.start``."""
    return arange(start, end, 1, dtype)


def split_by_places(program: fx.GraphModule) -> None:
    """Replace the parts of a split into parts of a dynamic size by slices.

    The exporter makes a sequence of a number of tensors that depends on the size, in which samples cannot be followed.
    """
    for graph in [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]:
        for node in graph.find_nodes(op="call_function", target=aten.split.Tensor):
            source, size, axis = (*node.args, 0)[:3]
            if isinstance(size, fx.Node) and all(part.target is operator.getitem for part in node.users):
                for part in list(node.users):
                    start, end = (_multiple(part, size, int(part.args[1]) + more) for more in (0, 1))
                    part.target, part.args = aten.slice.Tensor, (source, axis, start, end)
                graph.erase_node(node)


def _multiple(before: fx.Node, size: fx.Node, times: int) -> fx.Node | int:
    if times < 2:
        return size if times else 0
    with before.graph.inserting_before(before):
        made = before.graph.call_function(operator.mul, (size, times))
    made.meta["val"] = size.meta["val"] * times
    return made


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: to_double,
    operator.add: _arithmetic("Add"),
    operator.sub: _arithmetic("Sub"),
    operator.mul: _arithmetic("Mul"),
    operator.pow: _arithmetic("Pow"),
    operator.truediv: _function("Div"),
    operator.floordiv: floor_divide_sizes,
    math.ceil: _rounding("Ceil"),
    math.floor: _rounding("Floor"),
    math.trunc: _rounding("Identity"),
    round: rounded,
    **{function: _function(name.capitalize()) for name, function in SIZE_FUNCTIONS.items()},
    aten.scalar_tensor.default: scalar_tensor,
    torch.ops.prims.scalar_tensor.default: scalar_tensor,
    aten.full.default: full,
    aten.arange.default: arange_end,
    aten.arange.start: arange_start,
    aten.arange.start_step: arange,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
