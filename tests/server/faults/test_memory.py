"""Requests of a few bytes that ask for much memory: they are refused, and the memory is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import TooLarge
from ingot.server.main import RunningServer
from tests import onnx_models

both = pytest.mark.parametrize("protocol", ["http", "grpc"])
MIB = 1 << 20


def floats(mib: float) -> dict[str, Any]:
    """Return a request to ``filled`` for an answer of so many MiB."""
    return {"n": np.array([int(mib * MIB / 4)])}


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    models = [str(onnx_models.filled(folder)), str(onnx_models.affine(folder))]
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
