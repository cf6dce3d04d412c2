"""Batch sizes that are run once before a model is ready, where an engine's first call of a size is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from ingot.errors import IngotError
from ingot.runtime.engine import Engine
from ingot.runtime.profile import repeat, zeros
from ingot.runtime.scheduling.latency_model import Latency
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

SHARE = 10
"""How many times as long as the sizes are timed they may be rehearsed."""


def run_sizes(
    engines: Sequence[Engine],
    signature: Signature,
    examples: Sequence[Mapping[str, Array]],
    latency: Latency,
    most: int,
    budget: float,
) -> int:
    """Run the sizes that traffic will bring, so that no client waits while code is compiled or memory is taken.

    An engine that compiles code for each shape (``compiles``), or runs on a GPU, where libraries choose their kernels
    by it, runs every size that batches will have. Others run the largest that was measured, if they have not.

    Args:
        engines: of one model; ``latency`` was measured with the first.
        signature: the model's.
        examples: valid inputs, of which the first sample of the first is used; zeros if there are none.
        latency: what was measured; batches are no larger than it says is best.
        most: samples of the largest batch.
        budget: seconds for all engines together; sizes that are left run first in traffic.

    Returns:
        How many sizes were left, all engines together.
    """
    if not latency.known:
        return 0  # nothing may be run, or nothing that can be made up
    end = time.perf_counter() + budget
    example = examples[0] if examples else zeros(signature)
    left = 0
    for index, engine in enumerate(engines):
        sizes = _sizes(engine, latency, most) if signature.batch is not None else [1]
        if index == 0:
            sizes = [samples for samples in sizes if samples not in latency.known]
        for done, samples in enumerate(sizes):
            if time.perf_counter() >= end:
                left += len(sizes) - done
                break
            try:
                engine.run(repeat(signature, example, samples) if signature.batch is not None else example)
            except IngotError as error:
                log.info("a batch of %d samples could not be run before it comes: %s", samples, error)
                break
    return left


def _sizes(engine: Engine, latency: Latency, most: int) -> list[int]:
    """Return batch sizes, those that matter most first."""
    if not (getattr(engine, "compiles", False) or engine.device == "cuda"):
        return [max(latency.known)]
    largest = latency.best(most)
    return [largest, *range(1, largest)]
