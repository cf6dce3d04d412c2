"""The first operation of an exported model that diverges from the original, and the user's line that it comes from.

All intermediate results of two pairs are compared: the user's module with the FX graph, and the FX graph with the ONNX
model in ONNX Runtime. A result is good if it equals one of the other side within the tolerance; results are paired by
name, or by the submodule that they belong to, where these are known. The search goes back from a diverging output
through operations that are not good, so a difference that does not affect an output is not reported.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from torch import fx

from ingot.export.diagnose import intermediates
from ingot.export.explain.places import frames_in, innermost
from ingot.export.program import Eager, Program, user_path
from ingot.export.torch_internals import HigherOrderOperator, pytree
from ingot.tensors import Array, arrays


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first operation whose result is wrong.

    ``stage`` is ``capture`` between the module and its FX graph, ``onnx`` between the FX graph and ONNX Runtime.
    ``operator`` is empty if every operation is right by itself and only the engine's optimized graph is wrong.
    ``module`` is the path of the user's submodule and ``source`` a line of the user's code, if known. ``error`` is a
    share of the result's largest magnitude. ``last_good`` are the nearest operations before it that are right,
    ``unknown`` those in between whose results have no counterpart.
    """

    stage: str
    name: str
    operator: str = ""
    module: str = ""
    source: str = ""
    error: float
    tolerance: float
    shape: tuple[int, ...]
    last_good: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def text(self) -> str:
        """Return everything, over several lines."""
        side = {"capture": "the captured graph", "onnx": "the ONNX model"}[self.stage]
        where = f"at '{self.name}' ({self.operator})" if self.operator else f"in its output '{self.name}'"
        rows = {
            "module": self.module,
            "line": self.source,
            "error": f"{self.error:.1e} of the largest value, tolerance {self.tolerance:.0e}",
            "shape": str(list(self.shape)),
            "good": ", ".join(self.last_good),
            "unknown": ", ".join(self.unknown),
        }
        lines = [f"{side} diverges {where}", *(f"  {key:8}{value}" for key, value in rows.items() if value)]
        if not self.operator:
            lines.append("  each operation is right when all results are read: an optimization of the engine is wrong")
        return "\n".join(lines)


def find_divergence(
    program: Program, eager: Eager, model: ir.Model | None, inputs: Mapping[str, Array], tolerance: float
) -> Divergence | None:
    """Return the first operation that diverges from the original, or None if all outputs are good.

    Args:
        program: the captured model.
        eager: the original.
        model: the ONNX model lowered from ``program``, or None to compare the capture alone.
        inputs: the inputs of all of them.
        tolerance: the largest error of a good result; see :func:`ingot.tensors.arrays.departure`.

    Raises:
        ExportError: the original does not run on the inputs.
    """
    graph = program.exported.module()
    compiles = any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes)
    expected, originals = intermediates.of_module(eager, inputs, operators=not compiles)
    tensors = eager.tensors(inputs)
    values = intermediates.of_graph(graph, tensors)
    outputs = dict(zip(expected, _output_names(graph.graph), strict=True))
    wrong = _wrong({outputs[name]: value for name, value in expected.items()}, values, tolerance)
    if wrong:
        known = _Known(originals, tolerance)
        return _blame("capture", _fx_steps(graph.graph, values, known), wrong, values, tolerance)
    if model is None:
        return None
    results = intermediates.run_onnx(model, inputs)
    wrong = _wrong({name: values[node] for name, node in outputs.items()}, results, tolerance)
    if not wrong:
        return None
    every = intermediates.of_onnx(model, inputs)
    alone = _wrong({name: values[outputs[name]] for name in wrong}, every, tolerance)
    if not alone:
        name, error = max(wrong.items(), key=lambda item: item[1])
        return Divergence(stage="onnx", name=name, error=error, tolerance=tolerance, shape=results[name].shape)
    known = _Known(values.items(), tolerance)
    steps = [step for node in model.graph for step in _onnx_steps(node, every, known)]
    return _blame("onnx", steps, alone, every, tolerance)


def _output_names(graph: fx.Graph) -> list[str]:
    return [node.name for node in pytree.tree_leaves(graph.output_node().args)]


def _wrong(expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: float) -> dict[str, float]:
    errors = {name: arrays.departure(value, actual[name]) for name, value in expected.items()}
    return {name: error for name, error in errors.items() if error > tolerance}


class _Known:
    """Results that are assumed to be right, each with a key that may identify its counterpart."""

    def __init__(self, values: Iterable[tuple[str, Array]], tolerance: float):
        self._tolerance = tolerance
        self._alike: dict[Any, list[tuple[str, Array]]] = defaultdict(list)
        self.keys = set()
        for key, value in values:
            self.keys.add(key)
            self._alike[value.shape, value.dtype].append((key, value))

    def error(self, key: str | None, value: Array) -> float | None:
        """Return the error of a result with respect to its counterpart, or None if there is none.

        The counterpart is any good result, otherwise the nearest with the same key; a key of None matches all.
        """
        nearest: float | None = None
        alike = self._alike.get((value.shape, value.dtype), [])
        for other, candidate in sorted(alike, key=lambda item: item[0] != key):
            error = arrays.departure(candidate, value)
            if error <= self._tolerance:
                return error
            if key in (None, other) and (nearest is None or error < nearest):
                nearest = error
        return nearest


@dataclass(frozen=True)
class _Step:
    """An operation in the search; ``error`` is None if its result has no counterpart."""

    name: str
    operator: str
    module: str
    source: str
    error: float | None
    reads: tuple[str, ...]


def _fx_steps(graph: fx.Graph, values: Mapping[str, Array], known: _Known) -> list[_Step]:
    stacks = {node: [str(part[0]) for part in node.meta.get("nn_module_stack", {}).values()] for node in graph.nodes}
    modules = {node: user_path(stack[-1]) if stack else "" for node, stack in stacks.items()}
    # A graph that was captured again after a rewrite may lack the modules of its nodes.
    has_modules = any(module and module in known.keys for module in modules.values())
    steps = []
    for node, module in modules.items():
        error: float | None = 0.0
        if node.op not in ("placeholder", "get_attr"):
            key = module if has_modules else None
            error = known.error(key, values[node.name]) if node.name in values else None
        source = _line(node.meta.get("stack_trace") or "")
        reads = tuple(item.name for item in node.all_input_nodes)
        steps.append(_Step(node.name, str(node.target), module if has_modules else "", source, error, reads))
    return steps


def _onnx_steps(node: ir.Node, values: Mapping[str, Array], known: _Known) -> list[_Step]:
    """Return a step for each result of a node."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    module = user_path(scopes[-2]) if len(scopes) > 1 else ""
    source = _line(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
    reads = tuple(_read_by(node))
    names = [output.name for output in node.outputs if output.name]
    errors = [known.error(name, values[name]) if name in values else None for name in names]
    return [_Step(name, node.op_type, module, source, error, reads) for name, error in zip(names, errors, strict=True)]


def _read_by(node: ir.Node) -> list[str]:
    """Return the names of the values that a node and its subgraphs read."""
    bodies = [
        graph
        for attribute in node.attributes.values()
        for graph in ([attribute.as_graph()] if attribute.type is ir.AttributeType.GRAPH else [])
    ]
    nodes = [node, *(inner for graph in bodies for inner in graph.all_nodes())]
    return [value.name for inner in nodes for value in inner.inputs if value is not None and value.name]


def _line(stack: str) -> str:
    place = innermost(frames_in(stack))
    return f"{place.file}:{place.line}" if place is not None else ""


def _blame(
    stage: str, steps: Sequence[_Step], wrong: Mapping[str, float], values: Mapping[str, Array], tolerance: float
) -> Divergence:
    """Go back from wrong outputs to the first operation that diverges."""
    by_name = {step.name: replace(step, error=wrong.get(step.name, step.error)) for step in steps}

    def is_good(name: str) -> bool:
        error = by_name[name].error
        return error is not None and error <= tolerance

    behind = _reached(by_name, list(wrong), is_good)
    first = next(by_name[step.name] for step in steps if step.name in behind and by_name[step.name].error is not None)
    front = _reached(by_name, list(first.reads), is_good)
    reads = {name for step in (first.name, *front) for name in by_name[step].reads if name in by_name}
    good = [step.name for step in steps if step.name in reads and is_good(step.name)]
    return Divergence(
        stage=stage,
        name=first.name,
        operator=first.operator,
        module=first.module,
        source=first.source,
        error=first.error if first.error is not None else 0.0,
        tolerance=tolerance,
        shape=values[first.name].shape,
        last_good=tuple(good),
        unknown=tuple(f"{step.name} ({step.operator})" for step in steps if step.name in front),
    )


def _reached(steps: Mapping[str, _Step], start: list[str], is_good: Callable[[str], bool]) -> set[str]:
    """Return the operations that are not good, from ``start`` back to those that are."""
    found: set[str] = set()
    while start:
        name = start.pop()
        if name in steps and name not in found and not is_good(name):
            found.add(name)
            start += steps[name].reads
    return found
