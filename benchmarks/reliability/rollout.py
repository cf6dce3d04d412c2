"""Change the version that a loaded server answers with, many times in a row; no request may fail.

``python -m benchmarks.reliability.rollout --changes 20`` promotes and rolls back an alias in turn, with two clients
over HTTP and two over gRPC. Each answer is compared: it must be that of the version before a change or after it, and
never of the earlier one again. It prints the p99 of the clients' times before
and during the changes, and the seconds from the move of the alias until every client was answered by the new version.
The exit status is 0 only if every request was answered rightly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.processes import LOAD_CORE, SERVER_CORE, served
from ingot.model_store import Store
from tests.serving.rolling import Load, times

# Longest wait for a change.
_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--before", type=float, default=5.0, help="seconds of load before the first change")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.changes, arguments.before)
    print(json.dumps(result))
    sys.exit(bool(result["failures"]) or result["foreign"] > 0)


def measure(folder: Path, changes: int, before: float) -> dict[str, Any]:
    """Return the figures of a server."""
    store = Store(folder / "store")
    for version in (1, 2):
        store.push(times(version), f"times:{version}")
    store.promote("times:1", "prod")
    with served(["times:prod", "--store", str(store.root)], [SERVER_CORE]) as (addresses, _):
        clients = [Load(addresses[protocol]) for protocol in ("http", "http", "grpc", "grpc")]
        for client in clients:
            client.start()
        time.sleep(before)
        began = time.perf_counter()
        took = [_change(store, clients, 1 + (number + 1) % 2) for number in range(changes)]
        ended = time.perf_counter()
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(_SECONDS)
    wanted = [1.0 + number % 2 for number in range(changes + 1)]
    quiet, busy = (_p99(clients, *period) for period in ((0.0, began), (began, ended)))
    return {
        "changes": changes,
        "answered": sum(client.answered for client in clients),
        "failures": [str(client.failure) for client in clients if client.failure is not None],
        "foreign": sum(client.seen != wanted for client in clients),
        "p99_before_ms": round(1e3 * quiet, 2),
        "p99_during_ms": round(1e3 * busy, 2),
        "p99_ratio": round(busy / quiet, 2),
        "seconds_of_a_change": round(float(np.median(took)), 2),
    }


def _change(store: Store, clients: list[Load], version: int) -> float:
    """Move the alias to a version, and return the seconds until every client has had its answer."""
    began = time.perf_counter()
    store.promote(f"times:{version}", "prod")
    while not all(client.failure or client.seen[-1] == version for client in clients):
        if time.perf_counter() - began > _SECONDS:
            raise SystemExit(f"version {version} does not answer after {_SECONDS:g} s")
        time.sleep(0.01)
    return time.perf_counter() - began


def _p99(clients: list[Load], begin: float, end: float) -> float:
    spent = [seconds for client in clients for at, seconds in client.spent if begin <= at < end]
    return float(np.quantile(spent, 0.99))


if __name__ == "__main__":
    main()
