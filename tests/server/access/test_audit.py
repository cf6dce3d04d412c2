"""The audit log: complete lines, without secrets, bounded, rotated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.serving.processes import free_ports
from ingot.errors import InvalidArgument, Unauthenticated
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.proto_codec import SERVICE
from ingot.runtime import Metrics
from ingot.server.access.audit import AuditLog
from ingot.server.access.grants import Refusal
from ingot.server.access.peers import Peer
from tests.server.access.served import Served, make_key, served
from tests.server.outside import wait_until
from tests.support import matrix

REFUSAL = Refusal(Unauthenticated("x"), "unknown", client="key:1")
PEER = Peer("10.0.0.1:5")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(params=matrix("fast", "grpcio"))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A server with an audit log."""
    make_key(tmp_path / "keys.toml", "metrics")
    with served(request.param, tmp_path, tmp_path / "keys.toml", audit_log=tmp_path / "audit.log") as running:
        yield running, tmp_path / "audit.log"


def test_refused_requests_and_new_keys_are_logged_without_secrets(server: tuple[Served, Path]) -> None:
    running, path = server
    key = make_key(running.auth, "metrics", name="other")
    wait_until(lambda: running.get("/metrics", key).status_code == 200)
    wait_until(lambda: any(line["action"] == "reload" for line in lines(path)))
    before = len(lines(path))
    assert running.infer(key).status_code == 403
    assert running.get(f"/v2/models/{key}?key={key}").status_code == 401
    with pytest.raises(grpc.RpcError):
        running.infer_grpc(key + "x")
    wait_until(lambda: len([line for line in lines(path)[before:] if line["action"] == "request"]) >= 3)
    found = [line for line in lines(path)[before:] if line["action"] == "request"]
    identifier = key.split("_")[1]
    shown = [(line["reason"], line.get("client"), line["protocol"], line["target"]) for line in found]
    assert shown == [
        ("scope", f"key:{identifier}", "http", "/v2/models/affine/infer"),
        ("missing", None, "http", f"/v2/models/ingot_{identifier}_***"),
        ("unknown", None, "grpc", "/inference.GRPCInferenceService/ModelInfer"),
    ]
    assert all(line["address"].startswith("127.0.0.1:") for line in found)
    assert key.split("_", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_refusals_of_management_are_logged(tmp_path: Path) -> None:
    auth, path = tmp_path / "keys.toml", tmp_path / "audit.log"
    key = make_key(auth, "infer")
    http, rpc = [f"127.0.0.1:{port}" for port in free_ports(2)]
    settings: dict[str, Any] = {"management": http, "management_grpc": rpc, "audit_log": path}
    with served("fast", tmp_path, auth, **settings) as running:
        managed = replace(running, http=f"http://{http}", grpc=f"grpc://{rpc}")
        assert managed.get("/v2/repository/status", key).status_code == 403
        with pytest.raises(grpc.RpcError):
            managed.call(f"{SERVICE}/RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
    shown = [(line["reason"], line["protocol"], line["target"]) for line in lines(path)]
    assert shown == [
        ("scope", "http", "/v2/repository/status"),
        ("missing", "grpc", f"/{SERVICE}/RepositoryIndex"),
    ]


def test_a_broken_file_is_logged(server: tuple[Served, Path]) -> None:
    running, path = server
    running.auth.write_text("key = 1")
    wait_until(lambda: any(line["result"] == "failed" for line in lines(path)))
    line = next(line for line in lines(path) if line["result"] == "failed")
    assert (line["action"], line["file"]) == ("reload", "auth")
    assert "keys.toml is not valid" in line["reason"]


@contextlib.contextmanager
def opened(path: Path, now: list[float]) -> Iterator[tuple[AuditLog, Metrics]]:
    metrics = Metrics()
    log = AuditLog(path, metrics, lambda: now[0])
    try:
        yield log, metrics
    finally:
        log.close()


def count(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(name)
    assert value is not None
    return value


def test_a_flood_is_cut_to_a_rate_and_counted(tmp_path: Path) -> None:
    path, now = tmp_path / "audit.log", [0.0]
    with opened(path, now) as (log, metrics):
        for _ in range(1000):
            log.refused(REFUSAL, "http", "/", PEER)
        log.summarize()  # the flood has not ended
        assert count(metrics, "ingot_audit_suppressed_total") == 900
        now[0] += 0.2
        log.summarize()
        log.summarize()
        log.refused(REFUSAL, "http", "/", PEER)
    found = lines(path)
    assert [line.get("suppressed") for line in found[100:]] == [900, None]
    assert len(found) == 102


def test_a_moved_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with opened(path, [0.0]) as (log, _):
        log.write("first", "ok")
        wait_until(lambda: len(lines(path)) == 1)
        path.rename(tmp_path / "audit.log.1")
        log.write("second", "ok")
        wait_until(lambda: len(lines(path)) == 1)
        path.unlink()
        log.write("third", "ok")
    assert [line["action"] for line in lines(path)] == ["third"]
    assert [line["action"] for line in lines(tmp_path / "audit.log.1")] == ["first"]


def test_a_text_of_a_client_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with opened(path, [0.0]) as (log, _):
        log.refused(REFUSAL, "http", '/a\n{"action": "x"}\u2028\r' + "b" * 1000, PEER)
    assert path.read_bytes().count(b"\n") == 1
    assert len(lines(path)[0]["target"]) == 200


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    auth = tmp_path / "keys.toml"
    key = make_key(auth, "metrics")
    with served("fast", tmp_path, auth, audit_log=Path("/dev/full")) as server:
        assert server.infer().status_code == 401
        wait_until(lambda: "ingot_audit_lost_total 1.0" in server.get("/metrics", key).text)


def test_a_server_does_not_start_without_its_audit_log(tmp_path: Path) -> None:
    auth = tmp_path / "keys.toml"
    make_key(auth, "metrics")
    with (
        pytest.raises(InvalidArgument, match=r"the audit log .* cannot be written: No such file"),
        served("fast", tmp_path, auth, audit_log=tmp_path / "nowhere" / "log"),
    ):
        pass
