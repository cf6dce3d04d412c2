"""Requests of a few bytes that ask for much memory: they are refused, and the memory is given back."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import TooLarge
from ingot.server.main import RunningServer
from tests import onnx_models
from tests.server.outside import wait_until
from tests.support import ROOT

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
    from ingot.runtime.dispatch.batching import AnswerLimit, Batcher
    from ingot.runtime.scheduling.entry import Entry
    from tests.runtime.fake_engines import DOUBLER, FunctionEngine

    arrays = [np.ones((rows, 2), np.float32) for rows in (1, 100, 2)]
    entries = [Entry({"x": array}, len(array), lambda _: None, 0.0) for array in arrays]
    first, large, last = Batcher(FunctionEngine(), DOUBLER, limit=AnswerLimit(100, "m")).run(entries)
    assert isinstance(large, TooLarge)
    assert not isinstance(first, TooLarge)
    assert not isinstance(last, TooLarge)


@contextlib.contextmanager
def running(folder: Path, *options: str, limit: int = resource.RLIM_INFINITY) -> Iterator[ingot.Client]:
    """Run ``ingot serve`` in a process of at most ``limit`` bytes of address space."""
    models = [onnx_models.inflated(folder), onnx_models.affine(folder)]
    command = [sys.executable, "-m", "ingot", "serve", *map(str, models), "--json", "--device", "cpu", *options]
    with subprocess.Popen(
        [*command, "--http-port", "0", "--grpc-port", "0", "--isolate", "none"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "INGOT_HOME": str(folder)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
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


def test_memory_of_a_large_call_is_given_back(folder: Path) -> None:
    with running(folder) as asking:
        asking.infer("inflated", {"n": np.array([3])})
        before = resident(asking)
        assert asking.infer("inflated", floats(600))["y"] == 1
        wait_until(lambda: _metric(asking, "ingot_memory_returned_bytes_total") > 500 * MIB)
        assert resident(asking) < before + 200 * MIB
        assert asking.infer("inflated", {"n": np.array([3])})["y"] == 1


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
