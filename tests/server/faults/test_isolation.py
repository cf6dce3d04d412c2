"""Requests that end or block the process that runs them: neighbours are answered, and the server stops on SIGTERM."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument, TooLarge, Unavailable
from ingot.tensors import Array
from tests import onnx_models
from tests.server.outside import Service, affine_of, row, serving, wait_until

pytestmark = pytest.mark.one_case  # of each test; the others by `make test-matrix`

LEAST = np.iinfo(np.int64).min
HARMLESS = {"x": np.array([[6, 1]]), "d": np.array([[3, 1]])}


def deadly(number: int = 1) -> dict[str, Array]:
    """Return inputs that end the process of ``quotient``, different ones for each number."""
    return {"x": np.array([[LEAST, number]]), "d": np.array([[-1, 1]])}


ENDLESS = {"n": np.array([2**62])}
PROTOCOLS = ("http", "grpc")


@contextlib.contextmanager
def started(folder: Path, *options: str) -> Iterator[Service]:
    """Serve models that may end or block their process, next to a harmless one."""
    made = [str(make(folder)) for make in (onnx_models.quotient, onnx_models.counting, onnx_models.affine)]
    with serving("fast", folder, *options, sources=made) as service:
        yield service


def client(service: Service, protocol: str) -> ingot.Client:
    return ingot.Client(f"{protocol}://{service.http if protocol == 'http' else service.grpc}")


def engines_of(service: Service) -> list[int]:
    """Return the engine processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == service.process.pid and b"isolation.child" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def private_mib(pid: int) -> int:
    """Return the private memory of a process in MiB, of which --engine-memory-mb is the most."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE") >> 20


class Neighbour(threading.Thread):
    """Sends requests to ``affine`` throughout; each answer must arrive and be right."""

    def __init__(self, service: Service, protocol: str):
        super().__init__(daemon=True)
        self.answered = 0
        self.failure: str | None = None
        self._client = client(service, protocol)
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._stopped.wait(0.002):
                values = row(self.answered % 1000)
                (y,) = self._client.infer("affine", {"x": np.array([values], np.float32)})["y"].tolist()
                assert y == affine_of(values)
                self.answered += 1
        except (IngotError, AssertionError) as error:
            self.failure = f"after {self.answered} answers: {error!r}"

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)
        self._client.close()
        assert not self.is_alive(), "a neighbour waits for an answer"
        assert self.failure is None, self.failure


@contextlib.contextmanager
def neighbours(service: Service) -> Iterator[None]:
    running = [Neighbour(service, protocol) for protocol in PROTOCOLS]
    yield
    before = [neighbour.answered for neighbour in running]
    wait_until(lambda: all(now.answered > count for now, count in zip(running, before, strict=True)))
    for neighbour in running:
        neighbour.stop()


def stops(service: Service) -> None:
    """Check that SIGTERM ends the server and its processes."""
    children = engines_of(service)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(30) == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.matrix
def test_a_request_that_ends_its_process_gets_a_clear_error(tmp_path: Path) -> None:
    with started(tmp_path) as service, neighbours(service):
        for number, protocol in enumerate(PROTOCOLS):
            with client(service, protocol) as asking:
                wait_until(lambda: not isinstance(_outcome(asking, "quotient", HARMLESS), Unavailable))
                with pytest.raises(Unavailable, match="of model 'quotient' ended by SIGFPE; the request may have"):
                    asking.infer("quotient", deadly(number))
        with client(service, "http") as asking:
            wait_until(lambda: not isinstance(_outcome(asking, "quotient", HARMLESS), Unavailable))
            assert asking.infer("quotient", HARMLESS)["y"].tolist() == [[2, 1]]
            inputs = [
                {"name": name, "datatype": "INT64", "shape": [1, 2], "data": array.tolist()}
                for name, array in deadly(3).items()
            ]
            url = f"http://{service.http}/v2/models/quotient/infer"
            answer = httpx.post(url, json={"inputs": inputs}, trust_env=False, timeout=60)
            assert (answer.status_code, "retry-after" in answer.headers) == (503, False), answer.text
            wait_until(lambda: not isinstance(_outcome(asking, "quotient", HARMLESS), Unavailable))
        assert service.count("ingot_engine_restarts_total", model="quotient", reason="SIGFPE") == 3
        assert "the engine process of model 'quotient' ended by SIGFPE; it is started again" in service.log.read_text()


@pytest.mark.matrix
def test_an_empty_input_that_ends_the_process_of_its_kernel(tmp_path: Path) -> None:
    """ONNX Runtime aborts in Unique, whose graph was believed to be bounded."""
    models = [str(onnx_models.distinct(tmp_path)), str(onnx_models.affine(tmp_path))]
    with serving("fast", tmp_path, sources=models) as service, neighbours(service), client(service, "http") as asking:
        rows = np.array([[1, 2], [1, 2]], np.float32)
        assert asking.infer("distinct", {"x": rows})["y"].tolist() == [[1, 2]]
        with pytest.raises(Unavailable, match="of model 'distinct' ended by SIGABRT"):
            asking.infer("distinct", {"x": np.zeros((3, 0), np.float32)})


@pytest.mark.matrix
def test_a_request_that_ends_processes_is_refused_when_it_comes_again(tmp_path: Path) -> None:
    with started(tmp_path) as service, client(service, "grpc") as asking:
        for _ in range(2):
            wait_until(lambda: service.count("ingot_model_ready", model="quotient") == 1)
            with pytest.raises(Unavailable, match="the request may have caused it"):
                asking.infer("quotient", deadly())
        wait_until(lambda: service.count("ingot_model_ready", model="quotient") == 1)
        for _ in range(3):
            with pytest.raises(InvalidArgument, match="ended the model's engine process 2 times; they are refused"):
                asking.infer("quotient", deadly())
            assert asking.infer("quotient", HARMLESS)["y"].tolist() == [[2, 1]]
        assert service.count("ingot_engine_restarts_total") == 2
        stops(service)


@pytest.mark.matrix
def test_the_model_alone_is_not_ready_until_its_process_runs_again(tmp_path: Path) -> None:
    with started(tmp_path) as service, client(service, "http") as asking:
        for number in range(5):
            wait_until(lambda: service.count("ingot_model_ready", model="quotient") == 1)
            with pytest.raises(Unavailable, match="the request may have caused it"):
                asking.infer("quotient", deadly(number))
        wait_until(lambda: "started every 10 s" in service.log.read_text())
        with httpx.Client(base_url=f"http://{service.http}", trust_env=False, timeout=20) as http:
            assert http.get("/v2/models/quotient/ready").status_code == 503
            assert http.get("/v2/models/affine/ready").status_code == 200
            assert http.get("/v2/health/ready").status_code == 200
        with pytest.raises(Unavailable, match="'quotient' version 1 is failed: its engine process ended by SIGFPE"):
            asking.infer("quotient", HARMLESS)
        stops(service)


@pytest.mark.matrix
def test_a_call_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with started(tmp_path, "--engine-timeout", "1s") as service:
        for protocol in PROTOCOLS:
            with client(service, protocol) as asking:
                error = "'counting' took longer than its limit of 1s"
                with neighbours(service), pytest.raises(DeadlineExceeded, match=error):
                    asking.infer("counting", ENDLESS)
                assert asking.infer("counting", {"n": np.array([3])})["y"].tolist() == [3]
        stops(service)


@pytest.mark.matrix
def test_a_model_stays_ready_while_one_of_its_processes_runs(tmp_path: Path) -> None:
    model = str(onnx_models.quotient(tmp_path))
    with serving("fast", tmp_path, "--instances", "2", sources=[model]) as service, client(service, "grpc") as asking:
        first, _ = engines_of(service)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: service.count("ingot_engine_restarts_total") == 1)
        assert service.count("ingot_model_ready", model="quotient") == 1
        for _ in range(20):
            assert asking.infer("quotient", HARMLESS)["y"].tolist() == [[2, 1]]
        assert service.count("ingot_requests_total", code="ok") == 20
        stops(service)


@pytest.mark.matrix
def test_a_stopped_process_is_replaced(tmp_path: Path) -> None:
    with started(tmp_path, "--engine-timeout", "1s") as service, client(service, "http") as asking:
        for pid in engines_of(service):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="took longer than its limit of 1s"):
            asking.infer("counting", {"n": np.array([3])})
        wait_until(lambda: not isinstance(_outcome(asking, "counting", {"n": np.array([3])}), IngotError))
        assert service.count("ingot_engine_restarts_total", model="counting", reason="killed") == 1
        stops(service)


def test_a_request_that_needs_too_much_memory_fails_alone(tmp_path: Path) -> None:
    model = str(onnx_models.filled(tmp_path))
    with serving("fast", tmp_path, "--engine-memory-mb", "512", sources=[model]) as service:
        before = engines_of(service)
        for protocol in PROTOCOLS:
            with client(service, protocol) as asking:
                with pytest.raises(TooLarge, match=r"its engine process may have, 512 MiB \(--engine-memory-mb\)"):
                    asking.infer("filled", {"n": np.array([10**9])})
                assert asking.infer("filled", {"n": np.array([2])})["y"].tolist() == [1, 1]
                # Nor does the small tensor get all the memory that the large one has left.
                assert private_mib(before[0]) < 400
        assert engines_of(service) == before


@pytest.mark.matrix
def test_the_server_stops_while_a_call_does_not_end(tmp_path: Path) -> None:
    with started(tmp_path, "--drain-timeout", "0s") as service:
        failed: list[Any] = []

        def ask() -> None:
            with client(service, "http") as asking:
                failed.append(_outcome(asking, "counting", ENDLESS))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: service.count("ingot_in_flight_requests", model="counting") == 1)
        stops(service)
        thread.join(30)
        assert isinstance(failed[0], IngotError)


@pytest.mark.matrix
def test_each_request_gets_one_answer_or_one_error_while_processes_are_killed(tmp_path: Path) -> None:
    with started(tmp_path) as service:
        stop = threading.Event()
        outcomes: list[Any] = []

        def ask(protocol: str, base: int) -> None:
            with client(service, protocol) as asking:
                number = base
                while not stop.is_set():
                    number += 1
                    x = np.array([[number, 1]])
                    found = _outcome(asking, "quotient", {"x": x, "d": np.array([[1, 1]])})
                    if not isinstance(found, IngotError):
                        assert found["y"].tolist() == x.tolist()
                    outcomes.append(found)

        threads = [threading.Thread(target=ask, args=(PROTOCOLS[n % 2], n << 20)) for n in range(6)]
        for thread in threads:
            thread.start()
        for round_ in range(1, 4):
            reached = len(outcomes) + 100
            wait_until(lambda: len(outcomes) > reached)  # noqa: B023 - it is called in this round
            for pid in engines_of(service):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed = "ingot_engine_restarts_total"
            wait_until(lambda: service.count(killed, model="quotient", reason="SIGKILL") == round_)  # noqa: B023
            wait_until(lambda: service.count("ingot_model_ready", model="quotient") == 1)
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a request was not answered"
        errors = [str(found) for found in outcomes if isinstance(found, IngotError)]
        known = r"the engine process of model 'quotient' ended by SIGKILL|model 'quotient' version 1 is restarting: its"
        assert [error for error in errors if not re.search(known, error)] == []
        stops(service)


def _outcome(asking: ingot.Client, model: str, inputs: Any) -> Any:
    try:
        return asking.infer(model, inputs)
    except IngotError as error:
        return error
