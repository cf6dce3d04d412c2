"""What decides how fast ONNX Runtime's convolutions are on a GPU: their precision, and options that a load measures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

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
# The larger of the two sizes of batches that are timed in turn, since a convolution plans again whenever it changes.
_SIZE = 8
_ROUNDS = 4
_HALF = (DType.FP16.onnx, DType.BF16.onnx)
_CONVOLUTIONS = ("Conv", "ConvTranspose", "FusedConv")
_PRODUCTS = (*_CONVOLUTIONS, "Einsum", "Gemm", "MatMul", "FusedMatMul", "Attention", "LSTM", "GRU", "RNN")
# Their outputs have the element type of the first input; exporters apply them to weights.
_MOVES = ("Concat", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


_Run = Callable[[Mapping[str, Array]], object]
_Session = TypeVar("_Session")


@dataclass(frozen=True)
class Convolutions:
    """Whether a graph has convolutions, and whether all products of its weights are in 16 bits."""

    any: bool = False
    half: bool = False


def convolutions_of(path: Path) -> Convolutions:
    """Return the convolutions of an ONNX file; none of a damaged one, which engines refuse."""
    try:
        with opened(path) as model:
            kinds = [*_kinds(model.graph)]
            for function in model.functions.values():
                kinds += _kinds(function)
    except (DamagedError, LookupError):  # a node may lack inputs
        return Convolutions()
    convolving = any(operator in _CONVOLUTIONS for operator, _ in kinds)
    # A product of two results has the precision of its neighbours; a convolution whose weights are computed may not.
    products = [kind for operator, kind in kinds if operator in _CONVOLUTIONS or kind is not None]
    return Convolutions(convolving, convolving and all(kind in _HALF for kind in products))


def _kinds(graph: Graph, outer: Mapping[str, int] = MappingProxyType({})) -> Iterator[tuple[str, int | None]]:
    """Yield each product of a graph with the element type of its weights; None if no operand follows from a constant.

    Args:
        graph: the graph, a function's body, or an inner graph.
        outer: the element types of constants that an inner graph can read.
    """
    kinds = {**outer, **{name: constant.kind for name, constant in graph.constants.items()}}
    for node in graph.nodes:
        if node.operator == "Constant" and "value" in node.attributes and (value := node.attributes["value"].tensor):
            kinds[node.outputs[0]] = value.kind
        elif node.operator in _MOVES and node.inputs[0] in kinds:
            kinds[node.outputs[0]] = kinds[node.inputs[0]]
        elif node.operator == "Cast" and node.inputs[0] in kinds and "to" in node.attributes:
            kinds[node.outputs[0]] = node.attributes["to"].integer
    yield from _of_nodes(graph.nodes, kinds)
    for inner in (each for node in graph.nodes for each in node.graphs):
        yield from _kinds(inner, kinds)


def _of_nodes(nodes: Sequence[Node], kinds: Mapping[str, int]) -> Iterator[tuple[str, int | None]]:
    for node in nodes:
        if node.operator in _PRODUCTS:
            known = [kinds[name] for name in node.inputs if name in kinds]
            yield node.operator, known[0] if known else None


def measurable(signature: Signature) -> bool:
    """Return whether calls with batches of zeros are typical: all sizes but the batch's are fixed."""
    return not obstacle(signature) and not any(spec.dtype is DType.BF16 for spec in signature.inputs)


def fastest(
    signature: Signature, max_batch: int, sessions: Iterable[tuple[str, _Session, _Run]]
) -> tuple[str, _Session]:
    """Return the session that is fastest with batches of changing sizes: the first, unless one gains 10 %.

    Args:
        signature: of all sessions; see :func:`measurable`.
        max_batch: samples of the largest batch.
        sessions: names, sessions and calls of them, the defaults' first; a call that cannot run raises an error. Each
            is opened when it is asked for, so that this one and the fastest before it are in memory, and no others.
    """
    most = min(_SIZE, max_batch) if signature.batch is not None else 1
    feeds = [
        {
            spec.name: np.zeros([dim if isinstance(dim, int) else size for dim in spec.shape], spec.dtype.numpy)
            for spec in signature.inputs
        }
        for size in range(most, max(0, most - 2), -1)
    ]
    left = iter(sessions)
    name, session, run = next(left)
    best, least = (name, session), _timed(run, feeds)
    enough = _GAIN * least
    for name, session, run in left:
        seconds = _timed(run, feeds)
        if seconds < least and seconds <= enough:
            best, least = (name, session), seconds
        del session, run  # before the next one is opened
    return best


def _timed(run: _Run, feeds: Sequence[Mapping[str, Array]]) -> float:
    """Return the seconds of a call; infinity if it cannot run."""
    found = foreign.outcome(partial(_seconds, run, feeds))
    return math.inf if isinstance(found, Exception) else found


def _seconds(run: Callable[[Mapping[str, Array]], object], feeds: Sequence[Mapping[str, Array]]) -> float:
    """Return the median time of a call, after a first one of each batch."""
    times = []
    for _ in range(1 + _ROUNDS):
        for feed in feeds:
            began = time.perf_counter()
            run(feed)
            times.append(time.perf_counter() - began)
    return statistics.median(times[len(feeds) :])
