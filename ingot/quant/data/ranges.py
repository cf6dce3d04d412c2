"""The values of a model's activations on real data, collected in one pass, and the ranges derived from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.quant.data.samples import Samples
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array

Method = Literal["minmax", "percentile", "entropy", "mse"]

_BINS = 2048
# Values sampled from one array; more do not change its histogram.
_SAMPLED = 1 << 16
# Bytes of activations that one run may return.
_AT_ONCE = 256 << 20
_PERCENTILE = 0.9999


@dataclass
class Observation:
    """One activation's values.

    ``bins`` count a sample of them over ``-reach`` to ``reach``. ``lows``, ``highs`` and ``mean`` are by channel, along
    the axis that a layer contracts; None where it is not needed.
    """

    low: float = math.inf
    high: float = -math.inf
    reach: float = 0.0
    bins: Array = field(default_factory=lambda: np.zeros(_BINS))
    lows: Array | None = None
    highs: Array | None = None
    total: Array | None = None
    count: int = 0

    @property
    def mean(self) -> Array | None:
        return None if self.total is None else self.total / max(self.count, 1)

    def add(self, array: Array, axis: int | None) -> None:
        """Add the values of one batch; ``axis`` is that of the channels.

        Infinity, such as that of a mask, counts as zero: no range contains it.
        """
        if array.size == 0:
            return
        finite = np.isfinite(array)
        if not finite.all():
            array = np.where(finite, array, 0)
        self.low, self.high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        self._widen(max(-self.low, self.high))
        sample = array.reshape(-1)[:: _stride(array.size)].astype(np.float64)
        self.bins += np.histogram(sample, _BINS, (-self.reach, self.reach))[0]
        if axis is None:
            return
        channels = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        lows, highs = channels.min(axis=0), channels.max(axis=0)
        self.lows = lows if self.lows is None else np.minimum(self.lows, lows)
        self.highs = highs if self.highs is None else np.maximum(self.highs, highs)
        total = channels.sum(axis=0, dtype=np.float64)
        self.total = total if self.total is None else self.total + total
        self.count += len(channels)

    def _widen(self, needed: float) -> None:
        """Double the reach until it covers a value; two bins become one."""
        if self.reach == 0:
            self.reach = 2.0 ** math.ceil(math.log2(max(needed, 1e-30)))
        while self.reach < needed:
            self.reach *= 2
            middle = self.bins.reshape(-1, 2).sum(axis=1)
            self.bins = np.concatenate([np.zeros(_BINS // 4), middle, np.zeros(_BINS // 4)])

    def range(self, method: Method) -> tuple[float, float]:
        """Return the range that a method derives from the values."""
        if method == "minmax" or not self.bins.any():
            return self.low, self.high
        if method == "percentile":
            return self._percentile(_PERCENTILE)
        return self._best(_squared_error if method == "mse" else _divergence)

    def clipped(self, low: float, high: float) -> float:
        """Return the share of values outside a range."""
        centers = self._centers()
        total = self.bins.sum()
        width = 2 * self.reach / _BINS
        return float(self.bins[(centers < low - width) | (centers > high + width)].sum() / total) if total else 0.0

    def _centers(self) -> Array:
        edges = np.linspace(-self.reach, self.reach, _BINS + 1)
        return (edges[:-1] + edges[1:]) / 2

    def _percentile(self, share: float) -> tuple[float, float]:
        edges = np.linspace(-self.reach, self.reach, _BINS + 1)
        below = np.cumsum(self.bins) / self.bins.sum()
        low = float(edges[int(np.searchsorted(below, 1 - share))]) if self.low < 0 else self.low
        high = float(edges[min(int(np.searchsorted(below, share)) + 1, _BINS)])
        return max(low, self.low), min(high, self.high)

    def _best(self, cost: Callable[[Array, Array, float, float], float]) -> tuple[float, float]:
        """Return the share of the whole range with the lowest cost."""
        centers = self._centers()
        tried = [(share * self.low, share * self.high) for share in np.linspace(0.1, 1, 46)]
        low, high = min(tried, key=lambda ends: cost(centers, self.bins, *ends))
        return float(low), float(high)


def _stride(size: int) -> int:
    """Return a step for sampling an array that reaches all its channels: it divides no dimension."""
    step = max(1, size // _SAMPLED)
    while math.gcd(step, size) > 1:
        step += 1
    return step


def _squared_error(centers: Array, bins: Array, low: float, high: float) -> float:
    """Return the mean squared error of rounding to 8 bits in a range: clipping, and half a step at most."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = max(high - low, 1e-12) / 255
    error = np.where((centers < low) | (centers > high), np.clip(centers, low, high) - centers, step / math.sqrt(12))
    return float((bins * error**2).sum())


def _divergence(centers: Array, bins: Array, low: float, high: float) -> float:
    """Return the Kullback-Leibler divergence of the values from their form in 8 bits in a range."""
    low, high = min(low, 0.0), max(high, 0.0)
    inside = (centers >= low) & (centers <= high)
    kept = bins[inside]
    if not kept.any():
        return math.inf
    reference = kept.copy()
    reference[0] += bins[centers < low].sum()  # clipped values accumulate at the ends
    reference[-1] += bins[centers > high].sum()
    steps = np.minimum((np.arange(len(kept)) * 256 // len(kept)), 255)
    sums, filled = np.bincount(steps, kept, 256), np.bincount(steps, kept > 0, 256)
    spread = np.where(kept > 0, (sums / np.maximum(filled, 1))[steps], 0)
    p, q = reference / reference.sum(), spread / max(spread.sum(), 1e-12)
    both = (p > 0) & (q > 0)
    missing = p[(p > 0) & (q == 0)].sum()
    return float((p[both] * np.log(p[both] / q[both])).sum() + missing * 10)


def observe(
    model: ir.Model,
    names: Collection[str],
    channels: Mapping[str, int],
    samples: Samples,
    shared: BlobFolder | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Observation]:
    """Run a model on samples and return the observations of some of its values.

    Args:
        model: the model; it is not changed.
        names: the values.
        channels: the axis of channels, for values that are observed by channel.
        samples: the data, with rows of any size.
        shared: where the model's large weights are, if that is a folder of blobs.
        progress: called with the number of finished rows and of all rows.
    """
    inputs = {value.name for value in model.graph.inputs}
    seen = {name: Observation() for name in names}
    blobs = BlobFolder.scratch()
    watching = _with_outputs(model, [name for name in names if name not in inputs])
    path = blobs.path(onnx_graph.pack(watching, blobs, shared)[0])
    with contextlib.closing(load_engine(EngineSpec(path, device="cpu"))) as engine:
        done = 0
        size = _rows_at_once(engine.run(next(samples.batches(1)).inputs))
        for batch in samples.batches(size):
            values = {**batch.inputs, **engine.run(batch.inputs)}
            for name, observation in seen.items():
                observation.add(values[name].astype(np.float32, copy=False), channels.get(name))
            done += batch.rows
            progress(done, samples.rows)
    return seen


def _with_outputs(model: ir.Model, names: Iterable[str]) -> ir.Model:
    copy = model.clone()
    present = {value.name for value in copy.graph.outputs}
    values = {value.name: value for node in copy.graph for value in node.outputs}
    for name in names:
        if name not in present:
            copy.graph.outputs.append(values[name])
    return copy


def _rows_at_once(outputs: Mapping[str, Array]) -> int:
    return max(1, min(32, _AT_ONCE // max(1, sum(array.nbytes for array in outputs.values()))))
