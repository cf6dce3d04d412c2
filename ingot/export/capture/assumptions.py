"""What a captured program takes for granted of its sizes, and the sizes at which that does not hold.

A model's code may ask for a size (``if rows % 2``); the capture then follows the example's way and notes a guard. ONNX
has no guards. So the declared sizes are searched for some that break one, and the graph is proved at those too.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.numbers import int_oo

from ingot.errors import ExportError
from ingot.tensors import Range, TensorSpec

Sizes = Mapping[str, int]
# What a size is called in a guard of a flat module's program: strict capture has a name of its own.
_SIZE = re.compile(r"L\['(?:tensors|flat_args)'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_LARGEST = 1 << 12
_MOST = 20_000


@dataclass(frozen=True)
class Assumption:
    """One condition on sizes; ``text`` is as PyTorch writes it, in the user's names."""

    text: str
    holds: Callable[[Sizes], bool]
    numbers: tuple[int, ...] = ()
    """Those that it compares sizes with: where it breaks, if it does, is near to them."""


def find(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> tuple[Assumption, ...]:
    """Return the conditions of a program on sizes of its inputs."""
    return (*_guards(exported, inputs), *_bounds(exported, inputs), *_asserts(exported, inputs))


def broken(assumptions: Sequence[Assumption], default: Sizes, ranges: Mapping[str, Range]) -> list[dict[str, int]]:
    """Return declared sizes at which assumptions do not hold: for each that has some, the smallest that were found."""
    found: list[dict[str, int]] = []
    for assumption in assumptions:
        tried = _candidates(default, ranges, assumption.numbers)
        wrong = [sizes for sizes in tried if not assumption.holds(sizes)]
        if wrong:
            found.append(min(wrong, key=lambda sizes: math.prod(sizes.values())))
    return [sizes for index, sizes in enumerate(found) if sizes not in found[:index]]


def _guards(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    for code in exported._guards_code:
        text = _SIZE.sub(lambda match: str(inputs[int(match[1])].shape[int(match[2])]), code)
        if "L[" in text:
            if re.search(r"\.(size|shape|stride|storage_offset)\b", text):
                raise ExportError(f"the capture takes for granted what cannot be proved: {text}")
            continue  # on a constant, which cannot change
        # Evaluated under names of our own: the user's may be words of Python.
        named = _SIZE.sub(lambda match: f"_size({str(inputs[int(match[1])].shape[int(match[2])])!r})", code)
        numbers = tuple(int(number) for number in re.findall(r"(?<![\w.'])\d+(?![\w.'])", text))
        yield Assumption(text, partial(_evaluate, compile(named, "<guard>", "eval")), numbers)


def _evaluate(guard: CodeType, sizes: Sizes) -> bool:
    def size(dim: str) -> int:
        return sizes[dim] if dim in sizes else int(dim)

    try:
        return bool(eval(guard, {**_NAMES, "_size": size}))
    except ZeroDivisionError:
        return False


_BUILTINS = {"min": min, "max": max, "abs": abs, "int": int}
_NAMES: dict[str, Any] = {"math": math, "torch": torch, "__builtins__": _BUILTINS}


def _asserts(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    """Yield the conditions that were left to the graph to check; those on what depends on values are the model's own.

    They are read where the trace keeps them: a graph without operations is not given its checks.
    """
    sizes = list(_sizes(exported, inputs))
    known = {size.symbol: size for size in sizes}
    environments = {id(size.environment): size.environment for size in sizes}.values()
    left = [
        env.simplify(item.expr)
        for env in environments
        for items in env.deferred_runtime_asserts.values()
        for item in items
    ]
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if isinstance(value, torch.SymBool):
            left.append(value.node.expr)
    for expr in dict.fromkeys(left):
        if free_unbacked_symbols(expr):
            continue
        text = str(expr.subs({symbol: sympy.Symbol(size.dim) / size.factor for symbol, size in known.items()}))
        if not expr.free_symbols <= known.keys():
            raise ExportError(f"the capture takes for granted what cannot be proved: {text}")
        if expr != sympy.true:
            numbers = tuple(int(number) for number in expr.atoms(sympy.Integer))
            yield Assumption(text, partial(_true, expr, known), numbers)


def _true(expr: sympy.Expr, known: Mapping[sympy.Symbol, _Size], sizes: Sizes) -> bool:
    try:
        return bool(expr.xreplace({symbol: sympy.Integer(size.of(sizes)) for symbol, size in known.items()}))
    except ZeroDivisionError:
        return False


@dataclass(frozen=True)
class _Size:
    """A named dimension that is dynamic in a program: a number of times a symbol of its."""

    dim: str
    factor: int
    symbol: sympy.Symbol
    environment: Any

    def __str__(self) -> str:
        return self.dim if self.factor == 1 else f"{self.dim}/{self.factor}"

    def of(self, sizes: Sizes) -> int:
        """Return the symbol's value at some sizes."""
        return sizes[self.dim] // self.factor


def _bounds(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    first: dict[sympy.Symbol, _Size] = {}
    for size in _sizes(exported, inputs):
        dim, factor = size.dim, size.factor
        if factor > 1:
            yield Assumption(f"{dim} is a multiple of {factor}", partial(_divides, dim, factor), (factor,))
        other = first.setdefault(size.symbol, size)
        if (other.dim, other.factor) != (dim, factor):
            yield Assumption(f"{other} == {size}", partial(_alike, other, size))
        bounds = exported.range_constraints.get(size.symbol)
        if bounds is not None:
            low, high = (end if abs(end) == int_oo else end * factor for end in (bounds.lower, bounds.upper))
            numbers = tuple(int(end) for end in (low, high) if abs(end) != int_oo)
            yield Assumption(f"{low} <= {dim} <= {high}", partial(_within, dim, low, high), numbers)


def _sizes(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[_Size]:
    """Yield each named dimension of each input that is dynamic in the program.

    Raises:
        ExportError: the program has it as something else than a multiple of a symbol.
    """
    nodes = {node.name: node for node in exported.graph.nodes}
    for spec, node_name in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        sizes: Any = nodes[str(node_name)].meta["val"].shape
        for dim, size in zip(spec.shape, sizes, strict=True):
            if not isinstance(dim, str) or isinstance(size, int):
                continue
            factor, symbol = size.node.expr.as_coeff_Mul()
            if not symbol.is_symbol or not factor.is_integer:
                raise ExportError(
                    f"the capture takes for granted that '{dim}' is {size.node.expr} of some whole number"
                )
            yield _Size(dim, int(factor), symbol, size.node.shape_env)


def _divides(dim: str, factor: int, sizes: Sizes) -> bool:
    return sizes[dim] % factor == 0


def _alike(one: _Size, other: _Size, sizes: Sizes) -> bool:
    return one.of(sizes) == other.of(sizes)


def _within(dim: str, low: Any, high: Any, sizes: Sizes) -> bool:
    return bool(low <= sizes[dim] <= high)


def _candidates(default: Sizes, ranges: Mapping[str, Range], numbers: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield sizes: each dimension by itself, all alike, and all combinations, or many at random."""
    choices = {symbol: _choices(ranges.get(symbol, Range()), numbers) for symbol in default}
    for symbol, sizes in choices.items():
        yield from ({**default, symbol: size} for size in sizes)
    common = set.intersection(*(set(sizes) for sizes in choices.values())) if choices else set()
    yield from (dict.fromkeys(choices, size) for size in sorted(common))
    if math.prod(len(sizes) for sizes in choices.values()) <= _MOST:
        yield from (dict(zip(choices, sizes, strict=True)) for sizes in itertools.product(*choices.values()))
        return
    rng = random.Random(0)
    for _ in itertools.repeat(None, _MOST):
        yield {symbol: rng.choice(sizes) for symbol, sizes in choices.items()}


def _choices(bounds: Range, numbers: Sequence[int]) -> list[int]:
    high = bounds.nearest(_LARGEST)
    near = range(bounds.low, min(bounds.low + 64 * bounds.step, high) + 1)
    around = (size + step for size in (128, 256, 512, 1024, 2048, 4096, *numbers) for step in (-1, 0, 1))
    return sorted({size for size in (*near, *around, high) if size in bounds})
