"""``ingot server top``: what it shows of a running server, and what it says where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from benchmarks.serving.processes import free_ports
from ingot import RunningServer
from ingot.model_store import Store
from tests import onnx_models
from tests.server.access.served import make_key
from tests.server.outside import wait_until
from tests.serving.rolling import load, times
from tests.support import ROOT, RunIngot, matrix, refused, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
TOP = [sys.executable, "-m", "ingot", "server", "top"]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    for version, factor in ((1, 1.0), (2, 1.0005)):
        store.push(times(factor), f"times:{version}")
    return store


def wrong_request(server: RunningServer) -> None:
    httpx.post(f"{server.http_url}/v2/models/times/infer", json={}, trust_env=False)


@pytest.mark.matrix
def test_it_shows_the_load_over_the_port_and_the_management_socket(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:1", store=store, **FREE) as server:
        wrong_request(server)
        with load([server.http_url, server.grpc_url], version="1"):
            found = json.loads(succeeded(run_ingot("server", "top", "--server", server.http_url, "--once", "--json")))
            shown = succeeded(run_ingot("server", "top", "--once"))
    assert (found["url"], found["version"]) == (server.http_url, ingot.__version__)
    assert found["started"] > 1e9
    assert found["connections"] >= 3
    [model] = found["models"]
    assert (model["name"], model["version"], model["state"], model["variant"]) == ("times", "1", "ready", "fp32")
    assert model["requests_per_s"] > 0
    assert model["rows_per_s"] > model["requests_per_s"]
    assert model["failed_per_s"] == 0
    assert 0 < model["p50"] <= model["p99"]
    assert model["mean_batch"] >= 1
    assert sum(model["shares"].values()) == pytest.approx(1)
    assert all(share > 0 for share in model["shares"].values())
    assert found["errors"] == [{"protocol": "http", "code": "invalid_argument", "count": 1, "recent": 0}]
    head, titles, row, *rest = shown.splitlines()
    assert f"Ingot {ingot.__version__}" in head
    assert titles.split() == [
        *["model", "state", "variant", "device", "req/s", "rows/s", "p50", "p99", "queue", "batch"],
        titles.split()[-1],
    ]
    assert row.startswith("times:1  ready  fp32     cpu")
    assert row.endswith("%")
    assert row.split()[4] != "0"
    assert "http: invalid argument 1" in rest


@pytest.mark.matrix
def test_it_shows_a_candidate_that_is_tried(store: Store, run_ingot: RunIngot) -> None:
    with ingot.serve("times:1", store=store, **FREE) as server, load([server.http_url], version="1"):
        succeeded(run_ingot("server", "shadow", "times", "times:2", "--compare", "50"))
        wait_until(lambda: server.status()[0]["canary"]["answers"]["compared"] > 0)
        shown = succeeded(run_ingot("server", "top", "--once", "--interval", "100ms"))
        assert "times:1  shadow: " in shown
        assert " 0 differed" in shown
        assert "worst error 0.0005" in shown
        succeeded(run_ingot("server", "canary", "times", "--weight", "50"))
        assert "times:1  canary 50 %: " in succeeded(run_ingot("server", "top", "--once", "--interval", "100ms"))


@pytest.mark.matrix
@pytest.mark.parametrize("by_url", matrix(False, True))
def test_it_follows_a_server_that_is_started_again(tmp_path: Path, by_url: bool) -> None:
    model = onnx_models.affine(tmp_path)
    (port,) = free_ports(1)
    log = tmp_path / "log"
    with ingot.serve(model, **{**FREE, "http_port": port}) as server, log.open("w") as out:
        command = [*TOP, *(["--server", server.http_url] if by_url else []), "--interval", "200ms"]
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        wait_until(lambda: log.read_text().count("\naffine:1  ready") > 1)
    wait_until(lambda: "\nTrying again every 0.2 s.\n" in log.read_text())
    before = log.read_text().count("\naffine:1  ready")
    again = port if by_url else 0
    with ingot.serve(model, **{**FREE, "http_port": again}):
        wait_until(lambda: log.read_text().count("\naffine:1  ready") > before)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert re.search("is it running|no server of this user runs", log.read_text())
    assert "Traceback" not in log.read_text()


@pytest.mark.matrix
def test_on_a_terminal_it_redraws_one_screen_until_ctrl_c(tmp_path: Path) -> None:
    with ingot.serve(onnx_models.affine(tmp_path), **FREE) as server:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = [*TOP, "--server", server.http_url, "--interval", "200ms"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        seen = b""
        while seen.count(b"affine:1") < 3:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        rest = read_all(ours)
        assert process.wait(60) == 0
        os.close(ours)
    assert b"\x1b[?1049h" in seen  # the alternate screen
    assert b"\x1b[?1049l" in rest
    assert b"Traceback" not in seen + rest
    text = seen.decode()
    assert "variant" not in text  # which 80 columns have no room for
    assert "compute" in text


def read_all(handle: int) -> bytes:
    """Read a terminal until its other end is closed."""
    parts = []
    try:
        while part := os.read(handle, 4096):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


@pytest.mark.matrix
def test_a_key_is_needed_where_the_server_asks_for_one(tmp_path: Path, run_ingot: RunIngot) -> None:
    keys = tmp_path / "keys.toml"
    key = tmp_path / "key"
    key.write_text(make_key(keys, "infer", "metrics"))
    with ingot.serve(onnx_models.affine(tmp_path), auth=keys, **FREE) as server:
        text = refused(run_ingot("server", "top", "--server", server.http_url, "--once"))
        assert "give a key with the rights infer and metrics, or manage on a management port, by --key-file" in text
        options = ("--once", "--interval", "100ms", "--key-file", key)
        assert "affine:1" in succeeded(run_ingot("server", "top", "--server", server.http_url, *options))


class Other(BaseHTTPRequestHandler):
    """A server of something else, which has other metrics."""

    def do_GET(self) -> None:
        body = b'{"version": "2"}' if self.path == "/v2" else b"process_open_fds 7.0\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    with (
        ingot.serve(onnx_models.affine(tmp_path_factory.mktemp("models")), management="off", **FREE) as server,
        HTTPServer(("127.0.0.1", 0), Other) as other,
    ):
        threading.Thread(target=other.serve_forever, daemon=True).start()
        known = {
            "HTTP": server.http_url,
            "GRPC": server.grpc_url,
            "GRPC_AS_HTTP": server.grpc_url.replace("grpc", "http"),
            "OTHER": f"http://127.0.0.1:{other.server_port}",
        }
        yield lambda name: known.get(name, name)
        other.shutdown()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--server", "GRPC", "--once"), "is a gRPC port; give the HTTP port"),
        (("--server", "GRPC_AS_HTTP", "--once"), "give the URL that ingot serve prints after HTTP"),
        (("--server", "OTHER", "--once"), "none of Ingot's metrics"),
        (("--server", "http://127.0.0.1:1", "--once"), "is it running?"),
        (("--server", "/absent.sock", "--once"), "no server answers at /absent.sock"),
        (("--server", "127.0.0.1:1", "--once"), "no server answers at http://127.0.0.1:1"),
        (
            ("--once",),
            "no server of this user runs with a management socket on this machine; name one: --server PLACE",
        ),
        (("--server", "HTTP", "--interval", "0s"), "--interval is '0s'; it must be from 100ms to 1h"),
        (("--server", "HTTP", "--interval", "soon"), "write it as 50ms"),
        (("--server", "HTTP", "--json"), "add --once"),
        (("--server", "HTTP", "--once", "--ca-file", "/absent.pem"), "/absent.pem cannot be used"),
    ],
)
def test_what_is_wrong_is_named(
    places: Callable[[str], str], run_ingot: RunIngot, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(run_ingot("server", "top", *map(places, arguments)))


class Broken(Other):
    """Claims to be Ingot, and sends something else."""

    metrics = models = ""

    def do_GET(self) -> None:
        known = {"/v2": '{"version": "1"}', "/metrics": f"ingot_threads 4\n{self.metrics}\n"}
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # a client that has had enough
            self.wfile.write(known.get(self.path, self.models or '{"model_stats": []}').encode())
            while "endless" in self.metrics and self.path == "/metrics":
                self.wfile.write(b"#" * (1 << 20))


@contextlib.contextmanager
def broken(**answers: str) -> Iterator[str]:
    """Yield the URL of such a server."""
    with HTTPServer(("127.0.0.1", 0), type("Handler", (Broken,), answers)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("metrics", "models"),
    [
        ("ingot_errors_total 4", ""),
        ('ingot_errors_total{name="a",now="b",protocol="c",code="d"} 4', ""),
        ("ingot_http_connections Inf", ""),
        ('ingot_gpu_memory_bytes{gpu="x"} 1', ""),
        ("ingot_canary_weight_percent 1", ""),
        ("", '{"model_stats": "abc"}'),
        ("", '{"model_stats": [{"name": ["a"], "version": {}, "ingot": []}]}'),
        ("", '{"model_stats": [{"name": "a", "version": "1", "ingot": {}, "inference_stats": {"queue": 1}}]}'),
        ("", "[" * 100_000),
    ],
)
def test_a_broken_server_is_named(run_ingot: RunIngot, metrics: str, models: str) -> None:
    with broken(metrics=metrics, models=models) as url:
        text = refused(run_ingot("server", "top", "--server", url, "--once", "--interval", "100ms"))
    assert f"what answers at {url} is not the HTTP port of an Ingot server" in text


@pytest.mark.matrix
def test_an_endless_answer_ends(run_ingot: RunIngot) -> None:
    with broken(metrics="# endless") as url:
        assert "has more than 64 MiB" in refused(
            run_ingot("server", "top", "--server", url, "--once", "--interval", "100ms")
        )


@pytest.mark.matrix
def test_names_of_a_server_do_not_control_the_terminal() -> None:
    name = "a\x1b]0;b\x07"
    described = {"state": name, "variant": "[/]", "device": name}
    stats = {"model_stats": [{"name": name, "version": name, "ingot": described}]}
    with broken(models=json.dumps(stats)) as url:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "24"}
        process = subprocess.Popen(
            [*TOP, "--server", url, "--interval", "100ms"], stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        seen = b""
        while seen.count(b"[/]") < 2 and process.poll() is None:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        seen += read_all(ours)
        assert process.wait(60) == 0
        os.close(ours)
    assert b"]0;b" in seen
    assert b"\x1b]0" not in seen
