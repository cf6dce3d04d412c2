"""Kill or stop the process of a model in Python under load, next to requests for another model of the server.

``python -m benchmarks.reliability.python_faults --seconds 60``: four clients ask a model in Python, each at most 50
times a second. Windows with and without the fault take turns, so that both see the same machine: the model's process
is ended by SIGKILL, or stopped by SIGSTOP until ``--engine-timeout`` ends it. The report has the answers of that model
and the p99 of its neighbour, as a ratio. The exit status is 0 only if the neighbour was answered by 200 alone, the
fault was caused, and the model answers after the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.decoders import Target, neighbour
from benchmarks.serving.processes import served
from ingot import Client
from ingot.errors import IngotError
from tests.server import test_image_steps

_WINDOW, _PAUSE, _PACE, _RECOVERY, _CLIENTS = 5.0, 1.5, 0.02, 90.0, 4
_FAULTS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
_VICTIM = """
import os


class Victim:
    inputs = ("x:float32[batch,4]",)
    outputs = ("pid:int64[batch]",)

    def predict(self, batch):
        return {"pid": [os.getpid()] * len(batch["x"])}
"""
_X = {"x": np.zeros((1, 4), np.float32)}


class Load(threading.Thread):
    """Asks the model in Python until ``over`` is set; ``pid`` is that of the process that answered last."""

    def __init__(self, url: str, over: threading.Event):
        super().__init__(daemon=True)
        self.answers: Counter[str] = Counter()
        self.pid = 0
        self._url, self._over = url, over

    def run(self) -> None:
        with Client(self._url, 30) as client:
            while not self._over.is_set():
                try:
                    self.pid = int(client.infer("victim", _X)["pid"][0])
                    self.answers["200"] += 1
                except IngotError as error:
                    self.answers[f"{error.code.value}: {error}"[:160]] += 1
                time.sleep(_PACE)


def cause(fault: str, load: Load, on: threading.Event, over: threading.Event) -> None:
    """Send the signal to the process that answered last, again and again while ``on`` is set."""
    last = 0
    while not over.wait(_PAUSE):
        if on.is_set() and load.pid != last:
            last = load.pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(last, _FAULTS[fault])


def _answers(load: Load, before: int) -> bool:
    """Whether the model answers within the pause after several crashes."""
    until = time.monotonic() + _RECOVERY
    while load.answers["200"] <= before and time.monotonic() < until:
        time.sleep(0.1)
    return load.answers["200"] > before


def measure(fault: str, seconds: float) -> dict[str, Any]:
    """Run a server with one fault; return what happened."""
    with tempfile.TemporaryDirectory() as work:
        archive, victim = Path(work) / "colour.ingot", Path(work) / "victim.py"
        test_image_steps.make(Path(work)).save(archive)
        victim.write_text(_VICTIM)
        sources = [f"victim={victim}:Victim", f"neighbour={archive}", "--engine-timeout", "1s"]
        with served(sources) as (found, _), contextlib.closing(Target(int(found["http"].rpartition(":")[2]))) as target:
            on, over = threading.Event(), threading.Event()
            loads = [Load(found["http"], over) for _ in range(_CLIENTS)]
            causing = threading.Thread(target=cause, args=(fault, loads[0], on, over), daemon=True)
            for thread in (*loads, causing):
                thread.start()
            neighbour(target, 1)  # warm
            times: dict[bool, list[float]] = {False: [], True: []}
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                for faulty in (False, True):
                    (on.set if faulty else on.clear)()
                    times[faulty] += neighbour(target, _WINDOW)
            on.clear()
            recovered = _answers(loads[0], loads[0].answers["200"])
            over.set()
            for thread in (*loads, causing):
                thread.join(60)
            alone, beside = (float(np.percentile(times[faulty], 99)) for faulty in (False, True))
            restarts = target.metric("ingot_engine_restarts_total")
            answers = dict(sum((load.answers for load in loads), Counter()))
            ratio = {"without_p99_ms": 1e3 * alone, "with_p99_ms": 1e3 * beside, "ratio": beside / alone}
            alive = any(load.is_alive() for load in loads)
            return {
                "fault": fault,
                "restarts": restarts,
                "answers": answers,
                "neighbour": ratio,
                "recovered": recovered and not alive,
            }


def main() -> None:
    """Measure both faults, and print the results as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.python_faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each fault")
    options = parser.parse_args()
    found = [measure(fault, options.seconds) for fault in _FAULTS]
    print(json.dumps(found, indent=1))
    if not all(each["recovered"] and each["restarts"] for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
