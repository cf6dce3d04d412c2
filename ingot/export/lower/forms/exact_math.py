"""ONNX forms of functions that PyTorch's exporter approximates at the ends of their domains.

At exact multiples, at zeros with a sign and at infinities, the exporter's forms differ from PyTorch's kernels. The
forms here agree with these kernels for all values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core
from torch import fx

from ingot.export.lower.forms.size_arithmetic import is_integer

aten = torch.ops.aten
op: Any = opset18

_COMPARISONS = tuple(
    getattr(getattr(aten, name), kind) for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")
)
_SCALED = (
    *(aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor, aten.div.Scalar_mode, aten.div.Tensor_mode),
    *(aten.floor_divide.Scalar, aten.floor_divide.default),
)
# The largest exponent of integers whose product is written out; all numbers but 1 and -1 overflow with it.
MOST_MULTIPLIED = 63
# The exporter has no types for powers, and no overload for a float divided by a tensor of integers.
_UNCONVERTED = (aten.pow.Tensor_Tensor, aten.floor_divide.default)
_convert = torch.ops.prims.convert_element_type.default
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def ints(*values: int) -> Any:
    """Return whole numbers as a constant tensor of one dimension."""
    return op.Constant(value_ints=list(values))


def in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form that computes narrower floating-point types in single precision, as PyTorch's kernels do."""

    @functools.wraps(function)
    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in _NARROW:
            return function(x, *args, **kwargs)
        wide = op.Cast(x, to=ir.DataType.FLOAT)
        wide.dtype, wide.shape = ir.DataType.FLOAT, x.shape
        return op.CastLike(function(wide, *args, **kwargs), x)

    return apply


def like(value: Any, x: Any) -> Any:
    """Return a number, or a tensor, in the datatype of ``x``. Values made by ``op`` have none until it is set."""
    if isinstance(value, bool | int | float):
        made = op.Constant(value=ir.tensor(value, x.dtype))
    elif value.dtype == x.dtype:
        return value
    else:
        made = op.CastLike(value, x)
    made.dtype = x.dtype
    return made


def typed(value: Any, kind: ir.DataType) -> Any:
    """Return a number, or a tensor of a known datatype, in another datatype."""
    if not isinstance(value, ir.Value):
        made = op.Constant(value=ir.tensor(value if kind.is_integer() else float(value), kind))
    elif value.dtype is kind:
        return value
    else:
        made = op.Cast(value, to=kind)
        made.shape = value.shape
    made.dtype = kind
    return made


def keep_digits(model: ir.Model) -> None:
    """Keep all digits of the numbers that functions of the exporter's library convert to the type of a tensor.

    These functions have numbers as attributes, which become constants in single precision when the model is stored.
    :func:`ingot.export.torch_internals.precise_numbers` does the same for the functions that the exporter traces.
    """
    for node in list(model.graph.all_nodes()):
        constant = node.inputs[0].producer() if node.op_type == "CastLike" and node.inputs[0] is not None else None
        number = constant.attributes.get("value_float") if constant is not None else None
        target = node.inputs[1] if number is not None else None
        if number is None or node.graph is None or target is None or target.dtype not in (None, ir.DataType.DOUBLE):
            continue
        wide = ir.node("Constant", [], {"value": ir.tensor(number.value, ir.DataType.DOUBLE)})
        node.graph.insert_before(node, wide)
        node.replace_input_with(0, wide.outputs[0])


def round_numbers(program: fx.GraphModule) -> None:
    """Round the numbers that half-precision tensors meet as PyTorch does.

    It compares with numbers, or tensors without dimensions, in the tensor's datatype, where the exporter converts the
    tensor. It multiplies and divides by numbers of single precision, where the exporter rounds these to the datatype.
    """
    for node in _calls(program, *_COMPARISONS, *_SCALED):
        values = [argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in node.args]
        kinds = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.dim()}
        if kinds in ({torch.float16}, {torch.bfloat16}):
            (_compare if node.target in _COMPARISONS else _scale)(node, values, *kinds)


def convert_operands(program: fx.GraphModule) -> None:
    """Convert the tensors of operators to the type of the result where the exporter does not, or fails."""
    for node in _calls(program, *_UNCONVERTED):
        for place in (0, 1):
            _cast(node, place, node.meta["val"].dtype)


def unify_bounds(program: fx.GraphModule) -> None:
    """Give both bounds of ``aten.clamp`` one type, or apply them one after the other if one depends on a size.

    The exporter makes a tensor of a bound that has another type than the result, as 0 in ``x.clamp(0, 0.5)``, and finds
    no overload for a tensor and a number.
    """
    for node in _calls(program, aten.clamp.default):
        bounds: list[Any] = list(node.args[1:])
        if len(bounds) < 2 or any(bound is None for bound in bounds):
            continue
        if not any(isinstance(bound, fx.Node) for bound in bounds):
            if node.meta["val"].is_floating_point():
                node.args = (node.args[0], *map(float, bounds))
            continue
        _cast(node, 0, node.meta["val"].dtype)
        with node.graph.inserting_before(node):
            least = node.graph.call_function(aten.clamp.default, node.args[:2])
        least.meta = dict(node.meta)
        node.args = (least, None, bounds[1])


def _calls(program: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    graphs = [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target in targets]


def _compare(node: fx.Node, values: Sequence[Any], kind: torch.dtype) -> None:
    for place, value in enumerate(values):
        if isinstance(value, float):
            node.update_arg(place, torch.tensor(value, dtype=kind).item())
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            _cast(node, place, kind)


def _scale(node: fx.Node, values: Sequence[Any], kind: torch.dtype) -> None:
    if not any(isinstance(value, float) and torch.tensor(value, dtype=kind).item() != value for value in values):
        return
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            _cast(node, place, torch.float32)
    operator: Any = node.target
    with node.graph.inserting_before(node):
        exact = node.graph.call_function(operator, node.args, node.kwargs)
    exact.meta = {**node.meta, "val": node.meta["val"].to(torch.float32)}
    # The node stays in its place: an output of the program is known by its name.
    node.target, node.args, node.kwargs = _convert, (exact, kind), {}


def _cast(node: fx.Node, place: int, kind: torch.dtype) -> None:
    source = node.args[place]
    if not isinstance(source, fx.Node) or source.meta["val"].dtype is kind:
        return
    with node.graph.inserting_before(node):
        made = node.graph.call_function(_convert, (source, kind))
    made.meta = {**source.meta, "val": source.meta["val"].to(kind)}
    node.update_arg(place, made)


def add_product(x: Any, left: Any, right: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    """Express ``aten.addmm``; the factors of ONNX's Gemm are in single precision."""
    if x.dtype is not ir.DataType.DOUBLE or (beta, alpha) == (1, 1):
        return core.aten_addmm(x, left, right, beta, alpha)
    product = op.Mul(op.MatMul(left, right), like(float(alpha), x))
    return product if beta == 0 else op.Add(op.Mul(x, like(float(beta), x)), product)


def _is_negative(x: Any) -> Any:
    """Return where a floating-point number has its sign set, as that of -0.0 is; NaN has none."""
    zero = like(0.0, x)
    return op.Less(op.Where(op.Equal(x, zero), op.Reciprocal(x), x), zero)


def _has_other_sign(rest: Any, y: Any, zero: Any) -> Any:
    """Return where a remainder with the sign of the dividend is to be moved to the sign of the divisor."""
    return op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(y, zero)))


def _is_float(x: Any) -> bool:
    return isinstance(x, float) or (not isinstance(x, int) and bool(x.dtype.is_floating_point()))


def _in_one_type(x: Any, y: Any) -> tuple[Any, Any]:
    """Return two operands, one of which may be a number, in the type of the floating-point one, if there is one."""
    if _is_float(x) == _is_float(y):
        return (x, like(y, x)) if isinstance(x, ir.Value) else (like(x, y), y)
    floating = x if _is_float(x) else y
    kind = ir.DataType.FLOAT if isinstance(floating, float) else floating.dtype
    return typed(x, kind), typed(y, kind)


def remainder(x: Any, y: Any) -> Any:
    """Express ``aten.remainder``; the exporter's ``x - floor(x / y) * y`` is wrong at multiples and for infinite y."""
    x, y = _in_one_type(x, y)
    if is_integer(x):
        return core.aten_remainder(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y, like(0.0, x)), op.Add(rest, y), rest)


def floor_divide(x: Any, y: Any) -> Any:
    """Express ``aten.floor_divide``.

    The quotient of floating-point numbers may be rounded up to a whole number that the exact quotient does not reach,
    as that of 1.0 by 0.1. So the remainder is subtracted before the division, as PyTorch's kernel does.
    """
    x, y = _in_one_type(x, y)
    return core.aten_floor_divide(x, y) if x.dtype.is_integer() else _floor_divide(x, y)


@in_single
def _floor_divide(x: Any, y: Any) -> Any:
    y = like(y, x)
    rest = op.Mod(x, y, fmod=1)
    one, zero, half = (like(number, x) for number in (1.0, 0.0, 0.5))
    quotient = op.Div(op.Sub(x, rest), y)
    quotient = op.Where(_has_other_sign(rest, y, zero), op.Sub(quotient, one), quotient)
    down = op.Floor(quotient)
    whole = op.Where(op.Greater(op.Sub(quotient, down), half), op.Add(down, one), down)
    plain = op.Div(x, y)
    return op.Where(op.Equal(y, zero), plain, op.Where(op.Equal(quotient, zero), op.Mul(plain, zero), whole))


def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """Express ``aten.div`` with rounding; the exporter divides integers as 32-bit floating-point numbers."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    if rounding_mode == "trunc" and is_integer(x) and is_integer(y):
        return op.Div(x, like(y, x))
    return core.aten_div_mode(x, y, rounding_mode)


def power(x: Any, exponent: Any) -> Any:
    """Express ``aten.pow`` with an exponent that is a number, or depends on a size.

    PyTorch computes the powers 1/2 and -1/2 as roots, which differ for -inf and -0.0. ONNX Runtime computes powers of
    integers in floating point.
    """
    if is_integer(x) and isinstance(exponent, int) and not isinstance(exponent, bool) and 0 < exponent <= 8:
        found = x
        for _ in range(exponent - 1):
            found = op.Mul(found, x)
        return found if exponent > 1 else op.Identity(x)
    if is_integer(x) and is_integer(exponent):
        return _whole_power(x, exponent)
    if not isinstance(exponent, int | float):
        return op.Pow(op.Cast(x, to=ir.DataType.FLOAT) if is_integer(x) else x, exponent)
    if is_integer(x) or abs(exponent) != 0.5:
        return core.aten_pow_tensor_scalar(x, exponent)
    root = op.Sqrt(x)
    return root if exponent > 0 else op.Reciprocal(root)


def power_of_tensors(x: Any, exponent: Any) -> Any:
    """Express ``aten.pow.Tensor_Tensor`` of tensors of one type."""
    return _whole_power(x, exponent) if is_integer(x) else op.Pow(x, exponent)


def power_of_number(x: Any, exponent: Any) -> Any:
    """Express ``aten.pow.Scalar``."""
    whole = is_integer(x) and is_integer(exponent)
    return _whole_power(like(int(x), exponent), exponent) if whole else core.aten_pow_scalar(x, exponent)


def _whole_power(x: Any, exponent: Any) -> Any:
    """Multiply 64-bit integers, which wrap around, where the exponent's six lowest bits are set.

    A larger or a negative exponent leaves 0 of an even number, and the sign of 1 and -1; see
    :mod:`ingot.export.lower.deviations` for other odd numbers.
    """
    factor, exponent = typed(x, ir.DataType.INT64), typed(exponent, ir.DataType.INT64)
    zero, one, two, most = (op.Constant(value_int=number) for number in (0, 1, 2, MOST_MULTIPLIED))
    negative, large = op.Less(exponent, zero), op.Greater(exponent, most)
    vanishing = op.Or(
        op.And(negative, op.Not(op.Equal(op.Abs(factor), one))),
        op.And(large, op.Equal(op.Mod(factor, two), zero)),
    )
    rest, found = op.Where(op.Or(negative, large), op.Mod(exponent, two), exponent), one
    for step in range(MOST_MULTIPLIED.bit_length()):
        factor = op.Mul(factor, factor) if step else factor
        found = op.Where(op.Equal(op.Mod(rest, two), one), op.Mul(found, factor), found)
        rest = op.Div(rest, two)
    return op.Cast(op.Where(vanishing, zero, found), to=x.dtype)


def atan2(y: Any, x: Any) -> Any:
    """Express ``aten.atan2``: the angle of the first quadrant, then the quadrant by both signs.

    The exporter's form is NaN for two infinities, and has the wrong sign or value on the negative axis.
    """
    height, width = op.Abs(y), op.Abs(x)
    slope = op.Where(op.Equal(height, width), op.Sign(width), op.Div(height, width))  # also 0 / 0 and inf / inf
    angle = op.Atan(slope)
    angle = op.Where(_is_negative(x), op.Sub(like(math.pi, x), angle), angle)
    return op.Where(_is_negative(y), op.Neg(angle), angle)


def sign(x: Any) -> Any:
    """Express ``aten.sign`` by comparisons: NaN has the sign 0, and ONNX Runtime's kernel is wrong beyond 32 bits.

    See https://github.com/microsoft/onnxruntime/pull/25280.
    """
    zero = like(0, x) if x.dtype.is_integer() else like(0.0, x)
    return op.Sub(op.CastLike(op.Greater(x, zero), x), op.CastLike(op.Less(x, zero), x))


def is_negative(x: Any) -> Any:
    """Express ``aten.signbit``; the exporter's comparison is false for -0.0."""
    if x.dtype is ir.DataType.BOOL:
        return op.And(x, op.Not(x))
    return op.Less(x, like(0, x)) if is_integer(x) else _is_negative(x)


def angle(x: Any) -> Any:
    """Express ``aten.angle`` of real numbers, which is NaN for NaN."""
    if is_integer(x):
        x = op.Cast(x, to=ir.DataType.FLOAT)
        x.dtype = ir.DataType.FLOAT
    zero = like(0.0, x)
    return op.Where(op.IsNaN(x), x, op.Where(op.Less(x, zero), like(math.pi, x), zero))


def x_log_y(x: Any, y: Any) -> Any:
    """Express ``aten.xlogy``, which is 0 where x is 0, but NaN where y is NaN."""
    kinds = {value.dtype for value in (x, y) if isinstance(value, ir.Value) and not is_integer(value)}
    kind = (kinds.pop() if len(kinds) == 1 else None) or ir.DataType.FLOAT
    x, y = (typed(value, kind) for value in (x, y))
    zero = typed(0.0, kind)
    known = op.And(op.Equal(x, zero), op.Not(op.IsNaN(y)))
    return op.Where(known, zero, op.Mul(x, op.Log(y)))


def heaviside(x: Any, at_zero: Any) -> Any:
    """Express ``aten.heaviside``, which is 0 for NaN."""
    zero = like(0, x) if is_integer(x) else like(0.0, x)
    return op.Where(op.Equal(x, zero), at_zero, op.CastLike(op.Greater(x, zero), x))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: add_product,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.floor_divide.default: floor_divide,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power_of_tensors,
    aten.pow.Scalar: power_of_number,
    aten.atan2.default: atan2,
    aten.sign.default: sign,
    aten.signbit.default: is_negative,
    torch.ops.prims.signbit.default: is_negative,
    aten.heaviside.default: heaviside,
    aten.angle.default: angle,
    aten.xlogy.Tensor: x_log_y,
    aten.xlogy.Scalar_Self: x_log_y,
    aten.xlogy.Scalar_Other: x_log_y,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
