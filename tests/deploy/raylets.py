"""A Ray cluster of several raylets on this machine, and clients that note the outcome of every request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster

import ingot
from ingot.deploy.ray import applications
from ingot.deploy.ray.plan import Plan
from tests.server.outside import wait_until

_OBJECTS = 100 << 20
"""Bytes of each node's object store, which Ray does not let be much smaller."""
ADDRESSES: dict[str, Any] = {"http_port": 18000, "grpc_port": 18001}
HTTP, GRPC = "http://127.0.0.1:18000", "grpc://127.0.0.1:18001"


class Raylets:
    """A head node, which runs Serve's proxy and controller, and nodes with one core each, which run replicas."""

    def __init__(self, nodes: int):
        os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "ingot.deploy.ray.proxy.middlewares"
        node = {"object_store_memory": _OBJECTS, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add()
        ray.init(self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def add(self) -> str:
        """Add a node, and return its id."""
        self._nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=_OBJECTS))
        return str(self._nodes[-1].node_id)

    def run(self, plan: Plan) -> None:
        applications.run(plan, "HeadOnly")

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def nodes_of(self, name: str) -> list[str]:
        """Return the id of the node of each replica that serves."""
        return [replica["node_id"] for replica in replicas(name)]

    def kill(self, node_id: str) -> None:
        """End the processes of a node at once, as if its machine lost power."""
        [node] = [node for node in self._nodes if node.node_id == node_id]
        self._nodes.remove(node)
        for name in serve.status().applications:  # they outlive their raylet by a moment otherwise
            for replica in replicas(name):
                if replica["node_id"] == node_id:
                    os.kill(replica["pid"], signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)


def replicas(name: str) -> list[dict[str, Any]]:
    """Return the replicas that serve, with ``node_id`` and ``pid``."""
    details = serve.context._get_global_client().get_serve_details()
    found = details["applications"][name]["deployments"][name]["replicas"]
    return [replica for replica in found if replica["state"] == "RUNNING"]


@contextmanager
def raylets(nodes: int = 2) -> Iterator[Raylets]:
    found = Raylets(nodes)
    try:
        yield found
    finally:
        found.close()


class Request(NamedTuple):
    """Times in seconds of ``time.monotonic``; ``factor`` is the answer's of :func:`tests.serving.rolling.times`."""

    began: float
    ended: float
    factor: float | None
    error: str


class Client(threading.Thread):
    """Sends requests one after the other on one connection, without repeating those that fail."""

    def __init__(self, url: str, name: str = "times"):
        super().__init__(daemon=True)
        self._url, self._name = url, name
        self.requests: list[Request] = []
        self.ended = threading.Event()

    def run(self) -> None:
        with ingot.Client(self._url, timeout=60) as client:
            while not self.ended.is_set():
                x = np.full((1, 4), len(self.requests) + 1, np.float32)
                began, factor, error = time.monotonic(), None, ""
                try:
                    [factor] = np.unique(client.infer(self._name, {"x": x})["y"] / x)
                except Exception as failure:  # noqa: BLE001 - counted
                    error = f"{type(failure).__name__}: {failure}"
                self.requests.append(Request(began, time.monotonic(), factor, error))


@contextmanager
def clients(urls: list[str], each: int, name: str = "times") -> Iterator[list[Client]]:
    """Run clients during the block; every one has been answered before it begins."""
    found = [Client(url, name) for url in urls for _ in range(each)]
    for client in found:
        client.start()
    try:
        wait_until(lambda: all(client.requests for client in found))
        yield found
    finally:
        for client in found:
            client.ended.set()
        for client in found:
            client.join(60)


def failed(found: list[Client]) -> list[Request]:
    return [request for client in found for request in client.requests if request.error]


def answered(found: list[Client], since: float, until: float) -> int:
    return sum(not request.error and since <= request.ended < until for client in found for request in client.requests)
