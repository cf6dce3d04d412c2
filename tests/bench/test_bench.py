"""``ingot bench`` as a user runs it, against Ingot's servers and a server of another kind."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.bench.grpc import GrpcConnection, Place, frame
from ingot.bench.http1 import HttpConnection
from ingot.bench.measurement import Bench, Objective, Point, Rule, _chosen
from ingot.bench.payload import payload
from ingot.bench.plan import Plan
from ingot.bench.processes import Window
from ingot.bench.results import warnings
from ingot.bench.target import Target
from ingot.errors import InvalidArgument
from ingot.protocol.open_inference_pb2 import ModelInferResponse, ModelStreamInferResponse
from tests import onnx_models
from tests.server.test_tls import make
from tests.support import RunIngot, matrix, refused, succeeded

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
SHORT = ("--seconds", "1", "--warmup", "0", "--json")


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = onnx_models.affine(tmp_path_factory.mktemp("model"))
    with ingot.serve(model, http_port=0, grpc_port=0, grpc_server=request.param) as running:
        yield running


def answered(url: str) -> int:
    """Return how many requests the server has answered."""
    with ingot.Client(url) as client:
        return int(client.statistics("affine")[0]["inference_stats"]["success"]["count"])


def points(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["points"]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("protocol", ["binary", "json", "grpc", "grpc-stream"])
def test_all_that_is_reported_was_answered(run_ingot: RunIngot, server: RunningServer, protocol: str) -> None:
    url = server.grpc_url if protocol.startswith("grpc") else server.http_url
    before = answered(url)
    found = points(succeeded(run_ingot("bench", url, "affine", "-c", "3", "--protocol", protocol, *SHORT)))[0]
    assert found["failed"] == 0
    # One request is sent before the load, and some are in flight at its end.
    assert 0 < found["requests"] <= answered(url) - before - 1
    assert found["server_batch"] >= 1
    assert 0 < found["p50"] <= found["p99"] <= found["max"]
    assert found["server_compute_infer"] < found["mean"]


@pytest.mark.matrix
@pytest.mark.parametrize("protocol", matrix("grpc", "binary"))
def test_each_recorded_request_is_sent_once(
    run_ingot: RunIngot, server: RunningServer, tmp_path: Path, protocol: str
) -> None:
    times = tmp_path / "times.csv"
    times.write_text("# seconds, bytes\n" + "".join(f"{number / 100},7\n" for number in range(50)))
    url = server.grpc_url if protocol == "grpc" else server.http_url
    before = answered(url)
    found = points(succeeded(run_ingot("bench", url, "affine", "--times", times, "--processes", "2", "--json")))[0]
    assert found["requests"] == 50
    assert answered(url) == before + 51


@pytest.mark.matrix
@pytest.mark.parametrize("protocol", matrix("grpc-stream", "grpc", "binary"))
def test_failed_requests_are_counted_by_reason(
    run_ingot: RunIngot, server: RunningServer, tmp_path: Path, protocol: str
) -> None:
    good = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    bad = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1, 3], "data": [1, 2, 3]}]}
    data = tmp_path / "requests.json"
    data.write_text(json.dumps([good, bad]))
    url = server.grpc_url if protocol.startswith("grpc") else server.http_url
    options = ("-c", "2", "--protocol", protocol, "--data", data, *SHORT)
    result = run_ingot("bench", url, "affine", *options)
    found = points(succeeded(result))[0]
    assert abs(found["failed"] - found["requests"]) <= 2
    assert "'x'" in next(iter(found["errors"]))
    assert f"{found['failed']:,} requests failed: " in result.stderr


@pytest.mark.matrix
def test_a_table_a_page_and_rows_are_written(run_ingot: RunIngot, server: RunningServer, tmp_path: Path) -> None:
    page, rows = tmp_path / "load.html", tmp_path / "load.csv"
    options = ("-c", "1,2", "--batch", "4", "--seconds", "1", "--warmup", "0", "--report", page, "--csv", rows)
    text = succeeded(run_ingot("bench", server.http_url, "affine", *options))
    assert "1 client " in text
    assert "2 clients" in text
    assert "samples/s" in text
    read = list(csv.DictReader(rows.read_text().splitlines()))
    assert [row["clients"] for row in read] == ["1", "2"]
    assert float(read[0]["samples_rate"]) == pytest.approx(4 * float(read[0]["rate"]))
    assert page.read_text().count("<svg") >= 3


class Peer(BaseHTTPRequestHandler):
    """A server with TorchServe's API that answers in chunks, and closes each third connection."""

    protocol_version = "HTTP/1.1"
    paths: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.paths[self.path] += 1
        self.send_response(200)
        if self.paths[self.path] % 3 == 0:
            self.send_header("Connection", "close")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in (b"3\r\nabc\r\n", b"1;x=y\r\nd\r\n", b"0\r\n\r\n"):
            self.wfile.write(chunk)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Peers(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Print nothing of clients that leave: the command shares this process's stderr."""


@pytest.mark.matrix
def test_torchserve_and_responses_in_chunks(run_ingot: RunIngot, tmp_path: Path) -> None:
    body = tmp_path / "digit.bin"
    body.write_bytes(b"pixels")
    with Peers(("127.0.0.1", 0), Peer) as peer:
        threading.Thread(target=peer.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{peer.server_port}"
        options = ("--protocol", "torchserve", "--data", body, "-c", "2", *SHORT)
        found = points(succeeded(run_ingot("bench", url, "digits", *options)))[0]
        peer.shutdown()
    assert found["failed"] == 0
    assert 3 < found["requests"] < Peer.paths["/predictions/digits"]


class Flood(Peer):
    """Answers with something that has no end."""

    flood = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        begin, _, rest = self.flood.partition(b"|")
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + begin)
            while rest:
                self.wfile.write(rest * (1 << 12))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("flood", "expected"),
    [
        (b"x: |aaaaaaaa", "without the end of a head or line"),
        (b"Transfer-Encoding: chunked\r\n\r\n|88888888", "without the end of a head or line"),
        (b"Transfer-Encoding: chunked\r\n\r\n-5\r\n|", "negative size"),
        (b"Transfer-Encoding: chunked\r\n\r\n|5\r\nabcde\r\n", ""),
        (b"Transfer-Encoding: chunked\r\n\r\n0\r\n|a: b\r\n", ""),
        (b"Content-Length: -5\r\n\r\n|", "length is not a number"),
        (b"Content-Length: 99999999999999\r\n\r\n|aaaaaaaa", ""),
    ],
)
def test_an_endless_response_is_not_kept(flood: bytes, expected: str) -> None:
    """What the generator keeps of a response stays small; the timeout of requests ends a well-formed one."""
    answers: list[str] = []
    with Peers(("127.0.0.1", 0), type("Handler", (Flood,), {"flood": flood})) as peer:
        threading.Thread(target=peer.serve_forever, daemon=True).start()
        plan = Plan(host="127.0.0.1", port=peer.server_port, tls=None, wire="http", requests=(REQUEST,), clients=1)
        connection = HttpConnection(plan, None, lambda _, error: answers.append(error))
        connection.begin(REQUEST)
        try:
            for _ in range(20):
                connection.readable()
                assert len(connection._buffer) + len(connection._content) < 1 << 20
        except ValueError as error:
            answers.append(str(error))
        connection.socket.close()
        peer.shutdown()
    assert answers == [] if not expected else expected in answers[0]


def send(listener: socket.socket, content: bytes) -> None:
    """Send bytes to the first client, and wait until it leaves."""
    with contextlib.suppress(OSError), listener.accept()[0] as accepted:
        accepted.sendall(content)
        while accepted.recv(1 << 16):
            pass


def read_all(plan: Plan) -> None:
    connection = GrpcConnection(plan, None, lambda *_: None, 1)
    connection.send(connection.places[0], b"x")
    try:
        while True:
            connection.readable()
    finally:
        connection.socket.close()


def test_malformed_frames_are_a_lost_connection() -> None:
    """None of them ends the process of the generator; few bytes are kept."""
    begin = frame(4, 0, 0)
    junk = [
        frame(1, 4 | 1, 1, b"\xff\xff\xff"),  # no header block
        frame(1, 4 | 8 | 1, 1),  # padded, and empty
        frame(4, 0, 0, b"abc"),
        frame(0, 0, 1, bytes(16385)),
        frame(1, 0, 1) + frame(9, 0, 1, bytes(16384)) * 5,
    ]
    for content in junk:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            plan = Plan(host=host, port=port, tls=None, wire="grpc", requests=(b"x",), clients=1, header=b"")
            threading.Thread(target=send, args=(listener, begin + content), daemon=True).start()
            with pytest.raises(ValueError, match="the server sent"):
                read_all(plan)


def test_responses_of_a_stream_are_counted_however_they_are_cut() -> None:
    message = ModelStreamInferResponse(infer_response=ModelInferResponse(raw_output_contents=[bytes(300)]))
    failed = ModelStreamInferResponse(error_message="none left")
    content = b"".join(
        b"\0" + len(raw).to_bytes(4, "big") + raw
        for raw in (each.SerializeToString() for each in (message, failed, ModelStreamInferResponse(), message))
    )
    for cut in (1, 2, 5, 6, 7, 100, 1000):
        answers: list[str] = []
        connection: Any = SimpleNamespace(_answered=lambda _, error: answers.append(error))  # noqa: B023
        place = Place(connection)
        for start in range(0, len(content), cut):
            GrpcConnection._messages(connection, place, content[start : start + cut])
            assert len(place.arrived) < 100
        assert answers == ["", "none left", "", ""]
    for wrong in (b"\0\0\0\0\3\x0a\xff\xff", b"\0\x7f\xff\xff\xff\x0aabc"):
        with pytest.raises(ValueError, match="the server sent"):
            GrpcConnection._messages(connection, Place(connection), wrong)


def test_a_server_that_does_not_know_its_inputs(tmp_path: Path) -> None:
    """As MLServer does not, of plain Python models."""
    data = tmp_path / "x.npz"
    np.savez(data, x=np.zeros((4, 3), np.float32))
    assert payload({"name": "m", "inputs": []}, data, {}, batch=2, seed=1).samples == 2
    with pytest.raises(InvalidArgument, match="does not describe the inputs of 'm': give requests with --data FILE"):
        payload({"name": "m", "inputs": []}, None, {}, batch=1, seed=1)


@pytest.mark.matrix
def test_a_server_with_tls(run_ingot: RunIngot, tmp_path: Path) -> None:
    cert, key = make(tmp_path)
    with ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0, tls_cert=cert, tls_key=key) as running:
        for url in (running.http_url, running.grpc_url):
            assert points(succeeded(run_ingot("bench", url, "affine", "-c", "2", "--ca-file", cert, *SHORT)))
        assert "--ca-file" in refused(run_ingot("bench", running.http_url, "affine", "-c", "2", *SHORT))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-c", "0"), "--clients '0' is not a list of counts; write it as 1,8,32"),
        (("-c", "1", "--rate", "5"), "--clients, --rate, --times and --slo exclude each other"),
        (("--slo", "50ms"), "'50ms' is not an objective; write it as p99=50ms"),
        (("--slo", "p99=50"), "'p99=50' has no unit; write it as p99=50ms or p99=50s"),
        (("--protocol", "grpc"), "write grpc://HOST:PORT, with the gRPC port"),
        (("--shape", "y:1,3"), "--shape names 'y'; the model's inputs are x"),
        (("--shape", "x:1,4"), "the server answered 400"),
        (("--protocol", "torchserve"), "give the body with --data FILE"),
        (("--data", "none.npz"), "there is no file none.npz"),
    ],
)
def test_wrong_options_are_refused(
    run_ingot: RunIngot, server: RunningServer, options: tuple[str, ...], says: str
) -> None:
    assert says in refused(run_ingot("bench", server.http_url, "affine", *options))


@pytest.mark.matrix
def test_ctrl_c_keeps_what_was_measured(server: RunningServer) -> None:
    command = [sys.executable, "-m", "ingot", "bench", server.http_url, "affine", "-c", "1,2,4", "--seconds", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2 clients:"):
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 client" in output
    assert "interrupted" in errors


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["fast", "grpcio"])
@pytest.mark.parametrize("protocol", ["binary", "grpc", "grpc-stream"])
def test_messages_larger_than_all_windows(tmp_path: Path, kind: Literal["fast", "grpcio"], protocol: str) -> None:
    model = onnx_models.unbatched(tmp_path)
    with ingot.serve(model, http_port=0, grpc_port=0, grpc_server=kind, max_body_mb=64) as running:
        url = running.grpc_url if protocol.startswith("grpc") else running.http_url
        with Target(url, model.stem, protocol=protocol) as target:  # type: ignore[arg-type]
            payload = target.payload(None, {"x": (3_000_000,)}, batch=1, seed=1)
            bench = Bench(target, target.plan(payload), 1, Rule(window=5.0, warmup=0, windows=1))
            # How many are answered in a window depends on the machine: on a busy one, now and then none.
            windows = [bench.closed(3).total]
            while not len(windows[-1].latencies) and len(windows) < 20:
                windows.append(bench.closed(3).total)
    assert not any(window.errors for window in windows)
    assert len(windows[-1].latencies) > 0


@pytest.mark.matrix
def test_the_highest_rate_that_holds_an_objective(server: RunningServer) -> None:
    with Target(server.http_url, "affine") as target:
        payload = target.payload(None, {}, batch=1, seed=1)
        bench = Bench(target, target.plan(payload), 1, Rule(window=0.1, warmup=0, windows=2))
        assert all(held for _, held in bench.search(Objective(quantile=0.5, seconds=60.0)))


@pytest.mark.matrix
def test_an_objective_that_no_rate_holds(server: RunningServer) -> None:
    with Target(server.http_url, "affine") as target:
        payload = target.payload(None, {}, batch=1, seed=1)
        bench = Bench(target, target.plan(payload), 1, Rule(window=0.1, warmup=0, windows=2))
        assert not any(held for _, held in bench.search(Objective(quantile=0.99, seconds=1e-9)))


@pytest.mark.matrix
def test_requests_of_a_low_rate_are_sent_when_they_are_due(server: RunningServer) -> None:
    with Target(server.http_url, "affine") as target:
        payload = target.payload(None, {}, batch=1, seed=1)
        plan = replace(target.plan(payload), arrivals="fixed")
        total = Bench(target, plan, 1, Rule(window=1.0, warmup=0, windows=1)).opened(10.0).total
    assert float(np.median(total.delays)) < 0.25 * 0.1  # of the time between two


def test_a_rate_of_less_than_one_is_shown_and_not_stable_without_requests(
    run_ingot: RunIngot, server: RunningServer
) -> None:
    late = run_ingot("bench", server.http_url, "affine", "--rate", "0.01", *SHORT[:-1])
    assert "0.01/s: 0 requests/s\n" in late.stderr
    assert "nan" not in late.stderr
    assert late.returncode == 1
    assert "error: no request was answered; measure longer, with --seconds, or give a higher --rate" in late.stderr
    windows = [point([]).total, point([]).total, point([0.1]).total]
    assert _chosen(windows, Rule(tolerance=10)) == (windows, False)
    assert _chosen([point([], failed=1).total] * 3, Rule())[1] is True


def point(latencies: list[float], failed: int = 0, overdue: int = 0) -> Point:
    times = np.array(latencies)
    errors = Counter({"HTTP 503": failed}) if failed else Counter[str]()
    total = Window(seconds=1.0, latencies=times, delays=times * 0, errors=errors, overdue=overdue)
    return Point(clients=1, offered=0.0, total=total, windows=1, stable=None, samples=1, server=None, done=True)


def test_an_objective_counts_what_was_not_answered() -> None:
    objective = Objective.parse("p90=50ms")
    fast = [0.01] * 95
    assert objective.met(point(fast))
    assert objective.met(point(fast, failed=10))
    assert not objective.met(point(fast, failed=11))
    assert not objective.met(point(fast, overdue=11))
    assert not objective.met(point([], failed=1))
    assert math.isnan(point([]).quantile(0.5))
    assert point([0.3, 0.1, 0.2]).quantile(0.5) == 0.2
    for text in ("p99", "99=1ms", "p100=1ms", "p99=0ms", "p99=fast"):
        with pytest.raises(InvalidArgument, match="write it as p99=50ms"):
            Objective.parse(text)
    for text in ("p99=50", "p99=0.05", "p99=5."):
        with pytest.raises(InvalidArgument, match=f"'{text}' has no unit; write it as {text}ms or {text}s"):
            Objective.parse(text)


def test_a_note_counts_the_requests_that_waited_for_a_connection() -> None:
    measured = point([0.01] * 2)
    queued = replace(measured, total=replace(measured.total, waited=1500))
    assert "1,500 requests waited for a connection" in warnings(queued, processes=1)[0]
    assert not warnings(measured, processes=1)
