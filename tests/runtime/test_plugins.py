"""Engines and devices of another package, which is found by its metadata on ``sys.path``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import InvalidArgument, Unsupported
from ingot.runtime import load_engine, plugins
from tests import onnx_models

PACKAGE = Path(__file__).parent / "plugin"
FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "isolate": "none"}
X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PACKAGE)
    plugins.open_device.cache_clear()
    yield
    plugins.open_device.cache_clear()


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
        used = [plugins.open_device(f"slate:{index}") for index in range(2)]
        assert all(device.blocks for device in used)  # type: ignore[attr-defined]
    assert not any(device.blocks for device in used)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("installed")
def test_a_format_that_only_a_plug_in_reads(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Unsupported, match="--allow-code"):
        load_engine(path, format="reference")
    engine = load_engine(path, format="reference", allow_code=True)
    assert engine.run({"x": X})["y"].tolist() == (2 * X + 1).tolist()
    engine.close()


@pytest.mark.usefixtures("installed")
def test_faults_of_plug_ins_name_them(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    assert plugins.names("ingot.engines") == ["broken", "reference"]
    with pytest.raises(Unsupported, match=r"'broken' of ingot.engines \(ingot_reference:missing\) cannot be loaded"):
        load_engine(path, engine="broken")
    with pytest.raises(Unsupported, match="there is no slate:2"):
        load_engine(path, engine="reference", device="slate:2")
    with pytest.raises(Unsupported, match="unknown device 'stone:0'; there are cpu, cuda, paper, slate"):
        load_engine(path, engine="reference", device="stone:0")
    with pytest.raises(Unsupported, match="'none'; there are onnxruntime, openvino, tensorrt, broken, reference"):
        load_engine(path, engine="none")
    with pytest.raises(InvalidArgument, match="unknown device 'slate:0'"):
        load_engine(path, device="slate:0")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(InvalidArgument, match=r"'reference' cannot load text\.onnx"):
        load_engine(tmp_path / "text.onnx", engine="reference", device="slate:0")


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Unsupported, match="unknown engine 'reference'"):
        load_engine(path, engine="reference")
    assert plugins.find("ingot.engines", "reference") is None
