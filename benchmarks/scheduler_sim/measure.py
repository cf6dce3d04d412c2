"""Profiles of this machine: ONNX models timed as a server times them, by ``--measure NAME=FILE``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.scheduler_sim.profiles import MEASURED, PROFILES
from ingot.errors import InvalidArgument
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.loading import warmup
from ingot.runtime.machine import devices

# Seconds for one model; it ends at the size that would not fit.
_BUDGET = 30.0
_MOST = 64


def measure(models: Iterable[str], path: Path = MEASURED) -> None:
    """Time models, each given as ``NAME=FILE``, on one thread, and write their durations.

    Raises:
        InvalidArgument: a name is not one of the profiles'.
    """
    names = [item.name for item in PROFILES]
    found = {}
    for model in models:
        name, _, file = model.partition("=")
        if name not in names or not file:
            raise InvalidArgument(f"'{model}' is not NAME=FILE with a name of {', '.join(names)}")
        engine = load_engine(EngineSpec(Path(file), device="cpu", threads=1))
        found[name] = dict(warmup.measure(engine, engine.signature, [], _MOST, _BUDGET).known)
        engine.close()
    document = {"generated": "python -m benchmarks.scheduler_sim --measure", "machine": devices.describe()}
    path.write_text(json.dumps({**document, "profiles": found}, indent=1) + "\n")
