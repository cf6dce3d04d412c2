"""Conditions on sizes that a captured program assumes.

A model's code may branch on a size (``if rows % 2``); the capture then follows the branch of the example and records a
guard. ONNX has no guards, so :mod:`ingot.export.capture.counterexamples` searches the declared sizes for some that
break a condition, and the graph is proved at those too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ingot.errors import ExportError
from ingot.export.capture.conditions import plain
from ingot.export.capture.counterexamples import Assumption, Sizes
from ingot.export.capture.exported import crossed_comparisons
from ingot.export.torch_internals import is_unbounded, python_code, shape_guards
from ingot.tensors import TensorSpec

# A size in a guard of a flat module's program: `tensors`, or `flat_args` in strict mode.
_SIZE = re.compile(r"L\['(?:tensors|flat_args)'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_NUMBER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")


def find(
    exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec], default: Sizes
) -> tuple[Assumption, ...]:
    """Return the conditions of a program on sizes of its inputs, each in the form that holds at the default sizes.

    Raises:
        ExportError: the program has a condition that cannot be evaluated at given sizes.
    """
    conditions = (*_guards(exported, inputs), *_bounds(exported, inputs), *_asserts(exported, inputs))
    return (*conditions, *_crossed(exported, inputs, default))


def literals(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> list[tuple[str, int]]:
    """Return each named dimension with the numbers that a program cuts it at, rounds it to or compares it with."""
    known: dict[sympy.Basic, _Size] = {size.symbol: size for size in _sizes(exported, inputs)}
    compared: dict[sympy.Basic, None] = {}
    found: dict[tuple[str, int], None] = {}

    def add(expr: sympy.Basic, numbers: Iterable[Any]) -> None:
        for symbol in sorted(expr.free_symbols & known.keys(), key=str):
            size = known[symbol]
            found.update({(size.dim, abs(int(number)) * size.factor): None for number in numbers})

    for node in exported.graph.nodes:
        value = node.meta.get("val")
        sizes = [*getattr(value, "shape", ()), *([value] if isinstance(value, torch.SymInt) else [])]
        compared.update({size.node.expr: None for size in sizes if isinstance(size, torch.SymInt)})
        if node.target is torch.ops.aten.slice.Tensor:
            source, dim, *ends = (*node.args, 0)[:4]
            size = source.meta["val"].shape[dim]
            if isinstance(size, torch.SymInt):
                add(size.node.expr, [end for end in ends if type(end) is int])
    for part in {part: None for expr in compared for part in sympy.preorder_traversal(expr)}:
        if isinstance(part, sympy.Function | sympy.Min | sympy.Max | sympy.core.relational.Relational):
            add(part, part.atoms(sympy.Integer))
    return sorted(found, key=lambda item: item[1])


def _guards(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    for code in shape_guards(exported):
        text = _SIZE.sub(lambda match: str(inputs[int(match[1])].shape[int(match[2])]), code)
        if "L[" in text:
            if re.search(r"\.(size|shape|stride|storage_offset)\b", text):
                raise ExportError(f"the capture assumes a condition that cannot be proved: {text}")
            continue  # a guard on a constant, which cannot change
        dims = {str(inputs[int(place)].shape[int(axis)]) for place, axis in _SIZE.findall(code)}
        # `_size('name')` instead of the bare name: a user's name may be a Python keyword.
        named = _SIZE.sub(lambda match: f"_size({str(inputs[int(match[1])].shape[int(match[2])])!r})", code)
        yield _written(text, named, sorted(dim for dim in dims if not dim.isdecimal()))


def _written(text: str, named: str, dims: Sequence[str]) -> Assumption:
    """Return a condition given as a Python expression, with sizes as calls of ``_size``."""
    numbers = tuple(map(int, _NUMBER.findall(text)))
    holds = partial(_evaluate, eval(f"lambda _size: {named}", dict(_NAMES)))
    return Assumption(plain(named, text), holds, tuple(dims), numbers, code=named)


def _evaluate(guard: Callable[[Callable[[str], int]], Any], sizes: Sizes) -> bool:
    def size(dim: str) -> int:
        return sizes[dim] if dim in sizes else int(dim)

    try:
        return bool(guard(size))
    except ZeroDivisionError:
        return False


_BUILTINS = {"min": min, "max": max, "abs": abs, "int": int, "round": round}
_NAMES: dict[str, Any] = {"math": math, "torch": torch, "__builtins__": _BUILTINS}


def _asserts(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    """Yield the deferred conditions, without those that depend on tensor values: these are the model's own checks.

    The shape environment is read as well as the graph: torch inserts no assertions into a graph without operations.
    """
    sizes = list(_sizes(exported, inputs))
    known = {size.symbol: size for size in sizes}
    environments = {id(size.environment): size.environment for size in sizes}.values()
    deferred = [
        env.simplify(item.expr)
        for env in environments
        for items in env.deferred_runtime_asserts.values()
        for item in items
    ]
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if isinstance(value, torch.SymBool):
            deferred.append(value.node.expr)
    for expr in dict.fromkeys(deferred):
        if free_unbacked_symbols(expr):
            continue
        if not expr.free_symbols <= known.keys():
            raise ExportError(f"the capture assumes a condition that cannot be proved: {expr}")
        if expr != sympy.true:
            yield _formulated(expr, known)


def _crossed(
    exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec], default: Sizes
) -> Iterator[Assumption]:
    """Yield the comparisons whose other side a program does not have, and must equal all the same."""
    known = {size.symbol: size for size in _sizes(exported, inputs)}
    for expr in crossed_comparisons(exported):
        if expr.free_symbols <= known.keys():
            holds = expr.xreplace({symbol: size.of(default) for symbol, size in known.items()})
            yield _formulated(expr if holds else sympy.Not(expr), known)


def _formulated(expr: sympy.Basic, known: Mapping[sympy.Basic, _Size]) -> Assumption:
    text, named = (
        python_code(expr.xreplace({symbol: sympy.Symbol(write(size)) for symbol, size in known.items()}))
        for write in (str, _Size.named)
    )
    return _written(text, named, sorted({known[symbol].dim for symbol in expr.free_symbols}))


@dataclass(frozen=True)
class _Size:
    """A named dimension that is dynamic in a program: ``factor`` times a symbol of the program."""

    dim: str
    factor: int
    symbol: sympy.Symbol
    environment: Any

    def __str__(self) -> str:
        return self.dim if self.factor == 1 else f"{self.dim}/{self.factor}"

    def named(self) -> str:
        """Return the symbol's value as an expression for :func:`_written`."""
        return f"(_size({self.dim!r}) // {self.factor})"

    def of(self, sizes: Sizes) -> int:
        """Return the symbol's value at the given sizes."""
        return sizes[self.dim] // self.factor


def _bounds(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[Assumption]:
    first: dict[sympy.Symbol, _Size] = {}
    for size in _sizes(exported, inputs):
        dim, factor = size.dim, size.factor
        if factor > 1:
            text = f"{dim} is a multiple of {factor}"
            yield Assumption(text, partial(_divides, dim, factor), (dim,), (factor,), simple=True)
        other = first.setdefault(size.symbol, size)
        if (other.dim, other.factor) != (dim, factor):
            yield Assumption(f"{other} == {size}", partial(_alike, other, size), (other.dim, dim), simple=True)
        bounds = exported.range_constraints.get(size.symbol)
        if bounds is not None:
            low, high = (end if is_unbounded(end) else end * factor for end in (bounds.lower, bounds.upper))
            numbers = tuple(int(end) for end in (low, high) if not is_unbounded(end))
            text = f"{low} <= {dim} <= {high}"
            yield Assumption(text, partial(_within, dim, low, high), (dim,), numbers, simple=True)


def _sizes(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> Iterator[_Size]:
    """Yield each named dimension of each input that is dynamic in the program.

    Raises:
        ExportError: the program has one that is not a multiple of a symbol.
    """
    nodes = {node.name: node for node in exported.graph.nodes}
    for spec, node_name in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        sizes: Any = nodes[str(node_name)].meta["val"].shape
        for dim, size in zip(spec.shape, sizes, strict=True):
            if not isinstance(dim, str) or isinstance(size, int):
                continue
            factor, symbol = size.node.expr.as_coeff_Mul()
            if not symbol.is_symbol or not factor.is_integer:
                raise ExportError(f"the capture assumes that '{dim}' is {size.node.expr} for some integer")
            yield _Size(dim, int(factor), symbol, size.node.shape_env)


def _divides(dim: str, factor: int, sizes: Sizes) -> bool:
    return sizes[dim] % factor == 0


def _alike(one: _Size, other: _Size, sizes: Sizes) -> bool:
    return one.of(sizes) == other.of(sizes)


def _within(dim: str, low: Any, high: Any, sizes: Sizes) -> bool:
    return bool(low <= sizes[dim] <= high)
