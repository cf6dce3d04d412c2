"""Archives that differ in one factor, and clients that check every answer while a server changes versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ingot
from ingot.model_store import Archive, Golden
from ingot.model_store.trust import signing
from ingot.model_store.trust.keys import PrivateKey
from ingot.tensors import Array, DType, Range, Signature, TensorSpec
from tests import onnx_models
from tests.archives import archive_of
from tests.server.outside import wait_until

SIGNATURE = Signature(
    (TensorSpec("x", DType.FP32, ("batch", 4)),),
    (TensorSpec("y", DType.FP32, ("batch", 4)),),
    "batch",
    {"batch": Range(1, 64)},
)
X = np.array([[1, 2, 3, 4]], np.float32)


def times(factor: float, *, golden: float | None = None, name: str = "times") -> Archive:
    """Return an archive of y = factor * x, whose golden says y = golden * x."""
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
    constant = numpy_helper.from_array(np.array(factor, np.float32), "factor")
    return archive(nodes, [constant], X * (factor if golden is None else golden), name)


def archive(
    nodes: Sequence[NodeProto], constants: Sequence[TensorProto], golden: Array = X, name: str = "times"
) -> Archive:
    """Return an archive of a graph from x to y; the golden is its output for :data:`X`."""
    with TemporaryDirectory() as folder:
        shape, kind = ("batch", 4), TensorProto.FLOAT
        path = Path(folder) / "model.onnx"
        graph = onnx_models.save(path, nodes, [("x", kind, shape)], [("y", kind, shape)], constants).read_bytes()
    return archive_of(name, graph, SIGNATURE, [Golden({"x": X}, {"y": golden})])


def signed(subject: Archive, key: PrivateKey) -> Archive:
    return subject.with_signature(signing.sign(subject, subject.name, key))


class Load(threading.Thread):
    """Asks one model over and over on one connection.

    ``seen`` are the factors of its answers, in order without repetitions; ``spent`` the times when requests began, and
    their durations, in seconds.
    """

    def __init__(self, url: str, name: str = "times", version: str = "prod"):
        super().__init__(daemon=True)
        self._url = url
        self._asked = name, version
        self.seen: list[float] = []
        self.spent: list[tuple[float, float]] = []
        self.answered = 0
        self.failure: Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        name, version = self._asked
        try:
            with ingot.Client(self._url) as client:
                while not self.ended.is_set():
                    x = np.full((1 + self.answered % 3, 4), self.answered + 1, np.float32)
                    began = time.perf_counter()
                    answer = client.infer(name, {"x": x}, version=version)["y"]
                    self.spent.append((began, time.perf_counter() - began))
                    [factor] = np.unique(answer / x)
                    self.answered += 1
                    if not self.seen or self.seen[-1] != factor:
                        self.seen.append(float(factor))
        except Exception as error:  # noqa: BLE001 - the test's thread looks at it
            self.failure = error


@contextmanager
def load(urls: Sequence[str], each: int = 2, version: str = "prod") -> Iterator[list[Load]]:
    """Run clients of each URL during the block, and check that no request failed."""
    clients = [Load(url, version=version) for url in urls for _ in range(each)]
    for client in clients:
        client.start()
    try:
        wait_until(lambda: all(client.answered or client.failure for client in clients))
        yield clients
        more = [client.answered for client in clients]
        wait_until(lambda: all(c.answered > n + 1 or c.failure for c, n in zip(clients, more, strict=True)))
    finally:
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(60)
    assert [client.failure for client in clients] == [None] * len(clients)
