"""Metrics, the dashboard and the alert rules agree, and Prometheus' own tool accepts them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Literal

import httpx
import numpy as np
import pytest

import ingot
from ingot.runtime import Metrics
from tests import onnx_models
from tests.support import ROOT, RequireTool, matrix

MONITORING = ROOT / "examples" / "monitoring"
NAME = re.compile(r"\bingot_[a-z_]+")
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def families() -> dict[str, str]:
    """Return the kind of each metric, by its name."""
    return {family.name: family.type for family in Metrics().registry.collect()}


def expressions() -> str:
    """Return all that the dashboard and the alert rules ask for."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = re.sub(r"summary:.*", "", (MONITORING / "alerts.yml").read_text())
    return "\n".join([*asked, rules])


def test_the_dashboard_and_the_rules_ask_for_what_there_is() -> None:
    samples = {f"{name}{ending}" for name, kind in families().items() for ending in ENDINGS[kind]}
    asked = set(NAME.findall(expressions()))
    assert asked - samples == set()
    assert len(asked) > 20


def test_the_rules_hold_their_tests(require_tool: RequireTool) -> None:
    promtool = require_tool("promtool")
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", matrix("fast", "grpcio"))
def test_every_encoded_response_is_counted(tmp_path: Path, kind: Literal["fast", "grpcio"]) -> None:
    rows = 12_000  # of which a thread encodes the values
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 3], "data": [1.0] * (3 * rows)}
    with (
        ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0, grpc_server=kind) as running,
        httpx.Client(base_url=running.http_url, trust_env=False, timeout=60) as http,
        ingot.Client(running.grpc_url) as grpc,
    ):
        answer = http.post("/v2/models/affine/infer", json={"inputs": [tensor]})
        assert len(answer.json()["outputs"][0]["data"]) == 3 * rows
        grpc.infer("affine", {"x": np.ones((1, 3), np.float32)})
        list(grpc.stream("affine", {"x": np.ones((1, 3), np.float32)}))
        text = http.get("/metrics").text
    counts = dict(re.findall(r'^ingot_encode_seconds_count\{protocol="(\w+)"\} (\S+)$', text, re.M))
    assert counts == {"http": "1.0", "grpc": "2.0"}
    assert float(re.findall(r'^ingot_encode_seconds_sum\{protocol="http"\} (\S+)$', text, re.M)[0]) > 0


def test_what_a_server_shows_is_valid(require_tool: RequireTool, tmp_path: Path) -> None:
    promtool = require_tool("promtool")
    with ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0) as running:
        for url in (running.http_url, running.grpc_url):
            with ingot.Client(url) as client:
                client.infer("affine", {"x": np.ones((1, 3), np.float32)})
        text = httpx.get(f"{running.http_url}/metrics", trust_env=False, timeout=60).text
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    values = {name: float(value) for name, value in re.findall(r"^(ingot_\w+(?:\{[^}]*\})?) (\S+)$", text, re.M)}
    for stage in ("join", "compute", "split"):
        assert values[f'ingot_stage_seconds_count{{model="affine",stage="{stage}",version="1"}}'] == 2
    for protocol in ("http", "grpc"):
        assert values[f'ingot_encode_seconds_count{{protocol="{protocol}"}}'] == 1
    model = 'model="affine",version="1"'
    for name in ("queued_requests", "queued_bytes", "in_flight_requests"):
        assert values[f"ingot_{name}{{{model}}}"] == 0
    for name in ("queue_seconds", "batch_size", "batch_requests"):
        assert values[f"ingot_{name}_count{{{model}}}"] == 2
    assert values[f"ingot_model_load_seconds_count{{{model}}}"] == 1
    assert values[f'ingot_model_memory_bytes{{device="cpu",{model}}}'] > 0
    assert values["ingot_start_time_seconds"] > 1e9
    assert values["ingot_threads"] >= 1
    assert values["ingot_open_files"] > 3
    assert values["ingot_http_connections"] >= 1
