"""Front processes as clients and operators see them. The contract of HTTP and gRPC is tested in tests/server."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument, Unavailable
from ingot.runtime.dispatch.batching import BatchTimings
from ingot.runtime.dispatch.statistics import BatchTimes, Statistics
from ingot.runtime.scheduling.scheduler import REASONS
from ingot.server.frontends.state import dump_batch, dump_statistics, load_batch, load_statistics
from ingot.server.http import codec as http_codec
from ingot.server.main import RunningServer
from ingot.server.requests import InferRequest, Template
from tests import onnx_models
from tests.server.gates import Gate, hold
from tests.server.test_lifecycle import running, two_in_flight


def test_statistics_reach_a_front_as_they_are() -> None:
    counted = Statistics(samples=3, described={"state": "ready"})
    counted.batch(2, 3, 3, BatchTimings(running=0.5, calls=1))
    assert load_statistics(dump_statistics(counted)) == counted


def test_a_batch_reaches_a_front_as_it_is() -> None:
    for reason in REASONS:
        batch = BatchTimes(1.25, 2.5, 1e9 + 1 / 3, 1e9 + 0.5, 2, 300, reason)
        assert load_batch(dump_batch(batch)) == batch


def fronts_of(pid: int, url: str | None = None) -> list[int]:
    """Return the front processes that a process has started, of all its servers or of the one at a URL."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if parent == pid and b"ingot.server.frontends.process" in command:
                found.append(int(folder.name))
    return found if url is None else [front for front in found if listens(front, int(url.rpartition(":")[2]))]


def listens(pid: int, port: int) -> bool:
    sockets = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, address, _, state, *_, inode = line.split()[:10]
        if state == "0A" and int(address.rpartition(":")[2], 16) == port:
            sockets.add(f"socket:[{inode}]")
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if str(handle.readlink()) in sockets:
                return True
    return False


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def held_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """The gate of the module's server; it is in this process, as the engines are."""
    with Gate(tmp_path_factory.mktemp("gate")) as gate, pytest.MonkeyPatch.context() as patching:
        hold(gate.path, patching.setattr)
        yield gate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, held_by: Gate) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    made = [onnx_models.affine(folder), onnx_models.pair(folder), onnx_models.held(folder)]
    with ingot.serve(*map(str, made), http_port=0, grpc_port=0, frontends=2) as running:
        yield running


def counted(server: RunningServer, metric: str) -> float:
    """Return a metric's value; 0 if it has none yet."""
    for attempt in range(20):
        with ingot.Client(server.http_url) as client:
            try:
                lines = client.metrics().splitlines()
            except Unavailable:  # the front that was asked has just ended, and another is asked next
                time.sleep(0.1 * attempt)
                continue
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric} "))
    raise AssertionError("no front reports its metrics")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("size", [1, 8000, 16_384, 1_200_000])
@pytest.mark.one_case
def test_many_clients_each_get_their_own_answer_at_any_size(server: RunningServer, protocol: str, size: int) -> None:
    """Of some bytes, which go through the socket, on either side of the threshold, and of several MiB."""
    url = getattr(server, f"{protocol}_url")

    def ask(seed: int) -> None:
        a, b = np.random.default_rng(seed).standard_normal((2, 1, size + seed)).astype(np.float32)
        with ingot.Client(url) as client:
            for _ in range(3):
                np.testing.assert_array_equal(client.infer("pair", {"a": a, "b": b})["y"], a + b)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


@pytest.mark.matrix
def test_requests_of_many_shapes_do_not_get_mixed_up(server: RunningServer) -> None:
    """More shapes than either end of the connection remembers."""
    with ingot.Client(server.http_url) as client:
        for size in [*range(1, 1100), *range(1, 20)]:
            a = np.full((1, size), size, np.float32)
            assert client.infer("pair", {"a": a, "b": a})["y"].tolist() == [[2 * size] * size]


@pytest.mark.matrix
def test_any_front_returns_the_metrics_of_all_processes(server: RunningServer) -> None:
    metric = 'ingot_requests_total{code="ok",model="pair",protocol="http",version="1"}'
    before = counted(server, metric)
    one = np.ones((1, 1), np.float32)
    for _ in range(20):  # each on its own connection, which the kernel assigns to either front
        with ingot.Client(server.http_url) as client:
            client.infer("pair", {"a": one, "b": one})
    assert {counted(server, metric) for _ in range(8)} == {before + 20}


def test_a_killed_front_loses_only_its_connections_and_restarts(server: RunningServer) -> None:
    assert counted(server, "ingot_fronts") == 2
    fronts = fronts_of(os.getpid(), server.http_url)
    before = counted(server, "ingot_front_restarts_total")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    outcomes: dict[int, list[bool]] = {index: [] for index in range(8)}
    stop = threading.Event()

    def ask(index: int) -> None:
        with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
            while not stop.is_set():
                try:
                    answer = client.post("/v2/models/affine/infer", json=body)
                except httpx.TransportError:
                    outcomes[index].append(False)
                else:
                    outcomes[index].append(answer.json()["outputs"][0]["data"] == [3, 5, 7])

    threads = [threading.Thread(target=ask, args=(index,)) for index in outcomes]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(len(asked) > 5 for asked in outcomes.values()), "answers")
        os.kill(fronts[0], signal.SIGKILL)
        until(lambda: counted(server, "ingot_front_restarts_total") == before + 1, "the count")
        until(lambda: counted(server, "ingot_fronts") == 2, "a new front")
        assert fronts[0] not in fronts_of(os.getpid())
        counts = {index: len(asked) for index, asked in outcomes.items()}
        until(lambda: all(len(asked) > counts[index] + 5 for index, asked in outcomes.items()), "more answers")
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert all(all(asked[-5:]) for asked in outcomes.values())
    assert any(all(asked) for asked in outcomes.values())


def shared_maps() -> int:
    """Return the number of memory maps that this process shares with fronts."""
    return Path("/proc/self/maps").read_text().count("ingot-tensors")


@pytest.mark.matrix
def test_the_memory_that_was_shared_with_a_killed_front_is_given_back_at_once(server: RunningServer) -> None:
    large = np.ones((1, 300_000), np.float32)
    until(lambda: counted(server, "ingot_fronts") == 2, "both fronts")
    before = shared_maps()
    assert before > 0
    gc.disable()
    try:
        for _ in range(3):
            with ingot.Client(server.http_url) as client:
                client.infer("pair", {"a": large, "b": large})
            front = fronts_of(os.getpid(), server.http_url)[0]
            os.kill(front, signal.SIGKILL)
            until(lambda front=front: front not in fronts_of(os.getpid()), "its end")  # type: ignore[misc]
            until(lambda: counted(server, "ingot_fronts") == 2, "a new front")
        until(lambda: shared_maps() == before, "the memory's end")
    finally:
        gc.enable()


@pytest.mark.matrix
def test_a_front_that_hangs_is_killed_when_the_server_stops(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with ingot.serve(model, http_port=0, grpc_port=0, frontends=2, drain_timeout=0.1) as server:
        fronts = fronts_of(os.getpid(), server.http_url)
        assert len(fronts) == 2
        os.kill(fronts[0], signal.SIGSTOP)
    assert not any(alive(front) for front in fronts)


@pytest.mark.matrix
def test_requests_of_a_killed_front_are_skipped(server: RunningServer, held_by: Gate) -> None:
    """Its requests are cancelled, and the other front's are answered."""
    in_flight = 'ingot_in_flight_requests{model="held",version="1"}'
    x = np.ones((64, 1024), np.float32)
    results: list[Any] = []

    def ask() -> None:
        with ingot.Client(server.http_url) as client:
            try:
                results.append(client.infer("held", {"x": x})["y"].shape)
            except Unavailable as error:
                results.append(error)

    fronts = fronts_of(os.getpid(), server.http_url)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    with held_by.closed():
        for thread in threads:
            thread.start()
        until(lambda: counted(server, in_flight) == len(threads), "requests")
        os.kill(fronts[0], signal.SIGKILL)
        until(lambda: fronts[0] not in fronts_of(os.getpid()), "its end")
    for thread in threads:
        thread.join(120)
    until(lambda: counted(server, in_flight) == 0, "silence")
    until(lambda: counted(server, "ingot_fronts") == 2, "a new front")
    assert len(results) == 8
    assert all(isinstance(result, Unavailable) or result == (64, 1024) for result in results)
    with ingot.Client(server.http_url) as client:
        assert client.infer("held", {"x": x[:1]})["y"].shape == (1, 1024)


@pytest.mark.matrix
def test_a_timeout_counts_in_the_other_process_too(server: RunningServer, held_by: Gate) -> None:
    x = np.ones((1, 3), np.float32)
    for url in (server.http_url, server.grpc_url):
        with held_by.closed(), ingot.Client(url) as client, pytest.raises(DeadlineExceeded):
            client.infer("held", {"x": x}, parameters={"timeout": 300_000})


@pytest.mark.matrix
def test_a_client_that_hangs_up_is_skipped_in_the_other_process(server: RunningServer, held_by: Gate) -> None:
    x = np.ones((64, 1024), np.float32)
    body, length = http_codec.encode_request(InferRequest(Template("held"), {"x": x}), binary=True)
    head = f"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    port = int(server.http_url.rpartition(":")[2])
    cancelled = 'ingot_requests_total{code="cancelled",model="held",protocol="http",version="1"}'
    in_flight = 'ingot_in_flight_requests{model="held",version="1"}'
    before = counted(server, cancelled)
    with held_by.closed():
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(f"{head}{http_codec.HEADER_LENGTH}: {length}\r\n\r\n".encode() + body)
            until(lambda: counted(server, in_flight) == 1, "the request")
        until(lambda: counted(server, cancelled) == before + 1, "its cancellation")
    until(lambda: counted(server, in_flight) == 0, "silence")


@pytest.mark.matrix
def test_a_slow_reader_does_not_delay_others(server: RunningServer) -> None:
    """It requests megabytes and does not read them; other clients' answers arrive as usual."""
    one = np.ones((1, 1_000_000), np.float32)
    body, length = http_codec.encode_request(InferRequest(Template("pair"), {"a": one, "b": one}), binary=True)
    head = f"POST /v2/models/pair/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}{http_codec.HEADER_LENGTH}: {length}\r\n\r\n".encode() + body
    port = int(server.http_url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as first,
        socket.create_connection(("127.0.0.1", port), timeout=60) as second,
    ):
        for slow in (first, second):
            slow.sendall(request)
        for _ in range(20):
            with ingot.Client(server.http_url) as client:
                assert client.infer("pair", {"a": one[:, :2], "b": one[:, :2]})["y"].tolist() == [[2, 2]]
        for slow in (first, second):
            answer = slow.recv(1 << 20)
            assert answer.startswith(b"HTTP/1.1 200")
            size = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            left = size - len(answer.partition(b"\r\n\r\n")[2])
            while left > 0:
                left -= len(slow.recv(1 << 20))
            assert left == 0


@pytest.mark.matrix
def test_requests_in_flight_from_fronts_are_bounded(folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(gate.path, monkeypatch.setattr)
    in_flight = 'ingot_in_flight_requests{model="held",version="1"}'
    x = np.ones((64, 1024), np.float32)  # a quarter of a MiB
    answers: list[str] = []

    def ask(url: str) -> None:
        with ingot.Client(url) as client:
            try:
                answers.append(str(client.infer("held", {"x": x})["y"].shape))
            except Unavailable as error:
                answers.append(str(error))

    model = str(onnx_models.held(folder))
    with (
        ingot.serve(model, http_port=0, grpc_port=0, frontends=1, max_bodies_mb=1) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        with gate.closed():
            for _ in range(12):
                pool.submit(ask, server.grpc_url)
            # Four fit, or three where a message's own bytes count too.
            until(lambda: len(answers) + counted(server, in_flight) == 12, "the refusals")
            refused = list(answers)
        until(lambda: len(answers) == 12, "the answers")
    assert len(refused) in (8, 9)
    assert all("memory limit for request" in answer for answer in refused)
    assert answers[len(refused) :] == ["(64, 1024)"] * (12 - len(refused))


@pytest.mark.matrix
def test_the_recorder_sees_what_all_fronts_answer(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    x = np.arange(3, dtype=np.float32).reshape(1, 3)
    settings: dict[str, Any] = {"record": folder / "traffic", "record_share": 1.0, "frontends": 2}
    with ingot.serve(model, http_port=0, grpc_port=0, **settings) as server:
        for url in (server.http_url, server.grpc_url) * 3:
            with ingot.Client(url) as client:
                client.infer("affine", {"x": x})
    from ingot.model_store.format import goldens

    files = sorted((folder / "traffic" / "affine" / "1").iterdir())
    cases = [case for file in files for case in goldens.decode(file.read_bytes())]
    assert [case.inputs["x"].tolist() for case in cases] == [x.tolist()] * 6
    assert [case.outputs["y"].tolist() for case in cases] == [(2 * x + 1).tolist()] * 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.one_case
def test_requests_in_flight_finish_when_the_command_is_stopped(
    folder: Path, gate: Gate, number: signal.Signals
) -> None:
    model = str(onnx_models.held(folder))
    with running(model, "--frontends", "2", home=folder, gate=gate) as (process, addresses):
        with two_in_flight(addresses, gate) as answers:
            fronts = fronts_of(process.pid)
            for pid in (process.pid, *fronts):  # as systemd signals all of a service
                os.kill(pid, number)
        assert process.wait(60) == 0
    assert answers == [(64, 1024)] * 2
    assert not any(alive(pid) for pid in fronts)


@pytest.mark.matrix
def test_fronts_end_with_the_process_of_the_models(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with running(model, "--frontends", "2", home=folder) as (process, addresses):
        fronts = fronts_of(process.pid)
        assert len(fronts) == 2
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        until(lambda: not any(alive(pid) for pid in fronts), "their end")
        with ingot.Client(addresses["http"]) as client, pytest.raises(IngotError):
            client.ready()


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
@pytest.mark.matrix
def test_a_busy_port_is_named_with_the_remedy_before_any_front_starts(folder: Path, protocol: str) -> None:
    model = str(onnx_models.affine(folder))
    with ingot.serve(model, http_port=0, grpc_port=0, frontends=1) as first:
        url = first.http_url if protocol == "HTTP" else first.grpc_url
        ports: dict[str, Any] = {
            "http_port": 0,
            "grpc_port": 0,
            f"{protocol.lower()}_port": int(url.rpartition(":")[2]),
        }
        for frontends in (0, 1):
            with pytest.raises(InvalidArgument, match=f"for {protocol}: Address already in use"):
                ingot.serve(model, frontends=frontends, **ports)
        assert len(fronts_of(os.getpid(), first.http_url)) == 1
        with ingot.Client(first.http_url) as client:
            assert client.ready()


@pytest.mark.matrix
def test_a_model_that_does_not_load_ends_the_fronts_too(folder: Path) -> None:
    before = set(fronts_of(os.getpid()))
    broken = folder / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(IngotError, match="cannot load"):
        ingot.serve(str(broken), http_port=0, grpc_port=0, frontends=2)
    assert set(fronts_of(os.getpid())) <= before
