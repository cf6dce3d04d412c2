"""Capture by ``torch.export`` with named dimensions."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from ingot import foreign
from ingot.errors import ExportError
from ingot.export import torch_internals
from ingot.export.capture import numbers
from ingot.export.program import Program, quiet, user_path
from ingot.export.rewrite.passes.dead_code import drop_unused
from ingot.export.rewrite.passes.fx_graph import written
from ingot.tensors import DType, Range, Shape, Signature, TensorSpec, symbols


def trace(
    flat: nn.Module,
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, Range],
    example: tuple[torch.Tensor, ...],
    *,
    strict: bool = False,
    oblivious: bool = False,
    deferred: bool = False,
    inferred: bool = False,
    crossed: bool = False,
) -> torch.export.ExportedProgram:
    """Trace a module of flat tensors with the named dimensions of ``inputs`` dynamic.

    Args:
        flat: a module that accepts the inputs by position.
        inputs: names the dynamic dimensions.
        ranges: their bounds.
        example: inputs to trace with; named dimensions should be 2 or more and distinct.
        strict: read the module's bytecode, instead of running it on symbolic tensors.
        oblivious: treat sizes of 0 and 1 like any other, defer conditions on sizes to the graph, and narrow the ranges
            where torch suggests it.
        deferred: defer conditions on sizes to the graph.
        inferred: let torch find how far each dimension can be dynamic.
        crossed: keep all declared sizes where the code compares sizes, in addition to ``oblivious``. The graph has the
            example's side of each comparison; :func:`crossed_comparisons` returns these.

    The last four may return a program for narrower ranges than declared; :mod:`ingot.export.capture.assumptions`
    finds these conditions.

    Raises:
        Exception: any error of ``torch.export``.
    """
    shapes = dynamic_shapes(inputs, ranges, inferred=inferred)
    opened: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([])
    if crossed:
        opened = torch_internals.open_comparisons()
    patch = torch_internals.size_oblivious() if oblivious else contextlib.nullcontext()

    def export(shapes: Any) -> torch.export.ExportedProgram:
        return torch.export.export(
            flat,
            example,
            dynamic_shapes=shapes,
            strict=strict,
            prefer_deferred_runtime_asserts_over_guards=oblivious or deferred,
        )

    plain = contextlib.nullcontext() if strict else numbers.functions()  # strict mode knows the functions itself
    idle, caught = torch_internals.idle_conversions(), torch_internals.caught_errors()
    with quiet(), torch.no_grad(), patch, opened as comparisons, plain, idle, caught:
        try:
            found = export(shapes)
        except torch_internals.user_error() as error:
            narrower = _narrowed(shapes, str(error)) if oblivious else None
            if narrower is None:
                raise
            found = export(narrower)
    found.graph_module.meta[_COMPARISONS] = tuple(comparisons)
    _drop_failed(found.graph_module.graph)
    return found


def _drop_failed(graph: fx.Graph) -> None:
    """Remove calls of operators that raised an error, which the module caught: they have no result and no users."""
    for node in reversed(graph.nodes):
        returns = isinstance(node.target, torch_internals.OpOverload) and torch_internals.schema(node.target).returns
        if returns and not node.users and node.meta.get("val") is None:
            graph.erase_node(node)


_COMPARISONS = "ingot_comparisons"


def crossed_comparisons(exported: torch.export.ExportedProgram) -> tuple[sympy.Rel, ...]:
    """Return the comparisons of sizes of which a program traced with ``crossed`` has the example's side for all."""
    return exported.graph_module.meta.get(_COMPARISONS, ())  # type: ignore[no-any-return]


def _narrowed(shapes: Any, message: str) -> Any:
    """Return dimensions with the ranges that torch suggests in an error message, or None if it suggests none."""
    return foreign.attempt(lambda: refine_dynamic_shapes_from_suggested_fixes(message, shapes))


def dynamic_shapes(
    inputs: Sequence[TensorSpec], ranges: Mapping[str, Range], *, inferred: bool = False
) -> tuple[tuple[dict[int, Any], ...]]:
    """Return ``dynamic_shapes`` of ``torch.export`` for a module of flat tensors, whose one argument is variadic."""
    dims = {
        symbol: torch.export.Dim.AUTO if inferred else _dim(symbol, ranges.get(symbol, Range()))
        for symbol in symbols(inputs)
    }
    return (tuple({axis: dims[dim] for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in inputs),)


def unguarded(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return a program's graph module without its conditions on sizes, which ONNX cannot express."""
    module: fx.GraphModule = exported.module(check_guards=False)
    module.validate_inputs = False  # type: ignore[assignment]
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            module.graph.erase_node(node)
    drop_unused(module.graph)
    module.recompile()
    return module


def positional(graph: fx.GraphModule) -> nn.Module:
    """Return a graph module as a module of flat tensors, which :func:`trace` accepts."""
    return _Positional(graph)


class _Positional(nn.Module):
    def __init__(self, graph: fx.GraphModule):
        super().__init__()
        self.ingot_wrapped = graph

    def forward(self, *tensors: torch.Tensor) -> Any:
        with fx.traceback.preserve_node_meta():  # each node keeps its place in the user's code
            return fx.Interpreter(self.ingot_wrapped).run(*tensors)


def program(
    exported: torch.export.ExportedProgram,
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, Range],
    output_names: Sequence[str],
    log: Sequence[str] = (),
) -> Program:
    """Return a traced program with its signature.

    Raises:
        ExportError: a dimension declared dynamic became fixed, or the program changes a buffer or an input.
    """
    if mutated := _mutated(exported, inputs):
        raise ExportError(
            f"the captured graph changes {', '.join(mutated)}, which a served graph would silently drop; return the "
            "new value as an output and accept the old one as an input"
        )
    return Program(exported, _signature(exported, inputs, ranges, output_names), tuple(log))


def _mutated(exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> list[str]:
    """Return the names of the parameters, buffers, constants and inputs that a program writes to, sorted.

    The signature names only those that the code replaces. Writes in place are nodes, until the program is decomposed:
    for some, such as a write to a detached parameter, PyTorch ends the process there.
    """
    graph = exported.graph_signature
    kinds = (graph.buffers_to_mutate, graph.user_inputs_to_mutate, graph.parameters_to_mutate)
    found = {name for kind in kinds for name in kind.values()}
    own = {**graph.inputs_to_parameters, **graph.inputs_to_buffers, **graph.inputs_to_lifted_tensor_constants}
    own |= {str(name): spec.name for name, spec in zip(graph.user_inputs, inputs, strict=True)}
    unnamed = set(graph.inputs_to_lifted_tensor_constants.values())  # .data and detached tensors may be among these
    memory: dict[int | None, str] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in own and (place := _memory(node)) is not None:
            memory.setdefault(place, own[node.name])
        changed = [_memory(item) for item in written(node)]
        found |= {memory[place] for place in (*changed, _memory(node) if changed else None) if place in memory}
    return sorted(map(user_path, found - unnamed or found))


def _memory(node: fx.Node) -> int | None:
    """Return the identity of the memory of a node's result, which its views share; None if unknown."""
    value = node.meta.get("val")
    return torch_internals.memory(value) if isinstance(value, torch.Tensor) else None


_aten = torch.ops.aten
_OVERWRITING = (_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default)
_OF_SHAPE = (
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default, _aten.full_like.default),
    *(_aten.sym_size.int, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
)


def check_scratch(exported: torch.export.ExportedProgram, scratch: Sequence[str]) -> None:
    """Check that a program overwrites buffers before it reads them.

    Raises:
        ExportError: it reads one.
    """
    buffers = exported.graph_signature.inputs_to_buffers
    for node in exported.graph.find_nodes(op="placeholder"):
        name = user_path(buffers.get(node.name, ""))
        if name not in scratch:
            continue
        if not all(_is_overwritten(copy) for copy in node.users):
            raise ExportError(
                f"the model changes {name} while it runs, and may read the value of an earlier call; return the new "
                "value as an output and accept the old one as an input"
            )


def _is_overwritten(copy: fx.Node) -> bool:
    """Return whether a program replaces all values of a copy of a buffer before it uses one."""
    if copy.target is not _aten.clone.default:
        return False
    for user in copy.users:  # in the order of the graph
        if user.args[0] is not copy or user.target not in (*_OF_SHAPE, *_OVERWRITING):
            return False
        if user.target in _OVERWRITING:
            return True
    return True


def _dim(symbol: str, bounds: Range) -> Any:
    if bounds.step == 1:
        return torch.export.Dim(symbol, min=bounds.low if bounds.low > 1 else None, max=bounds.high)
    low, high = bounds.low // bounds.step, None if bounds.high is None else bounds.high // bounds.step
    return bounds.step * torch.export.Dim(f"{symbol}_part", min=low if low > 1 else None, max=high)


def _signature(
    exported: torch.export.ExportedProgram,
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, Range],
    names: Sequence[str],
) -> Signature:
    nodes = {node.name: node for node in exported.graph.nodes}
    renamed: dict[sympy.Symbol, sympy.Expr] = {}
    for spec, node_name in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        value = nodes[str(node_name)].meta["val"]
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, str):
                continue
            size = value.shape[axis]
            if isinstance(size, int):
                raise _fixed(dim, spec, size)
            bounds = exported.range_constraints.get(size.node.expr)
            if bounds is not None and bounds.lower == bounds.upper and not torch_internals.is_unbounded(bounds.upper):
                raise _fixed(dim, spec, int(bounds.lower))
            factor, symbol = size.node.expr.as_coeff_Mul()
            renamed[symbol] = sympy.Symbol(dim, integer=True, positive=True) / factor
    outputs = []
    for name, node_name in zip(names, exported.graph_signature.user_outputs, strict=True):
        value = nodes[str(node_name)].meta["val"]
        shape: Shape = tuple(
            size if isinstance(size, int) else _dimension(size.node.expr.subs(renamed), renamed, f"{name}_{axis}")
            for axis, size in enumerate(value.shape)
        )
        outputs.append(TensorSpec(name, DType.parse(str(value.dtype).removeprefix("torch.")), shape))
    return Signature(tuple(inputs), tuple(outputs), ranges=dict(ranges))


def _dimension(expr: sympy.Expr, renamed: Mapping[sympy.Symbol, sympy.Expr], own: str) -> int | str:
    """Return an output's dimension in the user's names, or ``own`` if it depends on tensor values."""
    if expr.is_number:
        return int(expr)
    known = {symbol for value in renamed.values() for symbol in value.free_symbols}
    return str(expr) if expr.free_symbols <= known else own


def _fixed(dim: str, spec: TensorSpec, size: int) -> ExportError:
    return ExportError(
        f"dimension '{dim}' of input '{spec.name}' became fixed at {size}, its size during the capture; replace "
        "the code that depends on the size, such as a Python loop over it, or declare a number instead of the name"
    )
