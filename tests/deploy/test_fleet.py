"""`ingot fleet`: a version for all replicas, some at a time, which stops and goes back if one fails or drifts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot.errors import IngotError
from ingot.model_store import Archive, Reference, Store
from ingot.model_store.registry import Registry
from ingot.server.main import RunningServer
from tests.server.outside import wait_until
from tests.server.rolling import X, archive, load, times
from tests.support import ROOT, RunIngot, refused, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
QUICK = ("--pause", "0s")
# FastAPI hides this one by catch_warnings, which servers in several threads undo for each other.
pytestmark = pytest.mark.filterwarnings("ignore:The 'alias' attribute")


def table() -> Archive:
    """Return an archive of y = x that fails for numbers of 8 and more."""
    nodes = [
        helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["y"]),
    ]
    return archive(nodes, [numpy_helper.from_array(np.arange(8, dtype=np.float32), "table")])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Version 1, which is prod, multiplies by 1, and 2 nearly so; 3 is wrong, 4 fails, 5 has a wrong golden."""
    store = Store(tmp_path / "home")  # that of run_ingot
    for version, made in enumerate((times(1), times(1.0005), times(1.1), table(), times(2, golden=3)), 1):
        store.push(made, f"times:{version}")
    store.promote("times:1", "prod")
    return store


@pytest.fixture
def replicas(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunningServer]]:
    """Three servers that follow the alias, with sockets r0 to r2."""
    with contextlib.ExitStack() as running:
        yield [
            running.enter_context(ingot.serve("times:prod", store=store, management=str(tmp_path / f"r{n}"), **FREE))
            for n in range(3)
        ]


@pytest.fixture
def servers(tmp_path: Path) -> list[str]:
    return [text for n in range(3) for text in ("--server", str(tmp_path / f"r{n}"))]


def started(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``ingot`` with its store in a folder."""
    environment = {**os.environ, "INGOT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ingot", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def versions(store: Store, replicas: list[RunningServer]) -> list[str]:
    """Return the version that each replica serves."""
    named = {digest: tag for tag, digest in store.tags("times").items() if tag.isdigit()}
    return [named[server.status()[0]["digest"]] for server in replicas]


def test_all_replicas_change_before_the_alias_moves(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    assert run_ingot("fleet", "status", "times:prod", *servers).returncode == 0
    with load([each.http_url for each in replicas], each=1) as clients:
        shown = succeeded(run_ingot("fleet", "roll", "times:prod", "2", *servers, *QUICK))
        wait_until(lambda: all(round(each.seen[-1], 4) == 1.0005 or each.failure for each in clients))
    assert shown.splitlines()[-1] == "all 3 replicas run version 2, and 'prod' means it"
    assert versions(store, replicas) == ["2", "2", "2"]
    assert store.digest_of("times", "prod") == store.digest_of("times", "2")
    # They follow the alias as before.
    store.promote("times:1", "prod")
    wait_until(lambda: versions(store, replicas) == ["1", "1", "1"])


def test_a_replica_ahead_of_the_alias_stays_so_until_it_moves(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    first = servers[1]
    succeeded(run_ingot("ctl", "load", "times", "--set", "version=2", "--server", first))
    store.push(times(6), "times:6")  # the index changes, and with it what the watch has seen
    store.promote("times:1", "other")
    assert replicas[0].status()[0]["ahead"]
    assert versions(store, replicas) == ["2", "1", "1"]
    shown = run_ingot("fleet", "status", "times:prod", *servers)
    assert shown.returncode == 1
    assert "= 2  ahead of the alias" in shown.stdout
    store.promote("times:6", "prod")
    wait_until(lambda: versions(store, replicas) == ["6", "6", "6"])
    assert not replicas[0].status()[0]["ahead"]
    says = refused(run_ingot("ctl", "load", "times", "--set", "version=prod", "--server", first))
    assert "'prod' is not a version" in says


def test_drift_on_the_first_replica_stops_the_roll(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    limits = ("--canary", "20,50", "--every", "0s", "--drift", "1", "--compare", "50")
    with load([each.http_url for each in replicas], each=1):
        stopped = run_ingot("fleet", "roll", "times:prod", "3", *servers, *QUICK, *limits)
    assert stopped.returncode == 1
    assert "answers differ by more than 0.01" in stopped.stderr
    assert "'times:prod' was not moved" in stopped.stderr
    assert versions(store, replicas) == ["1", "1", "1"]
    tried = [[event["to"] for event in server.status()[0]["history"]] for server in replicas]
    assert [store.digest_of("times", "3") in each for each in tried] == [True, False, False]
    assert store.digest_of("times", "prod") == store.digest_of("times", "1")


@pytest.mark.matrix
def test_a_version_within_the_limits_passes_every_canary(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    limits = ("--canary", "50", "--every", "0s", "--drift", "1", "--compare", "100", "--max-unavailable", "3")
    with load([each.http_url for each in replicas], each=1):
        succeeded(run_ingot("fleet", "roll", "times:prod", "2", *servers, *QUICK, *limits))
        # Its own candidate does not become the source: the alias is still followed.
        assert [server.status()[0]["follows"] for server in replicas] == [True, True, True]
    assert versions(store, replicas) == ["2", "2", "2"]


@pytest.mark.matrix
def test_failures_after_the_change_bring_the_replicas_back(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    with (
        ingot.Client(replicas[0].http_url) as client,
        started(store.root, "fleet", "roll", "times:prod", "4", *servers, "--pause", "60s", "--errors", "5") as process,
    ):
        wait_until(lambda: versions(store, replicas)[0] == "4")
        while process.poll() is None:
            with contextlib.suppress(IngotError):
                client.infer("times", {"x": X + 8})
        assert process.stderr is not None
        assert "requests since the change; 5 % are allowed" in " ".join(process.stderr.read().split())
    assert process.returncode == 1
    assert versions(store, replicas) == ["1", "1", "1"]


@pytest.mark.matrix
def test_an_interrupted_roll_continues(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    with started(store.root, "fleet", "roll", "times:prod", "2", *servers, "--pause", "60s") as process:
        assert process.stdout is not None
        while "runs version 2" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: 1 of 3 replicas run version 2" in " ".join(text.split())
    assert versions(store, replicas) == ["2", "1", "1"]
    assert store.digest_of("times", "prod") == store.digest_of("times", "1")
    # To the end, or back to what the alias means.
    shown = succeeded(run_ingot("fleet", "roll", "times:prod", "1", *servers, *QUICK))
    assert shown.count("changing") == 1
    shown = succeeded(run_ingot("fleet", "roll", "times:prod", "2", *servers, *QUICK))
    assert shown.count("changing") == 3
    assert versions(store, replicas) == ["2", "2", "2"]


@pytest.mark.matrix
def test_an_interrupt_stops_a_canary(store: Store, replicas: list[RunningServer], servers: list[str]) -> None:
    digest = store.digest_of("times", "2")
    with started(store.root, "fleet", "roll", "times:prod", "2", *servers, "--canary", "50") as process:
        wait_until(lambda: (replicas[0].status()[0]["trial"] or {}).get("digest") == digest)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: 0 of 3 replicas" in " ".join(text.split())
    assert replicas[0].status()[0]["trial"]["state"] == "stopped"
    assert versions(store, replicas) == ["1", "1", "1"]


@pytest.mark.matrix
def test_replicas_that_are_down_count_as_unavailable(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str], tmp_path: Path
) -> None:
    gone = (*servers, "--server", str(tmp_path / "gone"))
    says = refused(run_ingot("fleet", "roll", "times:prod", "2", *gone, *QUICK))
    assert "1 of 4 replicas are not ready" in says
    assert versions(store, replicas) == ["1", "1", "1"]
    stopped = run_ingot("fleet", "roll", "times:prod", "2", *gone, *QUICK, "--max-unavailable", "2")
    assert (stopped.returncode, versions(store, replicas)) == (1, ["2", "2", "2"])
    assert store.digest_of("times", "prod") == store.digest_of("times", "1")
    assert run_ingot("fleet", "status", "times:prod", *gone).returncode == 1


REFUSED = [
    (["times:1", "2"], "names no alias"),
    (["times:prod", "prod"], "'prod' is not a version"),
    (["times:prod", "9"], "'times' has no tag '9'"),
    (["times:prod", "2", "--model", "other"], "does not follow 'other:prod'; it serves times:prod"),
    (["times:prod", "2", "--drift", "1"], "--drift is for a canary"),
    (["times:prod", "2", "--pause", "soon"], "--pause 'soon' is not a duration"),
    (["times:prod", "2", "--canary", "none"], "must be percentages"),
    (["times:prod", "5"], "does not reproduce"),
]


def test_what_cannot_be_rolled_changes_nothing(
    run_ingot: RunIngot, store: Store, replicas: list[RunningServer], servers: list[str]
) -> None:
    for arguments, says in REFUSED:
        stopped = run_ingot("fleet", "roll", *arguments, *servers)
        assert (stopped.returncode, says in " ".join(stopped.stderr.split())) == (1, True), stopped.stderr
    assert versions(store, replicas) == ["1", "1", "1"]


@pytest.mark.matrix
def test_real_servers_follow_a_registry_without_a_failed_request(
    run_ingot: RunIngot, registry: str, tmp_path: Path, store: Store
) -> None:
    """Three processes, each with its own store, under load."""
    address = Reference.parse(f"{registry}/fleet/times:prod")
    assert address.registry is not None
    place = Registry(address.registry)
    for version in ("1", "2"):
        place.push(store.get(f"times:{version}"), Reference.parse(f"{registry}/fleet/times:{version}"))
    place.promote(Reference.parse(f"{registry}/fleet/times:1"), "prod")
    with contextlib.ExitStack() as running:
        urls, servers = [], []
        for n in range(3):
            process = running.enter_context(
                started(
                    tmp_path / f"node{n}", "serve", str(address), "--json", "--http-port", "0", "--grpc-port", "0",
                    "--management", str(tmp_path / f"r{n}"), "--watch", "1s",
                )
            )  # fmt: skip
            running.callback(process.terminate)
            assert process.stdout is not None
            urls.append(json.loads(process.stdout.readline())["http"])
            servers += ["--server", str(tmp_path / f"r{n}")]
        with load(urls, each=1) as clients:
            shown = succeeded(run_ingot("fleet", "roll", str(address), "2", *servers, "--pause", "2s"))
            assert shown.count("runs version 2\n") == 3
            wait_until(lambda: all(round(each.seen[-1], 4) == 1.0005 or each.failure for each in clients))
        assert all([round(factor, 4) for factor in client.seen] == [1, 1.0005] for client in clients)
        assert place.digest_of(address.name, "prod") == place.digest_of(address.name, "2")
        assert run_ingot("fleet", "status", str(address), *servers).returncode == 0


@pytest.mark.parametrize("body", ["<html>", '{"a": 1}', '[{"name": "times", "version": "prod"}]'])
def test_a_replica_with_other_answers_is_not_ready(run_ingot: RunIngot, store: Store, body: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        text = refused(run_ingot("fleet", "roll", "times:prod", "2", "--server", place, *QUICK))
        server.shutdown()
    assert "1 of 1 replicas are not ready" in text
    assert "the answer is not" in text or "its answer is not that of an Ingot server" in text
    assert store.tags("times")["prod"] == store.tags("times")["1"]
