"""Recording live requests: which are written, and that no request waits for it."""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import Client
from ingot.errors import InvalidArgument
from ingot.model_store import Golden
from ingot.model_store.format import goldens
from ingot.runtime import Metrics
from ingot.server.plane import recorder
from ingot.server.plane.recorder import Recorder
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.server import test_steps
from tests.server.samples import sample
from tests.server.test_lifecycle import running
from tests.support import RunIngot, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu", "record_share": 1.0}


def cases(folder: Path) -> list[Golden]:
    return [case for path in sorted(folder.glob("*.safetensors")) for case in goldens.decode(path.read_bytes())]


def row(value: float) -> dict[str, Array]:
    return {"x": np.full((1, 3), value, np.float32)}


def counted(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"ingot_{name}_total", {"model": "m", "version": "1"}) or 0.0


def test_requests_over_both_protocols_are_written_with_their_answers(tmp_path: Path) -> None:
    model, folder = str(onnx_models.affine(tmp_path)), tmp_path / "made" / "recorded"
    with ingot.serve(model, record=folder, **FREE) as server:
        for number, url in enumerate((server.http_url, server.grpc_url)):
            with Client(url) as client:
                client.infer("affine", row(number))
                client.infer("affine", row(number + 10), outputs=["z"])
                with pytest.raises(InvalidArgument):
                    client.infer("affine", {"x": np.ones((1, 2), np.float32)})
    found = cases(folder / "affine" / "1")
    assert sorted(case.inputs["x"][0, 0] for case in found) == [0, 1, 10, 11]
    for case in found:
        assert np.array_equal(case.outputs["y"], 2 * case.inputs["x"] + 1)
        assert np.array_equal(case.outputs["z"], -case.inputs["x"])


def test_raw_requests_are_written_with_their_answers_and_sent_again(tmp_path: Path, run_ingot: RunIngot) -> None:
    test_steps.make(tmp_path).save(tmp_path / "length.ingot")
    folder = tmp_path / "recorded"
    model = str(tmp_path / "length.ingot")
    texts = {"text": np.array([b"a fine film", b"good"], object)}
    tensors = {name: np.ones((1, 4), np.int64) for name in ("input_ids", "attention_mask")}
    with ingot.serve(model, record=folder, **FREE) as server, Client(server.http_url) as client:
        answers = client.infer("length", texts)
        client.infer("length", tensors)
    [path] = (folder / "length" / "1").glob("*.safetensors")
    raw, plain = goldens.decode(path.read_bytes())
    assert raw.raw["text"].tolist() == texts["text"].tolist()
    assert {name: value.tolist() for name, value in raw.answers.items()} == {
        name: value.tolist() for name, value in answers.items()
    }
    assert (raw.inputs, raw.outputs, plain.raw, plain.answers) == ({}, {}, {}, {})
    assert plain.inputs.keys() == tensors.keys()
    with ingot.serve(model, **FREE) as server:
        sent = run_ingot(
            "bench", server.http_url, "length", "--data", path, "--clients", "1", "--seconds", "1", "--json"
        )
    report = json.loads(succeeded(sent))
    assert report["payload"].startswith("text BYTES[2], from ")
    assert report["points"][0]["failed"] == 0


@pytest.mark.matrix
def test_the_command_writes_what_waits_when_it_is_stopped(tmp_path: Path) -> None:
    model, folder = str(onnx_models.affine(tmp_path)), tmp_path / "recorded"
    options = ("--record", str(folder), "--record-share", "1", "--record-limit", "2", "--record-limit-mb", "1")
    with running(model, *options, home=tmp_path) as (process, addresses):
        with Client(addresses["http"]) as client:
            for number in range(4):
                client.infer("affine", row(number))
        process.terminate()
        assert process.wait(30) == 0
    assert [case.inputs["x"][0, 0] for case in cases(folder / "affine" / "1")] == [0, 1]


def test_only_this_user_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    kept = Recorder(folder, 1.0, 10, 1 << 20, Metrics())
    kept.offer("m", "1", Golden(row(1), row(2)))
    kept.close()
    for path in (folder, folder / "m", folder / "m" / "1"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (file,) = (folder / "m" / "1").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("dtype", list(DType))
def test_every_datatype_is_recorded_unchanged(tmp_path: Path, dtype: DType) -> None:
    kept = Recorder(tmp_path, 1.0, 10, 1 << 20, Metrics())
    kept.offer("m", "1", Golden({"x": sample(dtype)}, {"y": sample(dtype)}))
    kept.close()
    (case,) = cases(tmp_path / "m" / "1")
    assert np.array_equal(case.inputs["x"], sample(dtype))
    assert np.array_equal(case.outputs["y"], sample(dtype))


def test_a_share_is_taken_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.05, 0.5, 0.09, 0.1])
    monkeypatch.setattr("ingot.server.plane.recorder.random.random", lambda: next(draws))
    kept = Recorder(tmp_path, 0.1, 10, 1 << 20, Metrics())
    for number in range(4):
        kept.offer("m", "1", Golden(row(number), {}))
    kept.close()
    assert [case.inputs["x"][0, 0] for case in cases(tmp_path / "m" / "1")] == [0, 2]


def test_the_limits_hold_for_each_model_and_over_several_runs(tmp_path: Path) -> None:
    for start in (0, 10, 20):
        metrics = Metrics()
        kept = Recorder(tmp_path, 1.0, 150, 1 << 20, metrics)
        for number in range(70):
            kept.offer("m", "1", Golden(row(start + number), {}))
            kept.offer("other", "1", Golden(row(number), {}))
        kept.close()
        assert counted(metrics, "recorded_requests") == {0: 70, 10: 70, 20: 10}[start]
        assert counted(metrics, "recorded_dropped") == 0
    assert len(cases(tmp_path / "m" / "1")) == 150
    assert len(cases(tmp_path / "other" / "1")) == 150
    bytes_limited = Recorder(tmp_path, 1.0, 10_000, 1 << 20, Metrics())
    for _ in range(10):
        bytes_limited.offer("large", "1", Golden({"x": np.zeros((1, 50_000), np.float32)}, {}))
    bytes_limited.close()
    assert len(cases(tmp_path / "large" / "1")) == 5


def test_a_slow_disk_delays_no_request_and_excess_records_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, encode = threading.Event(), goldens.encode

    def wait(waiting: list[Golden]) -> bytes:
        disk.wait(30)
        return encode(waiting)

    monkeypatch.setattr("ingot.server.plane.recorder.goldens.encode", wait)
    metrics = Metrics()
    kept = Recorder(tmp_path, 1.0, 10_000, 1 << 30, metrics)
    for number in range(recorder._MAX_WAITING + 50):
        kept.offer("m", "1", Golden(row(number), {}))
    assert counted(metrics, "recorded_dropped") == 50
    disk.set()
    kept.close()
    assert counted(metrics, "recorded_requests") == recorder._MAX_WAITING == len(cases(tmp_path / "m" / "1"))


def test_waiting_records_are_bounded_in_bytes_too(tmp_path: Path) -> None:
    metrics = Metrics()
    kept = Recorder(tmp_path, 1.0, 10_000, 1 << 30, metrics)
    kept.offer("m", "1", Golden({"x": np.broadcast_to(np.float32(0), (1, recorder._MAX_WAITING_BYTES))}, {}))
    kept.close()
    assert (counted(metrics, "recorded_dropped"), counted(metrics, "recorded_requests")) == (1, 0)


def test_it_is_written_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_FLUSH_SECONDS", 0.01)
    kept = Recorder(tmp_path, 1.0, 10, 1 << 20, Metrics())
    kept.offer("m", "1", Golden(row(1), {}))
    deadline = time.monotonic() + 30
    while not cases(tmp_path / "m" / "1"):
        assert time.monotonic() < deadline
    kept.close()


def test_a_folder_that_cannot_be_written_later_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    kept = Recorder(tmp_path / "recorded", 1.0, 10, 1 << 20, metrics)
    (tmp_path / "recorded" / "m").write_text("in the way")
    kept.offer("m", "1", Golden(row(1), {}))
    kept.offer("n", "1", Golden(row(1), {}))
    kept.close()
    assert (counted(metrics, "recorded_dropped"), counted(metrics, "recorded_requests")) == (1, 0)
    assert "1 requests could not be recorded" in caplog.text
    assert len(cases(tmp_path / "recorded" / "n" / "1")) == 1


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_file_of_an_earlier_run_is_not_written_over(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "000064.safetensors").write_bytes(content)
    (folder / "notes.safetensors").write_bytes(content)
    kept = Recorder(tmp_path, 1.0, 1000, 1 << 20, Metrics())
    kept.offer("m", "1", Golden(row(1), {}))
    kept.close()
    assert (folder / "000064.safetensors").read_bytes() == content
    assert len(goldens.decode((folder / "000128.safetensors").read_bytes())) == 1


def test_a_bad_folder_is_refused_at_start(tmp_path: Path) -> None:
    model = str(onnx_models.affine(tmp_path))
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidArgument, match=r"requests cannot be recorded in .*file.*give --record"):
            ingot.serve(model, record=folder, **FREE)
    folder = tmp_path / "recorded"
    with (
        ingot.serve(model, record=folder, **FREE),
        pytest.raises(InvalidArgument, match="another server records in"),
    ):
        ingot.serve(model, record=folder, **FREE)
    with ingot.serve(model, record=folder, **FREE):  # the first one has let it go
        pass


@pytest.mark.matrix
def test_a_server_that_cannot_start_releases_the_folder(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="cannot load"):
            ingot.serve(str(broken), record=tmp_path / "recorded", **FREE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_share": 0}, "record_share is"),
        ({"record_share": 1.5}, "record_share is"),
        ({"record_limit": 0}, "limit"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ingot.serve(str(onnx_models.affine(tmp_path)), **{**FREE, **settings})


@pytest.mark.matrix
def test_nothing_is_recorded_unless_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(onnx_models.affine(tmp_path))
    with ingot.serve(model, **FREE) as server, Client(server.http_url) as client:
        client.infer("affine", row(1))
        assert "ingot_recorded_requests_total{" not in client.metrics()
    monkeypatch.setenv("INGOT_RECORD", str(tmp_path / "recorded"))
    with ingot.serve(model, **FREE) as server, Client(server.http_url) as client:
        client.infer("affine", row(1))
    assert len(cases(tmp_path / "recorded" / "affine" / "1")) == 1
