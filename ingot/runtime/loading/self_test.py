"""Batch sizes that are run once before a model is ready, for engines whose first call of a size is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from ingot.errors import IngotError
from ingot.runtime.engines.engine import Engine
from ingot.runtime.profiling.profile import repeat, zeros
from ingot.runtime.scheduling.latency_model import Latency
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

SHARE = 10
"""Time limit of the self-test, as a multiple of the time for measuring batch sizes."""


def run_sizes(
    engines: Sequence[Engine],
    signature: Signature,
    examples: Sequence[Mapping[str, Array]],
    latency: Latency,
    most: int,
    budget: float,
    seen: Sequence[int] = (),
) -> int:
    """Run the batch sizes of later traffic, so that no client waits for compilation or allocation.

    An engine that compiles code for each shape (``compiles``), or runs on a GPU, where libraries choose kernels by
    shape, runs every batch size. One that captures batches as CUDA graphs runs those (``captured``), whatever the
    budget. Other engines run the largest measured size, if they have not done so.

    Args:
        engines: of one model; ``latency`` was measured with the first.
        signature: the model's signature.
        examples: valid inputs, whose very first sample is used; zeros if empty.
        latency: the measurements; batches are no larger than its best size.
        most: samples of the largest batch.
        budget: seconds for all engines together; remaining sizes first run in traffic.
        seen: sizes that the traffic of the model's predecessor had; they are run first.

    Returns:
        The number of remaining sizes, over all engines.
    """
    if not latency.known:
        return 0  # measuring is disabled, or the model rejects generated inputs
    end = time.perf_counter() + budget
    example = examples[0] if examples else zeros(signature)
    left = 0
    for index, engine in enumerate(engines):
        sizes = [1]
        if signature.batch is not None:
            wanted = (samples for samples in seen if samples <= most)
            sizes = list(dict.fromkeys([*wanted, *_sizes(engine, latency, most)]))
        if index == 0:
            sizes = [samples for samples in sizes if samples not in latency.known]
        for done, samples in enumerate(sizes):
            if time.perf_counter() >= end and not engine.capabilities.captured:
                left += len(sizes) - done
                break
            try:
                engine.run(repeat(signature, example, samples) if signature.batch is not None else example)
            except IngotError as error:
                log.info("a batch of %d samples failed in the self-test: %s", samples, error)
                break
    return left


def _sizes(engine: Engine, latency: Latency, most: int) -> list[int]:
    """Return batch sizes, the most important first."""
    if captured := [size for size in engine.capabilities.captured if size <= most]:
        return captured[::-1]
    if not (engine.capabilities.compiles or engine.device != "cpu"):
        return [max(latency.known)]
    largest = latency.best(most)
    return [largest, *range(1, largest)]
