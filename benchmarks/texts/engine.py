"""The engine alone: ids in batches of equal lengths, in its own process.

``python -m benchmarks.texts.engine ARCHIVE THREADS SECONDS COUNT`` prints texts a second, and CPU seconds per text.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.texts import corpus
from ingot.model_store import Archive
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array

# Tokens of a batch: larger ones are not faster.
_WORK = 512


def batches(count: int) -> Iterator[dict[str, Array]]:
    """Yield the ids of the first texts in batches without padding."""
    rows = sorted(corpus.ids(corpus.docstrings()[:count]), key=len)
    for length, equal in itertools.groupby(rows, len):
        left = list(equal)
        while left:
            some, left = left[: max(1, _WORK // length)], left[max(1, _WORK // length) :]
            ids = np.array(some, np.int64)
            yield {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def main() -> None:
    archive, threads, seconds, count = sys.argv[1:]
    variant = Archive.open(Path(archive)).unpacked().variant()
    engine, _ = LoadSpec.of_variant(variant, Settings()).start("cpu", int(threads), "minilm")
    made = list(batches(int(count)))
    for batch in made[:: max(1, len(made) // 20)]:
        engine.run(batch)
    texts, began, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < float(seconds):
        for batch in made:
            engine.run(batch)
            texts += len(batch["input_ids"])
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    print(json.dumps({"rate": texts / wall, "cpu": cpu / texts}))


if __name__ == "__main__":
    main()
