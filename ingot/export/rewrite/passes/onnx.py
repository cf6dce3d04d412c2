"""Base classes of rules over ONNX graphs, which keep the model's inputs and outputs, and queries of its values."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import pattern

from ingot.errors import ExportError
from ingot.export.rewrite.passes.manager import OnnxPass, PassResult
from ingot.tensors import Array

Dims = tuple[int | str | None, ...]
"""A shape: sizes, names, and None for unknown sizes."""

RANDOM = frozenset(
    ("Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
"""Operators whose result may differ from call to call."""


class OnnxRule(OnnxPass):
    """An ONNX pass that keeps the names, order, types and shapes of the model's inputs and outputs.

    Nodes and weights that are unused after the rewrite are removed. Bodies of local functions are not rewritten: they
    have their own operator sets, and keep custom operators visible.
    """

    @abstractmethod
    def rewrite(self, model: ir.Model) -> int:
        """Rewrite the model in place and return how many places were changed."""

    def call(self, graph: ir.Model) -> PassResult[ir.Model]:
        with _without_functions(graph), _same_contract(graph):
            matches = self.rewrite(graph)
            if matches:
                common.RemoveUnusedNodesPass()(graph)
        return PassResult(graph, matches)


class Replacement(Protocol):
    """A pattern and its replacement, in the form of a rule class of onnxscript's rewriter.

    ``check`` and ``rewrite`` receive the values of the pattern's variables and named outputs as keywords.
    """

    @property
    def pattern(self) -> Callable[..., Any]:
        """Builds the pattern from ``op`` and variables."""

    @property
    def check(self) -> Callable[..., bool]:
        """Returns whether a match may be replaced."""

    @property
    def rewrite(self) -> Callable[..., Any]:
        """Builds the nodes of the replacement."""


class PatternRule(OnnxRule):
    """A rule of patterns and their replacements, which onnxscript's rewriter finds.

    Operands of commutative operators match in either order. A match whose inner values have other uses is left.
    """

    anchors: ClassVar[tuple[str, ...]]
    """Operators of which each match contains one. A graph without any is skipped, because matching is slow."""

    @abstractmethod
    def patterns(self, opset: int) -> Sequence[Replacement]:
        """Return the patterns for a model of this operator set; none if the rule does not apply to it.

        They are applied in order, each to the whole graph.
        """

    def rewrite(self, model: ir.Model) -> int:
        if not any(node.op_type in self.anchors for node in model.graph.all_nodes()):
            return 0
        return sum(_apply(found, model) for found in self.patterns(model.opset_imports.get("", 0)))


def _apply(found: Replacement, model: ir.Model) -> int:
    rule = pattern.RewriteRule(found.pattern, found.rewrite, found.check)
    return pattern.RewriteRuleSet([rule], commute=True).apply_to_model(model)


@contextlib.contextmanager
def _without_functions(model: ir.Model) -> Iterator[None]:
    functions = dict(model.functions)
    model.functions.clear()
    try:
        yield
    finally:
        model.functions.update(functions)


@contextlib.contextmanager
def _same_contract(model: ir.Model) -> Iterator[None]:
    """Restore types and shapes of inputs and outputs, which rewrites lose or infer again, and check their names."""
    inputs, outputs = _given(model), list(model.graph.outputs)
    before = [(value.name, value.type, value.shape and value.shape.copy()) for value in (*inputs, *outputs)]
    yield
    after = (*_given(model), *model.graph.outputs)
    if [value.name for value in after] != [name for name, _, _ in before]:
        raise ExportError("the rewrite renamed, added or removed inputs or outputs of the model")
    for value, (_, kind, shape) in zip(after, before, strict=True):
        value.type, value.shape = kind, shape


def _given(model: ir.Model) -> list[ir.Value]:
    """Return the inputs without those that have a default value, which Ingot's engines never override."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def constant(value: ir.Value | None) -> Array | None:
    """Return a value that is known before the model runs, or None."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """Return a constant of one element that cannot raise the rank of another operand, or None."""
    array = constant(value)
    return float(array.item()) if array is not None and array.size == 1 and array.ndim <= 1 else None


def producer(value: ir.Value) -> ir.Node:
    """Return the node that computes a value.

    Raises:
        ExportError: it is an input or a weight.
    """
    node = value.producer()
    if node is None:
        raise ExportError(f"'{value.name}' is not computed by any node")
    return node


def dims(value: ir.Value | None) -> Dims | None:
    """Return a value's shape, or None if not even its rank is known."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def same(*sizes: int | str | None) -> bool:
    """Return whether dimensions are known to be equal."""
    return None not in sizes and len(set(sizes)) == 1


def reduces_last(value: ir.Value, x: ir.Value) -> bool:
    """Return whether a reduction of a value of the rank of ``x`` is over the last axis alone, and keeps the axis."""
    node = producer(value)
    axes: Sequence[int] = node.attributes.get_ints("axes", ())
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else None  # since opset 18
    if given is not None:
        axes = given.tolist()
    rank = len(dims(x) or ())
    return node.attributes.get_int("keepdims", 1) == 1 and list(axes) in ([-1], [rank - 1])


def spans_last(weight: ir.Value, value: ir.Value) -> bool:
    """Return whether ``weight`` is a vector as long as the last axis of ``value``."""
    shape, vector = dims(value) or (), dims(weight) or ()
    return len(vector) == 1 and len(shape) > 0 and same(vector[0], shape[-1])
