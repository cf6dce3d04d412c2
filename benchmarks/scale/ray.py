"""Ray Serve on a local cluster of three raylets: a second replica, a node that is killed, and versions that roll.

``python -m benchmarks.scale.ray`` prints a line of JSON for each part, and the status is 0 only if all goals are met:

- ``replicas``: the throughput of two replicas against that of one, at least 1.8. An engine call sleeps 0.2 s for a
  batch of up to 2, so that a second replica does not need the cores of the first.
- ``scaling``: ``seconds`` until a second replica answers under load, with ``--replicas 1..2``. No request fails.
- ``node``: a node with a replica is killed under load. Requests that were sent later do not fail; of those in flight,
  which are ``in_flight``, only some do. ``seconds`` pass until there are as many replicas as before.
- ``roll``: an alias is promoted, a fixed version is deployed, and replicas are replaced for another setting, each
  under load. No request fails.
- ``proxies``: the time of a request of one client, in ms: to ``ingot serve``, through Ray's proxies, and through its
  HTTP proxy to a deployment that does nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
from ray import serve

import ingot
from ingot.deploy.ray import applications
from ingot.deploy.ray.plan import Plan
from ingot.model_store import Store
from tests.deploy.raylets import ADDRESSES, GRPC, HTTP, Raylets, answered, clients, failed, raylets
from tests.deploy.sleeping import SleepingReplica
from tests.server.outside import wait_until
from tests.serving.rolling import X, times

_CLIENTS = 16
_GOAL = 1.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", help="these parts")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of throughput")
    arguments = parser.parse_args()
    met = True
    with TemporaryDirectory() as folder, raylets(2) as cluster:
        store = Store(Path(folder))
        for version in (1, 2):
            store.push(times(version), f"times:{version}")
        store.promote("times:1", "prod")
        for part in (replicas, scaling, node, roll, proxies):
            if arguments.only and part.__name__ not in arguments.only:
                continue
            result, reached = part(cluster, store, arguments.seconds)
            print(json.dumps({"part": part.__name__, **result, "met": reached}), flush=True)
            met = met and reached
    sys.exit(not met)


def replicas(cluster: Raylets, store: Store, seconds: float) -> tuple[dict[str, Any], bool]:
    rates = []
    with sleeping():
        for count in (1, 2):
            cluster.run(planned(store, "times:prod", count, max_batch=2))
            wait_until(lambda: len(cluster.nodes_of("times")) == count)  # noqa: B023 - called here
            with clients([HTTP], _CLIENTS) as found:
                time.sleep(seconds / 5)
                began = time.monotonic()
                time.sleep(seconds)
                ended = time.monotonic()
            rates.append(answered(found, began, ended) / (ended - began))
            assert not failed(found), failed(found)[:3]  # noqa: S101
    ratio = rates[1] / rates[0]
    return {"per_second": [round(rate, 1) for rate in rates], "ratio": round(ratio, 2)}, ratio >= _GOAL


def scaling(cluster: Raylets, store: Store, seconds: float) -> tuple[dict[str, Any], bool]:
    if "times" in serve.status().applications:  # which would keep its replicas for minutes
        serve.delete("times")
    with sleeping():
        cluster.run(planned(store, "times:prod", "1..2", max_batch=4))
        wait_until(lambda: len(cluster.nodes_of("times")) == 1, 60)
        with clients([HTTP], _CLIENTS) as found:
            began = time.monotonic()
            wait_until(lambda: len(cluster.nodes_of("times")) == 2, 120)
            took = time.monotonic() - began
            time.sleep(2)
    errors = sorted({request.error[:120] for request in failed(found)})
    return {"seconds": round(took, 1), "failed": len(failed(found)), "errors": errors}, not failed(found)


def node(cluster: Raylets, store: Store, seconds: float) -> tuple[dict[str, Any], bool]:
    with sleeping():
        cluster.run(planned(store, "times:prod", 2, max_batch=4))
        wait_until(lambda: len(cluster.nodes_of("times")) == 2)
        lost = cluster.nodes_of("times")[0]
        cluster.add()
        with clients([HTTP], _CLIENTS) as found:
            time.sleep(2)
            killed = time.monotonic()
            cluster.kill(lost)
            wait_until(lambda: lost not in (nodes := cluster.nodes_of("times")) and len(nodes) == 2, 120)
            recovered = time.monotonic() - killed
            time.sleep(2)
    in_flight = [r for each in found for r in each.requests if r.began <= killed < r.ended]
    later = [request for request in failed(found) if request.began > killed]
    result = {
        "in_flight": len(in_flight),
        "failed": len(failed(found)),
        "failed_later": len(later),
        "errors": sorted({request.error[:120] for request in failed(found)}),
        "seconds": round(recovered, 1),
    }
    return result, not later and len(failed(found)) <= len(in_flight)


def roll(cluster: Raylets, store: Store, seconds: float) -> tuple[dict[str, Any], bool]:
    counts: dict[str, Any] = {}
    cluster.run(planned(store, "times:prod", 2))
    for change in ("alias", "fixed", "replaced"):
        with clients([HTTP, GRPC], 2) as found:
            began = time.monotonic()
            if change == "alias":
                store.promote("times:2", "prod")
                wait_until(lambda: all(each.requests[-1].factor == 2 for each in found), 60)
            elif change == "fixed":
                cluster.run(planned(store, "times:1", 2))
                wait_until(lambda: all(each.requests[-1].factor == 1 for each in found), 60)
            else:
                cluster.run(planned(store, "times:1", 2, max_batch=8))
            took = time.monotonic() - began
            time.sleep(1)
        sent = sum(len(each.requests) for each in found)
        counts[change] = {"sent": sent, "failed": len(failed(found)), "seconds": round(took, 1)}
        if failed(found):
            counts[change]["errors"] = sorted({request.error[:120] for request in failed(found)})
    return counts, not any(count["failed"] for count in counts.values())


def proxies(cluster: Raylets, store: Store, seconds: float) -> tuple[dict[str, Any], bool]:
    cluster.run(planned(store, "times:1", 2))
    with ingot.serve("times:1", store=store, http_port=0, grpc_port=0) as server, httpx.Client() as client:
        pairs = {"http": (server.http_url, HTTP), "grpc": (server.grpc_url, GRPC)}
        ms = {name: [_median(_infer(url), seconds / 4) for url in pair] for name, pair in pairs.items()}
        empty = serve.deployment(_empty, ray_actor_options={"num_cpus": 0})
        serve.run(empty.bind(), name="empty", route_prefix="/empty")
        ms["empty"] = [_median(lambda: client.post(f"{HTTP}/empty", content=b""), seconds / 4)]
    ratios = {f"{name}_ratio": round(ms[name][1] / ms[name][0], 1) for name in pairs}
    return {**{name: [round(each, 2) for each in found] for name, found in ms.items()}, **ratios}, True


def _empty(request: object) -> str:
    return ""


def _infer(url: str) -> Callable[[], object]:
    client = ingot.Client(url)
    return lambda: client.infer("times", {"x": X})


def _median(call: Callable[[], object], seconds: float) -> float:
    """Return the median time of a call, in milliseconds."""
    call()
    spent, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        call()
        spent.append(time.perf_counter() - began)
    return 1e3 * float(np.median(spent))


def planned(store: Store, source: str, count: int | str, **settings: Any) -> Plan:
    given = {**ADDRESSES, **settings}
    return Plan.of([f"times={source}"], replicas=str(count), cpu=1, store=store.root, settings=given)


def sleeping() -> AbstractContextManager[object]:
    """Deploy replicas whose engines sleep during the block."""
    return patch.object(applications, "Ingress", SleepingReplica)


if __name__ == "__main__":
    main()
