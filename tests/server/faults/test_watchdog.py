"""Engine calls that never end, and an event loop that is blocked: others are answered, and the server stops."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.errors import DeadlineExceeded, IngotError
from ingot.runtime import load_engine, watchdog
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.loading import load_spec
from tests import onnx_models
from tests.runtime.fake_engines import FunctionEngine
from tests.server.outside import wait_until
from tests.support import ROOT

pytestmark = pytest.mark.one_case  # of each test; the others by `make test-matrix`

ENDLESS = {"n": np.array([2**62])}
THREE = {"n": np.array([3])}
ROW = {"x": np.ones((1, 3), np.float32)}
IN_FLIGHT = 'ingot_in_flight_requests{model="counting",version="1"} 1.0'
both = pytest.mark.parametrize("protocol", ["http", "grpc"])
source = pytest.mark.source  # replaces Dispatcher._runs_inline


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    """Serve ``counting``, which may never end, and ``affine``."""
    models = [str(onnx_models.counting(folder)), str(onnx_models.affine(folder))]
    settings = {"isolate": "none", **settings}  # the limits of the server's own process
    with ingot.serve(*models, http_port=0, grpc_port=0, device="cpu", **settings) as server:
        yield server


def client(server: RunningServer, protocol: str) -> ingot.Client:
    return ingot.Client(server.http_url if protocol == "http" else server.grpc_url)


class Asking(threading.Thread):
    """Sends one request that does not end by itself; ``error`` is what the client received."""

    def __init__(self, url: str, **options: Any):
        super().__init__(daemon=True)
        self.error: IngotError | None = None
        self._url = url
        self._options = options
        self.start()

    def run(self) -> None:
        with ingot.Client(self._url) as client:
            try:
                client.infer("counting", ENDLESS, **self._options)
            except IngotError as error:
                self.error = error

    def message(self) -> str:
        self.join(60)
        assert isinstance(self.error, DeadlineExceeded), self.error
        return str(self.error)


def metric(server: RunningServer, name: str) -> float:
    text = httpx.get(f"{server.http_url}/metrics", trust_env=False, timeout=30).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def in_flight(server: RunningServer, count: int) -> None:
    wait_until(lambda: metric(server, 'ingot_in_flight_requests{model="counting"') == count)


def calls_in(patch: pytest.MonkeyPatch, *, loop: bool) -> None:
    """Run all engine calls in the event loop, or none."""
    patch.setattr(Dispatcher, "_runs_inline", lambda self, seconds: loop)


@source
@both
def test_a_call_over_its_limit_is_ended_and_neighbours_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    calls_in(monkeypatch, loop=False)
    with serving(folder, engine_timeout=2) as server, client(server, protocol) as other:
        asking = Asking(server.http_url if protocol == "http" else server.grpc_url)
        while asking.is_alive():
            assert other.infer("affine", ROW)["y"].tolist() == [[3, 3, 3]]
        message = asking.message()
        assert "engine call of model 'counting' took longer than its limit of 2s" in message
        assert "see --engine-timeout" in message
        assert other.infer("counting", THREE)["y"].tolist() == [3]
        ended = 'ingot_engine_calls_ended_total{model="counting",reason="limit",version="1"}'
        assert metric(server, ended) == 1
    assert "model counting: ending an engine call over its limit" in caplog.text


@source
@pytest.mark.matrix
@both
def test_a_call_that_blocks_the_event_loop_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    calls_in(monkeypatch, loop=True)
    with serving(folder, engine_timeout=3) as server, client(server, protocol) as other:
        asking = Asking(server.http_url if protocol == "http" else server.grpc_url)
        assert "took longer than its limit of 3s" in asking.message()
        assert other.infer("affine", ROW)["y"].tolist() == [[3, 3, 3]]
        assert metric(server, "ingot_event_loop_blocked_seconds_total") > 0
        wait_until(lambda: "the event loop is no longer blocked" in caplog.text)
    assert "the event loop has been blocked for over 1s by an engine call of model 'counting'" in caplog.text


@pytest.mark.matrix
def test_a_blocked_event_loop_is_logged_with_its_stack_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def innermost() -> None:
        wait_until(lambda: "the event loop has been blocked" in caplog.text)

    def outermost() -> None:
        innermost()

    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0) as server:
        server.loop.call_soon_threadsafe(outermost)
        wait_until(lambda: "the event loop is no longer blocked" in caplog.text)
        assert metric(server, "ingot_event_loop_blocked_seconds_total") > 0
    assert re.search(r"by Python code: .*outermost \(.*innermost \(", caplog.text)


@source
@pytest.mark.matrix
@both
def test_a_call_whose_requests_are_past_their_deadline_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    calls_in(monkeypatch, loop=False)
    with serving(folder, engine_timeout=0) as server, client(server, protocol) as other:
        Asking(server.http_url if protocol == "http" else server.grpc_url, parameters={"timeout": 500_000}).message()
        assert other.infer("counting", THREE)["y"].tolist() == [3]
        assert metric(server, 'ingot_engine_calls_ended_total{model="counting",reason="abandoned"') == 1


@source
@pytest.mark.matrix
def test_a_call_whose_client_left_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls_in(monkeypatch, loop=False)
    body = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [2**62]}]}
    with serving(folder, engine_timeout=0, isolate="none") as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.http_url}/v2/models/counting/infer", json=body, timeout=1, trust_env=False)
        with client(server, "http") as other:
            assert other.infer("counting", THREE)["y"].tolist() == [3]


@source
@pytest.mark.matrix
def test_a_model_whose_call_cannot_be_ended_is_not_ready_until_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    gate.set()
    load = load_engine
    monkeypatch.setattr(
        load_spec, "load_engine", lambda spec, *how: engine if "counting" in spec.path.name else load(spec, *how)
    )
    monkeypatch.setattr(watchdog, "_GRACE", 0.1)
    calls_in(monkeypatch, loop=False)
    x = {"x": np.ones((1, 2), np.float32)}
    with serving(folder, engine_timeout=1) as server, client(server, "http") as other:
        gate.clear()
        failures: list[IngotError] = []

        def ask() -> None:
            with client(server, "grpc") as asking:
                try:
                    asking.infer("counting", x)
                except IngotError as error:
                    failures.append(error)

        asking = [threading.Thread(target=ask) for _ in range(3)]  # one runs, and the others are queued
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(60)
        assert len(failures) == 3
        assert all("counting" in str(failure) for failure in failures)
        assert engine.terminations
        ready = f"{server.http_url}/v2/models/counting/ready"
        assert httpx.get(ready, trust_env=False, timeout=10).status_code == 503
        with pytest.raises(IngotError, match="stuck: an engine call of model 'counting' does not end"):
            other.infer("counting", x)
        assert other.infer("affine", ROW)["y"].tolist() == [[3, 3, 3]]
        gate.set()
        wait_until(lambda: httpx.get(ready, trust_env=False, timeout=10).status_code == 200)
        assert other.infer("counting", x)["y"].tolist() == [[2, 2]]
    assert "the model is not ready until it ends" in caplog.text


@source
@pytest.mark.matrix
def test_closing_a_server_ends_a_call_that_never_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would use a core of the program until that ends."""
    calls_in(monkeypatch, loop=False)
    with serving(folder, engine_timeout=0, drain_timeout=0) as server:
        asking = Asking(server.http_url)
        in_flight(server, 1)
    asking.join(60)
    assert asking.error is not None
    wait_until(lambda: not any(thread.name.startswith("ingot-counting") for thread in threading.enumerate()))


BLOCKED = """
import sys, time, warnings
from ingot.runtime import watchdog
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.server.observation import records

records._MAX_WAITING = 4096
run = OrtEngine.run

warnings.simplefilter("always")

def endless(self, inputs):
    if "x" in inputs and inputs["x"].all():  # not in the self-test, whose inputs are zeros
        warnings.warn(4096 * "w")
    while inputs.get("n", [0])[0] > 3:
        time.sleep(0.01)
    return run(self, inputs)

OrtEngine.run = endless
where = sys.argv.pop(1)
Dispatcher._runs_inline = lambda self, seconds: where == "loop"
watchdog._GRACE = 0.5
from ingot.__main__ import main
main()
"""


@contextlib.contextmanager
def command(folder: Path, where: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``ingot serve`` with a model whose calls with large numbers never end; yield the process and its URL."""
    models = [str(onnx_models.counting(folder)), str(onnx_models.affine(folder))]
    arguments = [sys.executable, "-c", BLOCKED, where, "serve", *models, *options]
    with subprocess.Popen(
        [*arguments, "--http-port", "0", "--grpc-port", "0", "--device", "cpu", "--isolate", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "INGOT_HOME": str(folder), "PYTHONUNBUFFERED": "1"},
    ) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            with ingot.Client(url) as client:
                wait_until(lambda: _ready(client))
            yield process, url
        finally:
            late.cancel()
            process.kill()


def _ready(client: ingot.Client) -> bool:
    with contextlib.suppress(IngotError):
        return client.ready()
    return False


@source
@pytest.mark.matrix
def test_the_process_ends_if_the_event_loop_stays_blocked(folder: Path) -> None:
    with command(folder, "loop", "--engine-timeout", "1s") as (process, url):
        Asking(url)
        assert process.wait(60) == watchdog.EXIT_CODE
        assert process.stderr is not None
        assert "and it blocks the event loop: no request can be answered" in process.stderr.read()


@source
@pytest.mark.parametrize("where", ["loop", "thread"])
@pytest.mark.matrix
def test_a_second_signal_ends_the_server(folder: Path, where: str) -> None:
    with command(folder, where, "--engine-timeout", "0") as (process, url):
        Asking(url)
        wait_until(lambda: _blocked(url) if where == "loop" else IN_FLIGHT in _metrics(url))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


@source
@pytest.mark.matrix
def test_a_reader_of_the_log_that_stops_stops_no_request(folder: Path) -> None:
    with command(folder, "thread", "--access-log", "all") as (process, url):
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            for _ in range(100):
                assert client.get("/v2/models/affine").status_code == 200
        with ingot.Client(url) as asking:
            assert asking.infer("affine", ROW)["y"].tolist() == [[3, 3, 3]]
        lost = re.search(r"^ingot_log_records_lost_total (\S+)$", _metrics(url), re.MULTILINE)
        assert lost is not None
        assert float(lost[1]) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "GET /v2/models/affine 200" in process.stderr.read()


def _blocked(url: str) -> bool:
    with contextlib.suppress(httpx.TimeoutException):
        return httpx.get(f"{url}/v2/health/live", trust_env=False, timeout=1).status_code == 503
    return True


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text


@source
@pytest.mark.matrix
def test_one_signal_ends_the_server_after_the_time_for_draining(folder: Path) -> None:
    with command(folder, "thread", "--engine-timeout", "0", "--drain-timeout", "500ms") as (process, url):
        asking = Asking(url)
        wait_until(lambda: IN_FLIGHT in _metrics(url))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        asking.join(60)
        assert "the server is stopping" in str(asking.error)


@source
@pytest.mark.matrix
def test_a_program_with_a_blocked_server_ends_by_ctrl_c(folder: Path) -> None:
    """The program's main thread waits for the server, whose event loop is in another thread."""
    program = f"""
import threading
import numpy as np
import ingot
from ingot.runtime.dispatch.dispatcher import Dispatcher

Dispatcher._runs_inline = lambda self, seconds: True
settings = {{"engine_timeout": 0, "isolate": "none"}}
with ingot.serve({str(onnx_models.counting(folder))!r}, http_port=0, grpc_port=0, **settings) as server:
    with ingot.Client(server.http_url) as client:
        ask = threading.Thread(target=client.infer, args=("counting", {{"n": np.array([2**62])}}), daemon=True)
        ask.start()
        print("asked", flush=True)
        ask.join()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            ended = False
            while not ended:  # the first one begins to close the server, and the second one ends the wait for it
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended = process.wait(0.5) is not None
            assert process.returncode != -signal.SIGKILL
        finally:
            late.cancel()
            process.kill()
