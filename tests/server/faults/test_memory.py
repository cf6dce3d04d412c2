"""Requests of a few bytes that ask for much memory: they are refused, and the memory is given back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import RunningServer
from ingot.errors import TooLarge, Unavailable
from ingot.runtime import watchdog
from ingot.runtime.machine import memory
from tests import onnx_models
from tests.server.outside import wait_until
from tests.support import ROOT, RunIngot, succeeded

both = pytest.mark.parametrize("protocol", ["http", "grpc"])
MIB = 1 << 20


def floats(mib: float) -> dict[str, Any]:
    """Return a request to ``filled`` for an answer of so many MiB."""
    return {"n": np.array([int(mib * MIB / 4)])}


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    models = [str(onnx_models.filled(folder)), str(onnx_models.affine(folder))]
    settings = {"isolate": "none", **settings}  # the limits of the server's own process
    with ingot.serve(*models, http_port=0, grpc_port=0, device="cpu", **settings) as server:
        yield server


def client(server: RunningServer, protocol: str) -> ingot.Client:
    return ingot.Client(server.http_url if protocol == "http" else server.grpc_url)


@both
@pytest.mark.parametrize("binary", [True, False], ids=["raw", "JSON"])
def test_an_answer_over_the_limit_is_refused(folder: Path, protocol: str, binary: bool) -> None:
    with serving(folder, max_answer_mb=1) as server, client(server, protocol) as asking:
        assert asking.infer("filled", floats(1), binary=binary)["y"].nbytes == MIB
        with pytest.raises(TooLarge) as refused:
            asking.infer("filled", floats(1.5), binary=binary)
    assert str(refused.value).endswith(
        ": the outputs of model 'filled' have 1.5 MiB for this request, most of it in 'y', over the limit of 1 MiB; "
        "send a request with a smaller answer, or raise --max-answer-mb (INGOT_MAX_ANSWER_MB)"
    )


@both
def test_the_parts_of_a_large_request_count_together(folder: Path, protocol: str) -> None:
    with serving(folder, max_answer_mb=1) as server, client(server, protocol) as asking:
        assert len(asking.infer("affine", {"x": np.ones((40_000, 3), np.float32)})["y"]) == 40_000
        with pytest.raises(TooLarge, match=r"the outputs of model 'affine' have 1 MiB .* over the limit of 1 MiB"):
            asking.infer("affine", {"x": np.ones((50_000, 3), np.float32)})
        assert len(asking.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"]) == 1


def test_only_the_request_with_the_large_answer_fails(folder: Path) -> None:
    """It shares its batch with others."""
    from ingot.runtime import BatchRunner, Entry
    from ingot.runtime.dispatch.batch_run import AnswerLimit
    from tests.runtime.fake_engines import DOUBLER, FunctionEngine

    arrays = [np.ones((rows, 2), np.float32) for rows in (1, 100, 2)]
    entries = [Entry({"x": array}, len(array), lambda _: None, 0.0) for array in arrays]
    first, large, last = BatchRunner(FunctionEngine(), DOUBLER, limit=AnswerLimit(100, "m")).run(entries)
    assert isinstance(large, TooLarge)
    assert not isinstance(first, TooLarge)
    assert not isinstance(last, TooLarge)


@contextlib.contextmanager
def running(folder: Path, *options: str, limit: int | None = None) -> Iterator[ingot.Client]:
    """Run ``ingot serve`` in a process of at most ``limit`` bytes of data."""
    models = [onnx_models.inflated(folder), onnx_models.affine(folder)]
    command = [sys.executable, "-m", "ingot", "serve", *map(str, models), "--json", "--device", "cpu", *options]
    command += ["--http-port", "0", "--grpc-port", "0", "--isolate", "none"]
    if limit:
        # Not by preexec_fn: gRPC's fork handlers, of other tests' clients, can abort the forked process.
        command = ["sh", "-c", f'ulimit -d {limit >> 10}; exec "$@"', "sh", *command]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "INGOT_HOME": str(folder)},
    ) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the server did not start"
            with ingot.Client(json.loads(line)["http"]) as asking:
                yield asking
            process.terminate()
            assert process.wait(60) == 0
        finally:
            late.cancel()
            process.kill()


def resident(asking: ingot.Client) -> float:
    return _metric(asking, "ingot_resident_memory_bytes")


def _metric(asking: ingot.Client, name: str) -> float:
    return next(float(line.split()[1]) for line in asking.metrics().splitlines() if line.startswith(f"{name} "))


@pytest.mark.matrix
def test_memory_of_a_large_call_is_given_back(folder: Path) -> None:
    with running(folder) as asking:
        asking.infer("inflated", {"n": np.array([3])})
        before = resident(asking)
        assert asking.infer("inflated", floats(600))["y"] == 1
        wait_until(lambda: _metric(asking, "ingot_memory_returned_bytes_total") > 500 * MIB)
        assert resident(asking) < before + 200 * MIB
        assert asking.infer("inflated", {"n": np.array([3])})["y"] == 1


@pytest.mark.matrix
def test_a_call_that_needs_more_memory_than_there_is_fails_alone(folder: Path) -> None:
    """In a process of 2 GiB, of which the arena may hold three quarters."""
    with running(folder, limit=2 << 30) as asking:
        for mib in (1600, 1 << 20):
            with pytest.raises(TooLarge, match="the model needs more memory for this input than there is: Expand"):
                asking.infer("inflated", floats(mib))
            assert asking.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]
        assert resident(asking) < 2 << 30
        # Regions of the arena that are too small are returned first.
        for mib in (300, 500, 700, 900):
            assert asking.infer("inflated", floats(mib))["y"] == 1


def largest_batch(server: RunningServer) -> int:
    stats = httpx.get(f"{server.http_url}/v2/models/squared/stats", trust_env=False, timeout=30).json()
    return max(int(item["batch_size"]) for item in stats["model_stats"][0]["batch_stats"])


@pytest.mark.matrix
@both
def test_calls_are_limited_by_the_memory_that_they_will_take(
    folder: Path, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A sample of 1024 values takes 4 MiB: larger requests run in parts, and batches stop growing, as the log says."""
    model = str(onnx_models.squared(folder))
    with (
        ingot.serve(model, http_port=0, grpc_port=0, device="cpu", max_call_mb=18) as server,
        client(server, protocol) as asking,
    ):
        with pytest.raises(TooLarge, match=r"call of model 'squared' with one sample of these sizes may take"):
            asking.infer("squared", {"x": np.ones((1, 4096), np.float32)})
        with pytest.raises(
            TooLarge, match="over the limit of 18 MiB; send smaller inputs, or raise --max-call-mb"
        ) as error:
            asking.infer("squared", {"x": np.ones((3, 2300), np.float32)})
        needed = int(str(error.value).rpartition(" to ")[2])
        x = np.repeat(np.arange(21, dtype=np.float32)[:, None], 1024, axis=1)
        assert np.array_equal(asking.infer("squared", {"x": x})["y"], np.arange(21) ** 2)
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda row: asking.infer("squared", {"x": x[row : row + 1]})["y"][0], range(21))
            assert [*answers] == [row**2 for row in range(21)]
        assert 1 < largest_batch(server) <= 4
        metrics = httpx.get(f"{server.http_url}/metrics", trust_env=False, timeout=30).text
        assert re.search(r'ingot_batches_total\{.*reason="memory".*\} [1-9]', metrics)
    noted = [record.getMessage() for record in caplog.records if "have at most" in record.getMessage()]
    assert noted == [
        "model squared: batches of n 1024 have at most 4 samples, not 64, as one more may take 20 MiB, over the limit "
        "of 18 MiB; raise --max-call-mb (INGOT_MAX_CALL_MB)"
    ]
    with (  # the remedy of the error
        ingot.serve(model, http_port=0, grpc_port=0, device="cpu", max_call_mb=needed) as server,
        client(server, protocol) as asking,
    ):
        assert len(asking.infer("squared", {"x": np.ones((3, 2300), np.float32)})["y"]) == 3


def test_a_limit_over_the_memory_of_the_machine_is_that_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of many samples runs in parts; a sample that exceeds the memory is refused without a useless remedy."""
    monkeypatch.setattr(memory, "engine_limit", lambda: 18.0 * MIB)
    model = str(onnx_models.squared(folder))
    with (
        ingot.serve(model, http_port=0, grpc_port=0, device="cpu", max_call_mb=100_000_000) as server,
        client(server, "http") as asking,
    ):
        assert len(asking.infer("squared", {"x": np.ones((21, 1024), np.float32)})["y"]) == 21
        with pytest.raises(TooLarge, match=r"or run the server with more memory, of which its engines may use 18 MiB"):
            asking.infer("squared", {"x": np.ones((1, 4096), np.float32)})


@pytest.mark.matrix
def test_a_bound_far_over_what_was_measured_limits_nothing(run_ingot: RunIngot, tmp_path: Path) -> None:
    """y = the sum of all products of two indices of x that are chosen: 64 MiB if all are, of which none is usual."""
    onnx_models.save(
        tmp_path / "chosen.onnx",
        [
            helper.make_node("Greater", ["x", "limit"], ["large"]),
            helper.make_node("NonZero", ["large"], ["places"]),
            helper.make_node("Cast", ["places"], ["row"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["row"], ["column"]),
            helper.make_node("MatMul", ["column", "row"], ["products"]),
            helper.make_node("ReduceSum", ["products"], ["y"], keepdims=0),
        ],
        [("x", TensorProto.FLOAT, (4096,))],
        [("y", TensorProto.FLOAT, ())],
        [numpy_helper.from_array(np.array(1e30, np.float32), "limit")],
        opset=18,
    )
    exported = run_ingot("export", tmp_path / "chosen.onnx", "-o", tmp_path / "chosen.ingot")
    assert "so servers limit neither requests nor batches by it" in exported.stderr
    assert re.search(r"the bound of a call's memory, 6\d\.?\d* MiB, is \d+\S* times the", exported.stderr)
    shown = " ".join(succeeded(run_ingot("inspect", tmp_path / "chosen.ingot", "--verbose")).replace("│", " ").split())
    assert "not used to limit requests and batches" in shown
    assert "a call's memory in bytes: 671" in shown
    with (
        ingot.serve(str(tmp_path / "chosen.ingot"), http_port=0, grpc_port=0, device="cpu", max_call_mb=1) as server,
        client(server, "http") as asking,
    ):
        assert asking.infer("chosen", {"x": np.zeros(4096, np.float32)})["y"] == 0


def test_calls_larger_than_the_memory_that_is_left_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(onnx_models.squared(folder))
    with ingot.serve(model, http_port=0, grpc_port=0, device="cpu") as server, client(server, "http") as asking:
        assert asking.infer("squared", {"x": np.ones((1, 5000), np.float32)})["y"] == 1
        monkeypatch.setattr(memory, "available", lambda: 64 * MIB)
        with pytest.raises(Unavailable, match=r"may take 95\.4 MiB, more than the memory that is left"):
            asking.infer("squared", {"x": np.ones((1, 5000), np.float32)})
        assert asking.infer("squared", {"x": np.ones((1, 100), np.float32)})["y"] == 1


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_counts(tmp_path: Path, version: int) -> None:
    names = {"max": "memory.max", "used": "memory.current", "stat": "memory.stat", "cache": "inactive_file"}
    if version == 1:
        names = {
            "max": "memory/memory.limit_in_bytes",
            "used": "memory/memory.usage_in_bytes",
            "stat": "memory/memory.stat",
            "cache": "total_inactive_file",
        }
        (tmp_path / "memory").mkdir()
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable: 1500 kB\n")
    assert memory.limit(tmp_path, meminfo) == 2000 << 10
    assert memory.available(tmp_path, meminfo) == 1500 << 10
    (tmp_path / names["max"]).write_text("max\n" if version == 2 else f"{(1 << 63) - 4096}\n")
    assert memory.limit(tmp_path, meminfo) == 2000 << 10
    for name, text in (("max", "1000000\n"), ("used", "700000\n"), ("stat", f"anon 1\n{names['cache']} 200000\n")):
        (tmp_path / names[name]).write_text(text)
    assert memory.limit(tmp_path, meminfo) == 1_000_000
    assert memory.available(tmp_path, meminfo) == 500_000


@pytest.mark.one_case
@pytest.mark.parametrize("operator", ["ConstantOfShape", "Expand", "OneHot", "Range", "Resize", "Tile"])
def test_operators_that_make_any_amount_of_a_number_are_refused(folder: Path, operator: str) -> None:
    """10,000,000 values, 40 MB; 1e9 of them took up to 6.7 GB."""
    models = [str(onnx_models.sized(folder, operator)), str(onnx_models.affine(folder))]
    with (
        ingot.serve(*models, http_port=0, grpc_port=0, device="cpu", isolate="none", max_answer_mb=1) as server,
        client(server, "http") as http,
        client(server, "grpc") as grpc,
    ):
        for asking in (http, grpc):
            assert asking.infer("sized", {"n": np.array([1000])})["y"].size == 1000
            with pytest.raises(TooLarge, match=r"outputs of model 'sized' have 38\.1 MiB for this request"):
                asking.infer("sized", {"n": np.array([10_000_000])})
            assert asking.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]


@pytest.mark.matrix
def test_a_call_that_fills_the_process_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are outside of the arena, and this graph is not in an engine process."""
    monkeypatch.setattr(watchdog, "_OTHERS", 64 * MIB)
    models = [str(onnx_models.repeated(folder)), str(onnx_models.affine(folder))]
    with (
        ingot.serve(*models, http_port=0, grpc_port=0, device="cpu", isolate="none", max_call_mb=64) as server,
        client(server, "http") as asking,
    ):
        assert asking.infer("repeated", {"n": np.array([2])})["y"] == 2
        with pytest.raises(TooLarge, match=r"grew by more than 64 MiB during the engine call of model 'repeated'"):
            asking.infer("repeated", {"n": np.array([2**62])})
        assert asking.infer("repeated", {"n": np.array([2])})["y"] == 2
        assert asking.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]
        counted = 'ingot_engine_calls_ended_total{model="repeated",reason="memory",version="1"}'
        assert _metric(asking, counted) == 1


@pytest.mark.matrix
@both
def test_calls_of_engine_processes_are_limited(folder: Path, protocol: str) -> None:
    """1e9 values, 4 GB, from a request of some bytes; what the operator cannot allocate is not computed."""
    models = [str(onnx_models.sized(folder, "Expand")), str(onnx_models.affine(folder))]
    with (
        ingot.serve(*models, http_port=0, grpc_port=0, device="cpu", max_call_mb=256) as server,
        client(server, protocol) as asking,
    ):
        for _ in range(2):
            with pytest.raises(TooLarge, match=r"more memory than a call may take, 256 MiB \(--max-call-mb\)"):
                asking.infer("sized", {"n": np.array([10**9])})
            assert asking.infer("sized", {"n": np.array([10**6])})["y"].sum() == 10**6
            assert asking.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]
