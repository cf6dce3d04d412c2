"""The extension trace: clients choose how many requests are traced, if the server allows it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import ingot
from ingot.errors import InvalidArgument
from ingot.server.main import RunningServer
from tests import onnx_models
from tests.server.extensions.conftest import Triton, clients
from tests.server.outside import wait_until

X = np.ones((1, 3), np.float32)
ORDER = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[RunningServer]:
    made = [str(onnx_models.affine(tmp_path)), str(onnx_models.affine(tmp_path, "other"))]
    with ingot.serve(*made, http_port=0, grpc_port=0, trace=tmp_path / "trace") as running:
        yield running


@pytest.fixture
def triton(traced: RunningServer, protocol: str) -> Iterator[Triton]:
    for both in clients(traced):
        yield both[protocol]


def plain(found: Any) -> dict[str, Any]:
    if isinstance(found, dict):
        return found
    return {name: [*value.value] if name == "trace_level" else value.value[0] for name, value in found.settings.items()}


def read(triton: Triton, model: str = "") -> dict[str, Any]:
    return plain(triton.client.get_trace_settings(model or None))


def change(triton: Triton, model: str = "", **wanted: Any) -> dict[str, Any]:
    return plain(triton.client.update_trace_settings(model or None, wanted))


def ask(triton: Triton, count: int = 1, model: str = "affine") -> None:
    for number in range(count):
        triton.infer(model, [triton.input("x", X)], request_id=str(number))


def traces(path: Path) -> list[dict[str, Any]]:
    """Return the traces of a file once it is complete."""

    def content() -> Any:
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    wait_until(lambda: content() is not None)
    found: list[dict[str, Any]] = content()
    return found


def test_traces_have_the_times_of_each_step(triton: Triton, tmp_path: Path) -> None:
    assert read(triton)["trace_level"] == ["OFF"]
    ask(triton)
    found = change(triton, trace_level=["TIMESTAMPS"], trace_rate="1", log_frequency="2")
    assert found == read(triton)
    assert (found["trace_level"], found["trace_rate"], found["trace_count"]) == (["TIMESTAMPS"], "1", "-1")
    ask(triton, 5)
    change(triton, trace_level=["OFF"])
    ask(triton)
    for number, ids in enumerate((["0", "1"], ["2", "3"], ["4"])):
        written = traces(tmp_path / f"trace.{number}")
        assert [item["request_id"] for item in written[::2]] == ids
        for named, timed in zip(written[::2], written[1::2], strict=True):
            assert (named["id"], named["model_name"], named["model_version"]) == (timed["id"], "affine", "1")
            assert [item["name"] for item in timed["timestamps"]] == ORDER
            times = [item["ns"] for item in timed["timestamps"]]
            assert times == sorted(times)
    assert stat.S_IMODE((tmp_path / "trace.0").stat().st_mode) == 0o600
    assert not (tmp_path / "trace.3").exists()


def test_the_rate_and_the_count(triton: Triton, tmp_path: Path, traced: RunningServer) -> None:
    change(triton, trace_level=["TIMESTAMPS"], trace_rate="3", trace_count="2")
    ask(triton, 10)
    assert [item["request_id"] for item in traces(tmp_path / "trace.0")[::2]] == ["2", "5"]
    assert read(triton)["trace_count"] == "0"
    assert "ingot_traces_total 2.0" in httpx.get(f"{traced.http_url}/metrics", trust_env=False).text


def test_settings_of_one_model(triton: Triton, tmp_path: Path) -> None:
    change(triton, "other", trace_level=["TIMESTAMPS"], trace_rate="1", log_frequency="1")
    assert read(triton)["trace_level"] == ["OFF"]
    ask(triton, 3)
    ask(triton, 1, "other")
    assert traces(tmp_path / "trace.0")[0]["model_name"] == "other"
    change(triton, trace_rate="7")
    assert change(triton, "other", trace_rate=None)["trace_rate"] == "7"
    with pytest.raises(InferenceServerException, match="unknown model: 'nope'"):
        read(triton, "nope")


def test_failed_requests_are_traced_too(triton: Triton, tmp_path: Path) -> None:
    change(triton, trace_level=["TIMESTAMPS"], trace_rate="1", log_frequency="1")
    with pytest.raises(InferenceServerException):
        triton.infer("affine", [triton.input("x", X[:, :2])])
    ask(triton)
    assert len(traces(tmp_path / "trace.0")) == 2


def test_traces_that_wait_are_written_at_shutdown(tmp_path: Path) -> None:
    model = str(onnx_models.affine(tmp_path))
    with ingot.serve(model, http_port=0, grpc_port=0, trace=tmp_path / "trace") as server:
        for both in clients(server):
            change(both["grpc"], trace_level=["TIMESTAMPS"], trace_rate="1")
            ask(both["grpc"], 3)
        assert not (tmp_path / "trace.0").exists()
    assert len(traces(tmp_path / "trace.0")) == 6


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"trace_file": "/tmp/x"}, "cannot change 'trace_file'"),
        ({"trace_mode": "opentelemetry"}, "cannot change 'trace_mode'"),
        ({"trace_level": ["TENSORS"]}, "tensors are not traced"),
        ({"trace_rate": "0"}, "at least 1"),
        ({"trace_rate": "x"}, "at least 1"),
        ({"trace_count": "-2"}, "at least -1"),
        ({"log_frequency": "-1"}, "at least 0"),
        ({"rate": "1"}, "no trace setting 'rate'"),
    ],
    ids=str,
)
def test_wrong_settings_change_nothing(triton: Triton, wanted: dict[str, Any], says: str) -> None:
    before = read(triton)
    with pytest.raises(InferenceServerException, match=says):
        change(triton, **{"trace_count": "5", **wanted})
    assert read(triton) == before


def test_by_default_clients_only_read_them(server: RunningServer, protocol: str) -> None:
    for both in clients(server):
        assert read(both[protocol])["trace_file"] == ""
        assert plain(both[protocol].client.update_trace_settings())["trace_level"] == ["OFF"]
        with pytest.raises(InferenceServerException, match="--trace FILE allows it"):
            change(both[protocol], trace_level=["TIMESTAMPS"])


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    model = str(onnx_models.affine(tmp_path))
    with pytest.raises(InvalidArgument, match="folder is missing"):
        ingot.serve(model, http_port=0, grpc_port=0, trace=tmp_path / "none" / "trace")
