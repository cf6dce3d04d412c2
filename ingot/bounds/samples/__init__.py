"""Whether the samples of a batch influence each other, decided from the graph for all values and numbers of samples.

Start in :func:`mixing_of`. tracing.py follows the samples from the inputs to the outputs, next to the bounds of sizes
that :mod:`ingot.bounds` finds, with a rule for each operator (rules.py). An operator without a rule counts as mixing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from ingot.bounds import inputs_of
from ingot.bounds.abstract import ITEMS, UnboundedError
from ingot.bounds.analysis import Scope, StoppedError
from ingot.bounds.flow import SHARED, Flow, Kind
from ingot.bounds.graph import Attribute, Constant, Model, Node, opened
from ingot.bounds.poly import ONE, Poly, TooComplexError
from ingot.bounds.protobuf import DamagedError
from ingot.bounds.samples.tracing import Tracing
from ingot.tensors import Signature, TensorSpec

__all__ = ["Mixing", "mixing_of", "mixings", "numbers_of"]

# Larger numbers of a graph are not tried as sizes.
_LARGEST = 1 << 12


@dataclass(frozen=True)
class Mixing:
    """Where samples may influence each other: the output, the reason, and the first output of the node, if known."""

    output: str
    reason: str
    node: str = ""


def mixing_of(path: Path, signature: Signature, dim: str) -> Mixing | None:
    """Return where the samples of an ONNX graph may influence each other; None if they certainly do not.

    Args:
        path: the graph; its weights are not read.
        signature: its inputs and outputs.
        dim: the dimension of samples.
    """
    return next(mixings(path, signature, dim), None)


def mixings(path: Path, signature: Signature, dim: str) -> Iterator[Mixing]:
    """Yield the reason for each output that may depend on several samples; see :func:`mixing_of`."""
    try:
        with opened(path) as model:
            yield from _mixings(model, signature, dim)
    except (DamagedError, StoppedError, UnboundedError) as error:
        yield Mixing("", f"the graph: {error}")
    except TooComplexError:
        yield Mixing("", "the graph: the bounds of its sizes are too complex")


def _mixings(model: Model, signature: Signature, dim: str) -> Iterator[Mixing]:
    tracing = Tracing(model, dim)
    scope = Scope(dict(inputs_of(model, signature, empty=False)))
    scope.flows = {spec.name: _entering(spec, dim) for spec in signature.inputs}
    tracing.analyse(model.graph, scope)
    for spec in signature.outputs:
        flow = scope.flow(spec.name)
        placed = spec.shape.count(dim) == 1 and flow.sampled and flow.axis == spec.shape.index(dim)
        if flow.kind is Kind.MIXED:
            yield Mixing(spec.name, flow.reason, flow.node)
        elif not placed or flow.size != Poly.symbol(dim) or flow.inner not in (None, ONE):
            yield Mixing(spec.name, f"output '{spec.name}' does not have one part for each sample")
        elif flow.located:
            yield Mixing(spec.name, f"output '{spec.name}' has the positions of samples in the batch")


def numbers_of(path: Path) -> tuple[int, ...]:
    """Return sizes worth testing: the whole numbers above 2 among the graph's small constants."""
    with opened(path) as model:
        graphs, found = [model.graph, *model.functions.values()], set[float]()
        while graphs:
            graph = graphs.pop()
            constants = [*graph.constants.values()]
            for node in graph.nodes:
                graphs += node.graphs
                constants += [value for item in node.attributes.values() if (value := _value(node, item)) is not None]
            found.update(*(map(_numbers, constants)))
    return tuple(sorted(int(number) for number in found if 2 < number <= _LARGEST and number == int(number)))


def _value(node: Node, attribute: Attribute) -> Constant | None:
    return attribute.tensor if node.operator == "Constant" and attribute.name == "value" else None


def _numbers(constant: Constant) -> list[float]:
    values = constant.values
    if values is None or values.size > ITEMS or values.dtype.kind not in "iuf":
        return []
    return [number for number in values.tolist() if isfinite(number)]


def _entering(spec: TensorSpec, dim: str) -> Flow:
    """Return the flow of an input."""
    if dim not in spec.shape:
        return SHARED
    if spec.shape.count(dim) > 1:
        return Flow(Kind.MIXED, reason=f"input '{spec.name}' has dimension '{dim}' twice")
    return Flow(Kind.SAMPLES, spec.shape.index(dim), len(spec.shape), Poly.symbol(dim))
