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
    dims = list(_dims(exported, inputs))
    names = {size.node.expr: dim for dim, size in dims}
    environments = {id(size.node.shape_env): size.node.shape_env for _, size in dims}.values()
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
        text = str(expr.subs({symbol: sympy.Symbol(dim) for symbol, dim in names.items()}))
        if not expr.free_symbols <= names.keys():
            raise ExportError(f"the capture takes for granted what cannot be proved: {text}")
        if expr != sympy.true:
            numbers = tuple(int(number) for number in expr.atoms(sympy.Integer))
            yield Assumption(text, partial(_true, expr, names), numbers)


def _true(expr: sympy.Expr, names: Mapping[sympy.Symbol, str], sizes: Sizes) -> bool:
    try:
        return bool(expr.xreplace({symbol: sympy.Integer(sizes[dim]) for symbol, dim in names.items()}))
    except ZeroDivisionError:
        return False


def _bounds(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    first: dict[sympy.Expr, str] = {}
    for dim, size in _dims(exported, inputs):
        if not size.node.expr.is_symbol:
            raise ExportError(f"the capture takes for granted that '{dim}' is {size.node.expr} of some whole number")
        other = first.setdefault(size.node.expr, dim)
        if other != dim:
            yield Assumption(f"{other} == {dim}", partial(_alike, other, dim))
        bounds = exported.range_constraints.get(size.node.expr)
        if bounds is not None:
            numbers = tuple(int(end) for end in (bounds.lower, bounds.upper) if abs(end) != int_oo)
            text = f"{bounds.lower} <= {dim} <= {bounds.upper}"
            yield Assumption(text, partial(_within, dim, bounds.lower, bounds.upper), numbers)


def _dims(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[tuple[str, Any]]:
    """Yield each named dimension of each input that is dynamic in the program, with its size there."""
    nodes = {node.name: node for node in exported.graph.nodes}
    for spec, node_name in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        sizes: Any = nodes[str(node_name)].meta["val"].shape
        yield from (
            (dim, size)
            for dim, size in zip(spec.shape, sizes, strict=True)
            if isinstance(dim, str) and not isinstance(size, int)
        )


def _alike(one: str, other: str, sizes: Sizes) -> bool:
    return sizes[one] == sizes[other]


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
    high = min(_LARGEST, bounds.high or _LARGEST)
    near = range(bounds.low, min(bounds.low + 64, high) + 1)
    around = (size + step for size in (128, 256, 512, 1024, 2048, 4096, *numbers) for step in (-1, 0, 1))
    return sorted({*near, *(size for size in around if size in bounds), max(high, bounds.low)})
