"""The generator in C counts each request once and finds wrong answers; the slope of memory; the soak test itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.reliability import chaos, decoders, generator, python_faults, soak
from benchmarks.reliability.generator import Shape, finish, start
from benchmarks.reliability.memory import growth
from benchmarks.serving.processes import LOAD_CORE
from tests.server.faults.http1 import body_of, request
from tests.server.outside import Service, affine, affine_of, message, row, serving, wait_until
from tests.support import ROOT, matrix

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("taskset") is None or LOAD_CORE not in os.sched_getaffinity(0),
    reason="needs a C compiler, taskset and two cores",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving("fast", tmp_path_factory.mktemp("loaded")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generator.compiled(tmp_path_factory.mktemp("program"))


def http_rows(wrong: bool) -> list[tuple[bytes, bytes, bytes]]:
    """Return ten requests; of the last, the answer of another is expected if ``wrong``."""
    rows = [(b"g", request(body_of(row(n))), _json(affine_of(row(n)))) for n in range(10, 20)]
    if wrong:
        rows[-1] = (b"g", rows[-1][1], _json([1, 2, 3]))
    return [*rows, (b"b", request(b"{}"), b"")]


def grpc_rows(wrong: bool) -> list[tuple[bytes, bytes, bytes]]:
    rows = [(b"g", message(affine(row(n))), np.array(affine_of(row(n)), np.float32).tobytes()) for n in range(10, 20)]
    if wrong:
        rows[-1] = (b"g", rows[-1][1], np.float32(77).tobytes())
    return [(b"h", generator.HEADERS, b""), *rows, (b"b", message(affine(row(1), "absent")), b"")]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    "shape",
    matrix(Shape(2, 4), Shape(8, rate=300, deadline_ms=1000), Shape(2, 4, cancel=0.05)),
    ids=["closed", "open", "cancelling"],
)
@pytest.mark.parametrize("protocol", matrix("http", "grpc"))
def test_each_request_is_counted_once(
    service: Service, program: Path, tmp_path: Path, protocol: str, shape: Shape, wrong: bool
) -> None:
    samples = tmp_path / "samples"
    generator._write(samples, http_rows(wrong) if protocol == "http" else grpc_rows(wrong))
    port = (service.http_address if protocol == "http" else service.grpc_address)[1]
    found = finish(start(program, port, protocol, samples, 1.0, shape))  # which adds all up
    assert found["right"] > 20
    assert found["rejected"] > 0
    assert found["cut"] == found["silent"] == found["refused"] == 0, found
    assert (found["wrong"] > 0) == wrong, found
    assert (found["abandoned"] > 0) == (shape.cancel > 0)
    if shape.rate:
        assert found["due"] == found["sent"] + found["unsent"]


@pytest.mark.matrix
def test_a_server_that_ends_is_not_a_right_answer(program: Path, tmp_path: Path) -> None:
    with serving("fast", tmp_path) as service:
        samples = tmp_path / "samples"
        generator._write(samples, http_rows(False))
        load = start(program, service.http_address[1], "http", samples, 10.0, Shape(2, 8))
        wait_until(lambda: service.count("ingot_requests_total", code="ok") > 0)
        service.process.kill()
        found = finish(load)
    assert found["cut"] > 0
    assert found["wrong"] == found["silent"] == 0


@pytest.mark.matrix
def test_the_slope_of_memory() -> None:
    random = np.random.default_rng(1)
    times = [float(second) for second in range(1, 601)]
    flat = [200e6 + 50e6 * (second < 120) + random.normal(0, 1e6) for second in times]
    found = growth(times, flat)
    assert abs(found.percent) < 1
    assert not found.leaks()
    found = growth(times, [size + 10e3 * second for second, size in zip(times, flat, strict=True)])  # 3% in ten minutes
    assert 2 < found.percent < 4
    assert found.leaks()
    with pytest.raises(ValueError, match="too few"):
        growth(times[:20], flat[:20])


def result(**fields: Any) -> dict[str, Any]:
    fine = {
        "leg": "one process",
        "seconds": 600,
        "right": 1,
        "wrong": 0,
        "denied": 0,
        "cut": 0,
        "silent": 0,
        "tracebacks": 0,
    }
    return {**fine, "leaks": False, "memory_percent": 0.0, **fields}


@pytest.mark.parametrize("fault", ["wrong", "denied", "cut", "silent", "tracebacks", "leaks"])
@pytest.mark.matrix
def test_a_soak_with_a_fault_fails(fault: str) -> None:
    assert soak.faults([result()]) == []
    assert len(soak.faults([result(**{fault: 1})])) == 1
    assert len(soak.faults([result(right=0)])) == 1
    assert soak.faults([result(leg=soak.CONTROL, leaks=True)]) == []
    assert len(soak.faults([result(leg=soak.CONTROL)])) == 1


def outcome(**fields: Any) -> dict[str, Any]:
    fine = {"fault": "full-disk", "done": 1, "right": 1, "recovered": True, "example": "", "log": ""}
    return {**fine, **dict.fromkeys(("wrong", "silent", "refused", "denied", "cut"), 0), **fields}


@pytest.mark.parametrize("fault", ["wrong", "silent", "refused", "denied", "cut"])
@pytest.mark.matrix
def test_chaos_that_costs_more_than_its_fault_may_fails(fault: str) -> None:
    assert chaos.broken(outcome()) == []
    assert len(chaos.broken(outcome(**{fault: 1}))) == 1
    assert (len(chaos.broken(outcome(fault="kill-engine", **{fault: 1}))) == 0) == (fault in ("refused", "denied"))
    for missing in ({"done": 0}, {"right": 0}, {"recovered": False}):
        assert len(chaos.broken(outcome(**missing))) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", chaos.FAULTS)
def test_chaos(tmp_path: Path, name: str) -> None:
    """Each fault for 20 seconds unless CHAOS_SECONDS says otherwise."""
    seconds = os.environ.get("CHAOS_SECONDS", "20")
    command = [sys.executable, "-m", "benchmarks.reliability.chaos", "--seconds", seconds, "--faults", name]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


@pytest.mark.long
def test_changes_of_versions() -> None:
    command = [sys.executable, "-m", "benchmarks.reliability.rollout", "--changes", "20", "--before", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


@pytest.mark.long
def test_a_soak(tmp_path: Path) -> None:
    """30 minutes unless SOAK_SECONDS says otherwise."""
    seconds = os.environ.get("SOAK_SECONDS", "1800")
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.reliability.soak", "--seconds", seconds, "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = json.loads(out.read_text())
    assert len(found) == len(soak.LEGS) + 1


@pytest.mark.matrix
def test_mutated_files() -> None:
    found = decoders.measure(4, clients=2, seed=1, window=1)
    assert found["faults"] == []
    assert found["answers"]["colour: 200"]
    assert found["answers"]["level: 400"]
    assert found["neighbour"]["ratio"] > 0


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_model_in_python_that_ends(fault: str) -> None:
    found = python_faults.measure(fault, 5)
    assert found["restarts"]
    assert found["recovered"]
    assert found["neighbour"]["ratio"] > 0


def _json(values: list[float]) -> bytes:
    return ",".join(f"{float(value)}" for value in values).encode()
