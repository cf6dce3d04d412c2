"""An archive of several variants, served without naming one: the choice, its reports, and how to change it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import numpy as np
import onnx
import pytest

import ingot
from ingot import Client, RunningServer
from ingot.errors import InvalidArgument, NotFound, Unsupported
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.loading import comparison, load_spec
from tests.runtime.variants import WRONG, Made, X, archive, timed
from tests.server.test_lifecycle import running

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
GPU = {"device": "cuda"}
SLOW, FAST, HALF = Made("fp32", 60), Made("int8", 1), Made("bf16", 2, requires=GPU)


@pytest.fixture(scope="module", autouse=True)
def work_is_time() -> Iterator[None]:
    """Set an engine's time to the number of its graph's nodes, regardless of this machine."""
    cost: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def loaded(spec: EngineSpec, isolation: Isolation | None) -> Any:
        engine = load_engine(spec, isolation)
        cost[engine] = len(onnx.load(spec.path, load_external_data=False).graph.node)
        return engine

    def measured(engines: Sequence[Any], *_: Any) -> list[dict[int, float]]:
        return [{1: 1e-3 * cost[engine]} for engine in engines]

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(load_spec, "load_engine", loaded)
        patching.setattr(comparison, "measured", measured)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variants") / "double.ingot"
    archive([HALF, SLOW, FAST]).save(path)
    return path


@pytest.fixture(scope="module")
def served(saved: Path) -> Iterator[RunningServer]:
    """The archive by itself, and each of its variants by name."""
    sources = (str(saved), *(f"{name}={saved}#{name}" for name in ("bf16", "fp32")))
    with ingot.serve(*sources, **FREE) as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
class TestBothProtocols:
    @pytest.mark.matrix
    def test_the_fastest_that_runs_here_is_served_and_reported(self, served: RunningServer, protocol: str) -> None:
        with Client(served.http_url if protocol == "http" else served.grpc_url) as client:
            told = client.metadata("double")["properties"]
            assert np.allclose(client.infer("double", {"x": X})["y"], 2 * X)
        assert (told["variant"], told["variant_reason"]) == ("int8", "measured")
        assert "int8 is" in told["variant_detail"]
        assert "times as fast as fp32 (batch 1: " in told["variant_detail"]

    def test_a_named_variant_is_always_served(self, served: RunningServer, protocol: str) -> None:
        with Client(served.http_url if protocol == "http" else served.grpc_url) as client:
            for name in ("fp32", "bf16"):
                told = client.metadata(name)["properties"]
                assert told.pop("digest").startswith("sha256:")
                assert told == {"variant": name, "variant_reason": "requested"}
                assert np.allclose(client.infer(name, {"x": X})["y"], 2 * X)


def test_the_metrics_report_it_too(served: RunningServer) -> None:
    text = httpx.get(f"{served.http_url}/metrics", trust_env=False).text
    assert 'ingot_model_variant_info{model="double",reason="measured",variant="int8",version="1"} 1.0' in text
    assert 'ingot_model_variant_info{model="fp32",reason="requested",variant="fp32",version="1"} 1.0' in text


@pytest.mark.matrix
def test_a_bare_file_has_no_variant(http: httpx.Client) -> None:
    assert "properties" not in http.get("/v2/models/affine").json()
    assert "ingot_model_variant_info{" not in http.get("/metrics").text


def test_the_log_explains_the_choice_and_the_variants_left_out(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot"), ingot.serve(str(saved), **FREE):
        pass
    (line,) = [record.message for record in caplog.records if record.name == "ingot.runtime.loading.choice"]
    assert line.startswith("model double: variant int8, measured: int8 is ")
    assert line.endswith("left out: bf16: it is made for GPUs, and the device is 'cpu'")


@pytest.mark.matrix
def test_times_in_the_archive_of_this_machine_are_not_measured_again() -> None:
    fast = Made("int8", 2, evidence=timed(0.001, baseline=0.003), parent="fp32")
    made = archive([Made("fp32", 1, evidence=timed(0.002)), fast])
    with ingot.serve(made, **FREE) as server, Client(server.http_url) as client:
        told = client.metadata("double")["properties"]
    assert (told["variant"], told["variant_reason"]) == ("int8", "recorded")
    assert told["variant_detail"] == "int8 is 3.00 times as fast as fp32 (batch 1: 3.00, batch 8: 3.00)"


@pytest.mark.matrix
def test_the_order_of_the_archive_can_be_kept(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGOT_VARIANT_CHOICE", "preferred")
    with ingot.serve(str(saved), **FREE) as server, Client(server.http_url) as client:
        told = client.metadata("double")["properties"]
    assert (told["variant"], told["variant_reason"]) == ("fp32", "preferred")
    with pytest.raises(InvalidArgument, match=r"^variant_choice is 'first'"):
        ingot.serve(str(saved), variant_choice="first", **FREE)  # type: ignore[arg-type]
    options = ("--variant-choice", "preferred", "--device", "cpu")
    with running(str(saved), *options, home=tmp_path) as (_, addresses):
        (model,) = addresses["models"]
    assert (model["variant"], model["properties"]["variant_reason"]) == ("fp32", "preferred")


@pytest.mark.matrix
def test_a_variant_that_does_not_run_here_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = archive([Made("damaged", graph=b"no model"), Made("wrong", goldens=(WRONG,)), SLOW])
    with caplog.at_level(logging.WARNING), ingot.serve(made, **FREE) as server, Client(server.http_url) as client:
        told = {"digest": made.digest, "variant": "fp32", "variant_reason": "only"}
        assert client.metadata("double")["properties"] == told
    assert "variant damaged is left out: ONNX Runtime cannot load" in caplog.text
    assert "variant wrong is left out: model 'double' does not reproduce its golden" in caplog.text


@pytest.mark.matrix
def test_formats_that_can_run_code_are_left_out_and_not_an_error() -> None:
    code = Made("aoti", format="aoti", graph=b"native code")
    with ingot.serve(archive([code, SLOW]), **FREE) as server, Client(server.http_url) as client:
        assert client.metadata("double")["properties"]["variant"] == "fp32"
    with pytest.raises(Unsupported, match=r"no variant of model 'double' can run here: aoti: .*--allow-code.*; bf16: "):
        ingot.serve(archive([code, HALF]), **FREE)
    with pytest.raises(Unsupported, match="if you trust its source"):
        ingot.serve(archive([code]), **FREE)


def test_a_named_variant_is_served_with_a_warning_where_it_does_not_belong(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = archive([Made("int8", evidence=timed(0.001, holds=False))])
    with ingot.serve(f"{saved}#bf16", "quick=" + _file(broken, saved), **FREE):
        pass
    assert "variant bf16 may not run well here: it is made for GPUs, and the device is 'cpu'" in caplog.text
    assert "model quick: variant int8 exceeded its accuracy budget" in caplog.text


def _file(made: ingot.Archive, beside: Path) -> str:
    path = beside.with_name("quick.ingot")
    made.save(path)
    return str(path)


def test_a_name_that_no_variant_has(saved: Path) -> None:
    with pytest.raises(NotFound, match=r"no variant 'nope'; it has: bf16, fp32, int8"):
        ingot.serve(f"{saved}#nope", **FREE)


@pytest.mark.parametrize(("instances", "reason"), [(1, "recorded"), (2, "measured")])
def test_a_quantized_model_is_chosen_by_what_was_measured_when_it_was_made_if_it_runs_like_that(
    digits_archive: Path, instances: int, reason: str
) -> None:
    settings = {**FREE, "instances": instances}
    with ingot.serve(str(digits_archive), **settings) as server, Client(server.http_url) as client:
        told = client.metadata("digits")["properties"]
        assert client.infer("digits", {"image": np.zeros((1, 1, 8, 8), np.float32)})["logits"].shape == (1, 10)
    assert told["variant"] in ("int8", "fp32")
    assert told["variant_reason"] == reason
