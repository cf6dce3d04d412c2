"""Whether equal inputs of an ONNX graph have equal outputs, decided from its operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ingot.bounds.graph import Graph, Model, Node, opened
from ingot.bounds.protobuf import DamagedError

# Operators that draw numbers, by domain. A seed does not help: the generator continues from call to call.
_RANDOM = {
    "": {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"},
    "ai.onnx.ml": set[str](),
    "com.microsoft": {"BiasDropout", "BitmaskBiasDropout", "BitmaskDropout", "Random", "Sampling"},
}
# The input of Dropout that makes it draw numbers.
_TRAINING = 2


def random_of(path: Path) -> str:
    """Return why equal inputs of an ONNX file may have different outputs; empty if they cannot.

    Args:
        path: the graph; its weights are not read.
    """
    try:
        with opened(path) as model:
            return next(_reasons(model), "")
    except DamagedError as error:
        return str(error)


def _reasons(model: Model) -> Iterator[str]:
    graphs = [model.graph, *model.functions.values()]
    while graphs:
        graph = graphs.pop()
        for node in graph.nodes:
            graphs += node.graphs
            if (node.domain, node.operator) in model.functions:
                continue
            if node.domain not in _RANDOM:
                yield f"{node} is a custom operator"
            elif node.operator in _RANDOM[node.domain] or _trains(node, graph):
                yield f"{node} is random"


def _trains(node: Node, graph: Graph) -> bool:
    """Return whether a node is a dropout that is not certain to be off."""
    if node.operator != "Dropout" or len(node.inputs) <= _TRAINING or not node.inputs[_TRAINING]:
        return False
    flag = graph.constants.get(node.inputs[_TRAINING])
    return flag is None or flag.values is None or bool(flag.values.any())
