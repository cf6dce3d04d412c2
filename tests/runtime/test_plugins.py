"""Engines and devices of another package, which is found by its metadata on ``sys.path``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, InternalError, InvalidArgument, Unsupported
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.gpu import opening
from ingot.runtime.machine import plugins
from tests import onnx_models
from tests.runtime import variants
from tests.runtime.variants import Made

PACKAGE = Path(__file__).parent / "plugin"
FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "isolate": "none"}
X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PACKAGE)
    opening.open_device.cache_clear()
    yield
    opening.open_device.cache_clear()


@pytest.mark.matrix
@pytest.mark.usefixtures("installed")
def test_an_engine_and_a_device_of_a_plug_in_serve_over_http(tmp_path: Path) -> None:
    path = str(onnx_models.affine(tmp_path))
    settings: dict[str, Any] = {"engine": "reference", "device": "slate:0,1", **FREE}
    with ingot.serve(path, **settings) as server, ingot.Client(server.http_url) as client:
        for number in range(10):
            assert client.infer("affine", {"x": number * X})["y"].tolist() == (2 * number * X + 1).tolist()
        assert client.metadata("affine")["platform"] == "onnx_reference"
        [status] = server.status()
        assert (status["state"], status["device"]) == ("ready", "slate:0")
        used = [opening.open_device(f"slate:{index}") for index in range(2)]
        assert all(device.blocks for device in used)  # type: ignore[attr-defined]
    assert not any(device.blocks for device in used)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("count", [1, 2])
def test_the_configured_engine_runs_a_variant_that_names_another(count: int, tmp_path: Path) -> None:
    seconds = variants.timed(1e-4)  # of ONNX Runtime, so not valid for another engine
    made = [Made(name, requires={"engine": "onnxruntime"}, evidence=seconds) for name in "ab"[:count]]
    variants.archive(made).save(tmp_path / "double.ingot")
    settings: dict[str, Any] = {"engine": "reference", "device": "slate:1", "choice_time": 0.001, **FREE}
    with ingot.serve(str(tmp_path / "double.ingot"), **settings) as server, ingot.Client(server.http_url) as client:
        assert np.allclose(client.infer("double", {"x": variants.X})["y"], 2 * variants.X)
        metadata = client.metadata("double")
        assert metadata["platform"] == "onnx_reference"
        assert metadata["properties"]["variant_reason"] == ("only" if count == 1 else "measured")
        assert server.status()[0]["device"] == "slate:1"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Made("wrong", requires={"engine": "onnxruntime"}, goldens=(variants.WRONG,)), "does not reproduce its golden"),
        (
            Made("code", format="pt2", graph=b"code"),
            r"'reference' \(--engine\) runs variants of format 'onnx'.*leave out",
        ),
    ],
)
def test_a_configured_engine_that_computes_something_else_or_nothing_is_refused(
    made: Made, message: str, tmp_path: Path
) -> None:
    variants.archive([made]).save(tmp_path / "double.ingot")
    with (
        pytest.raises(IngotError, match=message),
        ingot.serve(str(tmp_path / "double.ingot"), engine="reference", allow_code=True, **FREE),
    ):
        pass


@pytest.mark.usefixtures("installed")
def test_outputs_that_do_not_fit_the_signature_are_errors_of_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(onnx_models.affine(tmp_path))
    with ingot.serve(path, engine="faulty", **FREE) as server, ingot.Client(server.http_url) as client:
        assert client.infer("affine", {"x": X})["y"].tolist() == (2 * X + 1).tolist()
        for x in (np.repeat(X, 2, axis=0), -X):
            with pytest.raises(InternalError, match="answered 500"):
                client.infer("affine", {"x": x})
    assert "'y' as float32 [1, 3] for 2 samples, but the model's signature is y:float32[" in caplog.text
    assert "'y' as float64 [1, 3] for 1 samples" in caplog.text


@pytest.mark.usefixtures("installed")
def test_a_format_that_only_a_plug_in_reads(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Unsupported, match="--allow-code"):
        load_engine(EngineSpec(path, format="reference"))
    engine = load_engine(EngineSpec(path, format="reference", allow_code=True))
    assert engine.run({"x": X})["y"].tolist() == (2 * X + 1).tolist()
    engine.close()


@pytest.mark.usefixtures("installed")
def test_faults_of_plug_ins_name_them(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    assert plugins.names("ingot.engines") == ["broken", "faulty", "reference"]
    with pytest.raises(Unsupported, match=r"'broken' of ingot.engines \(ingot_reference:missing\) cannot be loaded"):
        load_engine(EngineSpec(path, engine="broken"))
    with pytest.raises(Unsupported, match="there is no slate:2"):
        load_engine(EngineSpec(path, engine="reference", device="slate:2"))
    with pytest.raises(Unsupported, match="unknown device 'stone:0'; there are cpu, cuda, paper, slate"):
        load_engine(EngineSpec(path, engine="reference", device="stone:0"))
    with pytest.raises(
        Unsupported, match="'none'; there are onnxruntime, openvino, tensorrt, broken, faulty, reference"
    ):
        load_engine(EngineSpec(path, engine="none"))
    with pytest.raises(InvalidArgument, match=r"no device 'slate:0'.*--engine"):
        load_engine(EngineSpec(path, device="slate:0"))
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(InvalidArgument, match=r"'reference' cannot load text\.onnx"):
        load_engine(EngineSpec(tmp_path / "text.onnx", engine="reference", device="slate:0"))


def test_an_engine_of_another_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find", lambda group, name: lambda path, **options: path)
    remedy = "opens an object of the class PosixPath.*derive the class from ingot.runtime.engines.engine.BaseEngine"
    with pytest.raises(Unsupported, match=remedy):
        load_engine(EngineSpec(onnx_models.affine(tmp_path), engine="plain"))


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Unsupported, match="unknown engine 'reference'"):
        load_engine(EngineSpec(path, engine="reference"))
    assert plugins.find("ingot.engines", "reference") is None
