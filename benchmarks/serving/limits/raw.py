"""The engine alone: ``python -m benchmarks.serving.limits.raw MODEL`` prints samples a second by batch."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.serving.models import Model, model

BATCHES = (1, 8, 32)


def rate(found: Model, batch: int, seconds: float) -> float:
    """Return the samples a second of a loop that runs the same batch again and again."""
    session = found.session()
    count = len(found.samples)
    inputs = {name: np.stack([found.samples[i % count][name] for i in range(batch)]) for name in found.samples[0]}
    session.run(None, inputs)
    calls, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        session.run(None, inputs)
        calls += 1
    return calls * batch / (now - start)


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    found = model(options.model, options.build)
    print(json.dumps({batch: rate(found, batch, options.seconds) for batch in BATCHES}))


if __name__ == "__main__":
    main()
