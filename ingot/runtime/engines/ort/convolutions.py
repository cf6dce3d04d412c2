"""What decides how fast ONNX Runtime's convolutions are on a GPU: their precision, and options that a load measures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ingot import foreign
from ingot.bounds.graph import Graph, Node, opened
from ingot.bounds.protobuf import DamagedError
from ingot.runtime.gpu.graphs import obstacle
from ingot.tensors import Array, DType, Signature

CANDIDATES: Mapping[str, dict[str, str]] = {
    "nhwc": {"prefer_nhwc": "1"},
    "heuristic": {"cudnn_conv_algo_search": "HEURISTIC"},
}
"""Options of the CUDA provider that may be faster than its defaults, by names for users."""

# A candidate replaces the defaults if it takes at most this share of their time.
_GAIN = 0.9
# Sizes of the batches that are timed, in turn, since a convolution plans again whenever the size changes.
_SIZES = (8, 7)
_ROUNDS = 4
_HALF = (DType.FP16.onnx, DType.BF16.onnx)
_CONVOLUTIONS = ("Conv", "ConvTranspose", "FusedConv")
_PRODUCTS = (*_CONVOLUTIONS, "Gemm", "MatMul", "FusedMatMul", "Attention", "LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class Convolutions:
    """Whether a graph has convolutions, and whether all products of its weights are in 16 bits."""

    any: bool = False
    half: bool = False


def convolutions_of(path: Path) -> Convolutions:
    """Return what is known of the convolutions of an ONNX file; none of a damaged one, which engines refuse."""
    try:
        with opened(path) as model:
            kinds = [*_kinds(model.graph)]
            for function in model.functions.values():
                kinds += _kinds(function)
    except DamagedError:
        return Convolutions()
    convolving = any(operator in _CONVOLUTIONS for operator, _ in kinds)
    # A product of two results has the precision of its neighbours; a convolution whose weights are computed may not.
    products = [kind for operator, kind in kinds if operator in _CONVOLUTIONS or kind is not None]
    return Convolutions(convolving, convolving and all(kind in _HALF for kind in products))


def _kinds(graph: Graph) -> Iterator[tuple[str, int | None]]:
    """Yield each product of a graph with the element type of its weights; None if no operand is a constant."""
    constants = dict(graph.constants)
    for node in graph.nodes:
        if node.operator == "Constant" and "value" in node.attributes and (value := node.attributes["value"].tensor):
            constants[node.outputs[0]] = value
    yield from _of_nodes(graph.nodes, {name: constant.kind for name, constant in constants.items()})
    for inner in (each for node in graph.nodes for each in node.graphs):
        yield from _kinds(inner)


def _of_nodes(nodes: Sequence[Node], kinds: Mapping[str, int]) -> Iterator[tuple[str, int | None]]:
    for node in nodes:
        if node.operator in _PRODUCTS:
            known = [kinds[name] for name in node.inputs if name in kinds]
            yield node.operator, known[0] if known else None


def measurable(signature: Signature) -> bool:
    """Return whether calls with batches of zeros are typical: all sizes but the batch's are fixed."""
    return not obstacle(signature) and not any(spec.dtype is DType.BF16 for spec in signature.inputs)


def fastest(signature: Signature, runs: Mapping[str, Callable[[Mapping[str, Array]], object]]) -> str:
    """Return the name of the session that is fastest with batches of changing sizes: the first, unless one gains 10 %.

    Args:
        signature: of all sessions; see :func:`measurable`.
        runs: calls of the sessions by name, the defaults' first; one that cannot run raises an error.
    """
    sizes = _SIZES if signature.batch is not None else (1,)
    feeds = [
        {
            spec.name: np.zeros([dim if isinstance(dim, int) else size for dim in spec.shape], spec.dtype.numpy)
            for spec in signature.inputs
        }
        for size in sizes
    ]
    times = {}
    for name, run in runs.items():
        seconds = foreign.outcome(partial(_seconds, run, feeds))
        times[name] = math.inf if isinstance(seconds, Exception) else seconds
    first, best = next(iter(times)), min(times, key=lambda name: times[name])
    return best if times[best] <= _GAIN * times[first] else first


def _seconds(run: Callable[[Mapping[str, Array]], object], feeds: Sequence[Mapping[str, Array]]) -> float:
    """Return the median time of a call, after a first one of each batch."""
    times = []
    for _ in range(1 + _ROUNDS):
        for feed in feeds:
            began = time.perf_counter()
            run(feed)
            times.append(time.perf_counter() - began)
    return statistics.median(times[len(feeds) :])
