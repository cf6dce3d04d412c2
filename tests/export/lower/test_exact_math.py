"""Functions at the ends of their domains: multiples, ties, zeros with a sign, infinities, NaN and large integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.export import export_model
from ingot.runtime import EngineSpec, load_engine
from tests.support import matrix

INF, NAN = float("inf"), float("nan")

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "clamp from 0 to 0.5": lambda x: x.clamp(0, 0.5),
    "clamp from 0.5 to a size": lambda x: x.clamp(0.5, x.shape[0]),
    "x // 0.1": lambda x: x // 0.1,
    "x // -3": lambda x: x // -3,
    "7 // x": lambda x: 7 // x,
    "floor of x / 3": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "x % 0.1": lambda x: x % 0.1,
    "7.5 // x": lambda x: 7.5 // x,
    "x % -3": lambda x: x % -3,
    "7 % x": lambda x: 7 % x,
    "7.5 % x": lambda x: 7.5 % x,
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    "sign": torch.sign,
    "differences that are not 0": lambda x: torch.cdist(x[:, None, None], x[:, None, None].flip(0), p=0.0)[..., 0],
    "log1p": torch.log1p,
    "level of a power of 2": lambda x: torch.log2(2 ** x.nan_to_num(15).round().clamp(-26, 57)).floor(),
    "level of a power of 10": lambda x: torch.log10(10 ** x.nan_to_num(9).round().clamp(0, 10)).floor(),
    "histogram": lambda x: torch.histc(-x.nan_to_num(0, 5, -5), 4, -1, 1),
    "logsigmoid": functional.logsigmoid,
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
}
TAILS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "expm1": torch.expm1,
    "elu": lambda x: functional.elu(x, 2.0),
    "selu": functional.selu,
    "celu": lambda x: functional.celu(x, 0.5),
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "log_ndtr": torch.special.log_ndtr,
    "logit with a bound": lambda x: torch.logit(x, 1e-6),
    "logarithm of a probability": lambda x: torch.log(torch.sigmoid(x)),
    "logarithm of a probability and a small number": lambda x: torch.log(torch.sigmoid(x).clamp(0, 1) + 1e-9),
    "signbit": torch.signbit,
    "angle": torch.angle,
    "copysign": lambda x: torch.copysign(torch.tensor(1.0), x),
    "heaviside": lambda x: torch.heaviside(x, torch.tensor(0.5)),
    "copysign of a number": lambda x: torch.copysign(x, -2.0),
    "lgamma": torch.lgamma,
    "digamma": lambda x: torch.digamma(x.masked_fill(x < -30, -2.5)),  # PyTorch's own is wrong near far poles
    "erfinv": lambda x: torch.erfinv(x * 0.2),
    "ndtri": torch.special.ndtri,
    "special.expm1": torch.special.expm1,
    "special.erfc": torch.special.erfc,
    "divide by an integer": lambda x: torch.divide(x, (x > 1).long()),
    "multiply by an integer": lambda x: torch.multiply((x > 1).long(), x),
    "greater than an integer": lambda x: torch.greater(x, (x > 1).int()).float(),
    "clamp(min)": lambda x: x.clamp(min=-1),
    "clamp(max)": lambda x: x.clamp(max=1),
    "clamp_min": lambda x: x.clamp_min(-1),
    "disjoint bounds": lambda x: x.clamp(0, 1).clamp(2, 3),
    "relu of numbers below zero": lambda x: functional.relu(x.clamp(max=-1)),
    "xlogy(0, x)": lambda x: torch.xlogy(torch.zeros(()), x),
}
# Each on rows of three numbers.
ROWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "max along": lambda x: x.max(1).values,
    "place of max": lambda x: x.max(1).indices,
    "place of min": lambda x: x.min(1).indices,
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin().expand(len(x)),
    "max of all": lambda x: x.max().expand(len(x)),
    "diagonal": lambda x: x.diagonal(),
    "diagonal below, of a part of each": lambda x: x[:, None].expand(-1, 2, 3).diagonal(-1, 1, 2),
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "median": lambda x: x.median(1).values,
    "place of median": lambda x: x.median(1).indices,
    "median of all": lambda x: x[:1].median().expand(len(x)),
    "median of numbers": lambda x: x.nanmedian(1, keepdim=True).values[:, 0],
    "median of all numbers": lambda x: x.nanmedian().expand(len(x)),
    "second value": lambda x: x.kthvalue(2, 1).values,
    "third value": lambda x: x.kthvalue(3, 1).values,
    "norm of all": lambda x: torch.linalg.vector_norm(x.nan_to_num(), 1, keepdim=True)[0].expand(len(x)),
}
BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x // y": torch.floor_divide,
    "x % y": torch.remainder,
    "atan2": torch.atan2,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "lerp to y": lambda x, y: torch.lerp(torch.full_like(x, 0.5), y, x),
    "lerp to y by -1": lambda x, y: torch.lerp(x, y, -1.0),
}
INTEGER: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clamp from a size to 2.5": lambda x, y: y.clamp(-x.shape[0], 2.5),
    "trunc of x / y": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor of x / y": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "trunc of x / 3": lambda x, y: torch.div(x, 3, rounding_mode="trunc"),
    "x // y": lambda x, y: x // y,
    "x % y": lambda x, y: x % y,
    "100 // y": lambda x, y: 100 // y,
    "100 % y": lambda x, y: 100 % y,
    "7.5 % y": lambda x, y: 7.5 % y,
    "y % 2.5": lambda x, y: y % 2.5,
    "y // 2.5": lambda x, y: y // 2.5,
    "7.5 // y": lambda x, y: 7.5 // y,
    "floor of y / 2.5": lambda x, y: torch.div(y, torch.tensor(2.5), rounding_mode="floor"),
    "y ** tensor(1.5)": lambda x, y: y ** torch.tensor(1.5),
    "x ** 1": lambda x, y: x**1,
    "round": lambda x, y: x.round(),
    "softmax in single precision": lambda x, y: torch.softmax(torch.stack((x % 5, y % 5), 1), 1, torch.float32)[:, 0],
    "x ** 3": lambda x, y: x**3,
    "x ** 21": lambda x, y: x**21,
    "2 ** y": lambda x, y: 2 ** (y * 9),
    "x ** y": lambda x, y: x**y,
    "flag ** y": lambda x, y: (x > 7) ** y,
}
# Python numbers that single precision rounds, with tensors in double precision.
NUMBERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.1),
    "masked_fill of an intermediate value": lambda x: (x * 2).masked_fill(x > 1, 1700000000.5),
    "full_like": lambda x: torch.full_like(x, 1700000000.5),
    "new_full": lambda x: x.new_full((1,), 0.1).expand_as(x),
    "fill": lambda x: torch.fill(x, 0.1),
    "add(alpha)": lambda x: torch.add(x, x, alpha=0.3),
    "sub(alpha)": lambda x: torch.sub(x, x, alpha=0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "addcdiv": lambda x: torch.addcdiv(x, x, x, value=0.3),
    "addmm": lambda x: torch.addmm(x[:, None], x[:, None], x.new_ones(1, 1), beta=0.3, alpha=0.7)[:, 0],
    "addmv": lambda x: torch.addmv(x, x[:, None], x.new_ones(1), beta=0.3, alpha=0.7),
    "baddbmm": lambda x: torch.baddbmm(x[:, None, None], x[:, None, None], x[:, None, None], beta=0.3)[:, 0, 0],
    "norm": lambda x: torch.linalg.vector_norm(x[:, None], 1.1, 1),
    "log_softmax of infinities": lambda x: torch.log_softmax(torch.stack((x, x * math.inf), 1), 1)[:, 0],
    "where": lambda x: torch.where(x > 1, x, 0.1),
    "clamp": lambda x: x.clamp(0.1, 1700000000.5),
    "threshold": lambda x: functional.threshold(x, 0.3, 0.1),
    "nan_to_num": lambda x: x.nan_to_num(0.1, 1700000000.5, -1700000000.5),
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "linspace": lambda x: x * torch.linspace(0, 6.283185307179586, 8, dtype=torch.float64)[3],
    "window": lambda x: x * torch.signal.windows.hamming(7, dtype=torch.float64)[2],
    "scatter": lambda x: x.scatter(0, torch.zeros(1, dtype=torch.int64), 0.1),
    "subtraction": lambda x: x - 1700000000.5,
    "comparison": lambda x: x < 0.3,
}
# Of rows of four 64-bit integers; each result has more than 53 bits, or wraps around.
WHOLE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1),
    "sum of all": lambda x: x.sum((0, 1), keepdim=True)[:, 0].expand(len(x)),
    "dot product": lambda x: (x * x).sum(-1),
    "prod": lambda x: x.prod(1),
    "prod of all": lambda x: x[:1].prod().expand(len(x)),
    "last of cumprod": lambda x: x.cumprod(1)[:, 3],
    "last of cumsum": lambda x: x.cumsum(1)[:, 3],
    "trace": lambda x: x.trace().expand(len(x)),
    "truth values": lambda x: (x > 0).sum(1),
    "sum in 32 bits": lambda x: (x.int() | 2**30).sum(1, dtype=torch.int32),
    "sum of 32 bits": lambda x: (x.int() | 2**30).sum(1),
    "prod in 32 bits": lambda x: (x.int() | 2**30).prod(1, dtype=torch.int32),
    "half precision": lambda x: (x.half() * 0 + 60000).nan_to_num(60000).sum(1, dtype=torch.float32),
}
# Python numbers that half precision rounds: some operators round them to the tensor's datatype, and others do not.
HALVES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "==": lambda x: x == 0.3,
    "!=": lambda x: x != 0.3,
    "<": lambda x: x < 0.3,
    "<=": lambda x: x <= 0.3,
    ">": lambda x: x > 0.3,
    ">=": lambda x: x >= 0.3,
    "comparison with a tensor": lambda x: x > torch.tensor(0.3),
    "hardshrink": lambda x: functional.hardshrink(x, 0.3),
    "isin": lambda x: torch.isin(x, 0.3),
    "masked_fill": lambda x: x.masked_fill(x <= 0.3, 0.7),
    "clamp": lambda x: x.clamp(0.3, 0.65) == 0.3,
    "fmod": lambda x: torch.fmod(x, 0.3),
    "x % 0.3": lambda x: x % 0.3,
    "x // 0.1": lambda x: x // 0.1,
    "sign of a difference": lambda x: (x - 0.3).sign(),
    "product": lambda x: x * 3.3 > 0.99,
    "sinc": torch.sinc,
    "clamp from 0 to 0.5": lambda x: x.clamp(0, 0.5),
    "amax": lambda x: x[:, None].amax(1),
    "amin": lambda x: x[:, None].amin(1),
}
VALUES = [0.0, -0.0, 1, -1, 0.3, 1.5, -2.5, 3, -3, 1e-8, -1e-5, 1e-3, -20, -100, 100, 1e10, 2**24 + 1, INF, -INF, NAN]
ENDS = [0.0, -0.0, 1, -1, 0.3, -2.5, 3, 1e10, INF, -INF, NAN]


class Functions(nn.Module):
    """One output for each function, so that one export proves them all."""

    def __init__(self, functions: Mapping[str, Callable[..., Tensor]]):
        super().__init__()
        self.functions = list(functions.values())


class OfOne(Functions):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x) for function in self.functions)


class OfTwo(Functions):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x, y) for function in self.functions)


def check(
    functions: Mapping[str, Callable[..., Tensor]],
    inputs: Mapping[str, Tensor],
    declared: list[str],
    near: float = 1e-3,
    room: float = 4,
) -> None:
    """Check that each function's exported form agrees with PyTorch at all values, relative to those above ``near``.

    ``room`` is the tolerance in units of the datatype's rounding.
    """
    module = OfOne(functions) if len(inputs) == 1 else OfTwo(functions)
    archive = export_model(module, inputs=declared)
    outputs = load_engine(EngineSpec(archive.variants[0].path())).run(
        {name: value.numpy() for name, value in inputs.items()}
    )
    wrong = {}
    for (name, function), actual in zip(functions.items(), outputs.values(), strict=True):
        expected = function(*inputs.values())
        found = torch.from_numpy(actual)
        assert found.dtype == expected.dtype
        equal = expected == found
        if expected.is_floating_point():
            close = room * torch.finfo(expected.dtype).eps
            equal = torch.isclose(found, expected, rtol=close, atol=close * near, equal_nan=True)
        for index in torch.nonzero(~equal).flatten().tolist():
            at = tuple(str(value[index].tolist()) for value in inputs.values())
            wrong[name, at] = (expected[index].item(), found[index].item())
    assert wrong == {}


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", matrix(torch.float32, torch.float64))
def test_functions_of_one_number(dtype: torch.dtype) -> None:
    check(UNARY, {"x": torch.tensor(VALUES, dtype=dtype)}, [f"x:{str(dtype)[6:]}[n]"])


@pytest.mark.matrix
def test_tails_and_signs() -> None:
    more = [1e-4, 0.5, -0.7, 2.0, 4.0, 9.0, 12.0, -5.0, -13.0, -17.5, 88.0, -1e-20]
    check(TAILS, {"x": torch.tensor(VALUES + more)}, ["x:float32[n]"], 1e-30, 32)


@pytest.mark.parametrize("dtype", matrix(torch.float32, torch.float64))
def test_functions_of_two_numbers(dtype: torch.dtype) -> None:
    pairs: Any = torch.tensor(list(product(ENDS, ENDS)), dtype=dtype)
    kind = str(dtype)[6:]
    functions = {name: function for name, function in BINARY.items() if dtype == torch.float32 or name != "atan2"}
    check(
        functions, {"x": pairs[:, 0].contiguous(), "y": pairs[:, 1].contiguous()}, [f"x:{kind}[n]", f"y:{kind}[n]"], 1.0
    )


@pytest.mark.matrix
def test_extremes_of_rows_with_nan() -> None:
    rows = torch.tensor([[1, NAN, 3], [2, 5, NAN], [NAN, 1, 2], [-INF, 3, INF], [4, 4, -1]])
    check(ROWS, {"x": rows}, ["x:float32[n,3]"])


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_beyond_the_digits_of_floating_point(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = [0, 7, -7, 2**24 + 1, -(2**24) - 1, limits.max, limits.max - 1, limits.min + 1, limits.max // 3]
    pairs = torch.tensor(list(product(x, [1, 2, 3, -3, -1, 7])), dtype=dtype)
    kind = str(dtype)[6:]
    inputs = {"x": pairs[:, 0].contiguous(), "y": pairs[:, 1].contiguous()}
    check(INTEGER, inputs, [f"x:{kind}[n]", f"y:{kind}[n]=1..9"])


@pytest.mark.matrix
def test_python_numbers_keep_their_digits() -> None:
    values = [1700000000.5, 0.3, 0.1, 1e-9, 2**24 + 1, 0.7, 3, 1e16 + 2]
    check(NUMBERS, {"x": torch.tensor(values, dtype=torch.float64)}, ["x:float64[n]"], 1e-30, 16)


@pytest.mark.matrix
def test_numbers_that_meet_half_precision_are_rounded_as_in_pytorch() -> None:
    values = [0.3, 0.1, -0.7, 3, 0.65, 100, 0.2998, 2048, 1e-3]
    check(HALVES, {"x": torch.tensor(values, dtype=torch.float16)}, ["x:float16[n]"])


class Narrow(nn.Module):
    """Computes in half precision between inputs and outputs in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layers(x)
        return y.float(), y > 0.3, torch.where(y > 0, y * 0.3, y - 0.3).float(), (x.half() * 3.3 + 0.1).float()


@pytest.mark.matrix
def test_a_model_that_computes_in_half_precision_is_rounded_as_in_pytorch() -> None:
    module = Narrow().eval()
    archive = export_model(module, inputs=["x:float32[n,4]"])
    x = torch.randn(50, 4)
    outputs = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()})
    for expected, actual in zip(module(x)[:3], outputs.values(), strict=False):
        torch.testing.assert_close(torch.from_numpy(actual), expected.detach(), rtol=0, atol=0)
    assert {item.tolerance for item in archive.variant().serving.evidence.parity} == {0.04}


@pytest.mark.matrix
def test_sums_and_products_of_integers_wrap_around() -> None:
    rows = [[2**53 + 1, 2, -1, 3], [2**62, 2**62, 2**62, 1], [-(2**63), -1, -5, 7], [3**20, 3**10, 7, 1]]
    check(WHOLE, {"x": torch.tensor(rows)}, ["x:int64[n,4]"])
