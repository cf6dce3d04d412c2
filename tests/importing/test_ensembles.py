"""Ensembles of Triton, imported as pipelines."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import Store
from ingot.errors import InvalidArgument
from ingot.importing import Consent, candidates
from tests import onnx_models
from tests.importing.sources import CONFIG, triton
from tests.support import RunIngot, refused, succeeded

STEP = """{
  model_name: "%s" model_version: %d
  input_map { key: "x" value: "%s" }
  output_map { key: "y" value: "%s" }
}"""
TENSORS = """
platform: "ensemble" max_batch_size: 8
input { name: "INPUT" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def ensemble(*steps: tuple[str, int, str, str]) -> str:
    return f"{TENSORS} ensemble_scheduling {{ step [ {', '.join(STEP % step for step in steps)} ] }}"


TWICE = ensemble(("Affine", -1, "INPUT", "half"), ("Affine", 1, "half", "OUTPUT"))


def repository(folder: Path, **ensembles: str) -> Path:
    triton(folder / "Affine", CONFIG, {"1/model.onnx": onnx_models.affine(folder.parent).read_bytes()})
    for name, config in ensembles.items():
        triton(folder / name, config, {"1/ignored": b""})
    return folder


@pytest.mark.matrix
def test_an_ensemble_answers_as_its_models_do(tmp_path: Path, run_ingot: RunIngot) -> None:
    store, config = tmp_path / "store", tmp_path / "ingot.toml"
    source = repository(tmp_path / "models", twice=TWICE)
    config.write_text(succeeded(run_ingot("import", str(source), "--store", str(store))))
    with ingot.serve(store=Store(store), config=config, http_port=0, grpc_port=0) as server:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        once = server.infer("Affine", {"x": x})["y"]
        np.testing.assert_array_equal(
            server.infer("twice", {"INPUT": x})["OUTPUT"], server.infer("Affine", {"x": once})["y"]
        )


def lines(path: Path) -> dict[str, Any]:
    with candidates(path, Consent()) as found:
        (one,) = (item for item in found if item.called == "twice")
        if not one.lines:
            one.read()
        return tomllib.loads(one.lines)


def test_a_model_may_have_several_steps(tmp_path: Path) -> None:
    found = lines(repository(tmp_path / "models", twice=TWICE))
    assert found["model"] == [{"name": "Affine", "source": "affine:1"}]
    assert found["pipelines"]["twice"] == {
        "inputs": ["INPUT"],
        "outputs": {"OUTPUT": "Affine_2.y"},
        "nodes": {
            "Affine": {"model": "Affine", "inputs": {"x": "INPUT"}},
            "Affine_2": {"model": "Affine", "inputs": {"x": "Affine.y"}},
        },
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ensemble(("Affine", 1, "INPUT", "OTHER")), "no step makes 'OUTPUT'"),
        (ensemble(("Affine", 1, "nothing", "OUTPUT")), "no step makes 'nothing'"),
        (ensemble(("other", 1, "INPUT", "OUTPUT")), "its step 'other' is an ensemble"),
        (ensemble(("Affine", 1, "INPUT", "x"), ("Affine", 1, "INPUT", "OUTPUT")), "nothing reads an output of node"),
        (ensemble(("Affine", 1, "x", "OUTPUT"), ("Affine", 1, "OUTPUT", "x")), "no node reads input 'INPUT'"),
    ],
)
def test_what_cannot_become_a_pipeline(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        lines(repository(tmp_path / "models", twice=config, other=TWICE))


def test_the_command_refuses_an_ensemble_by_its_fault(tmp_path: Path, run_ingot: RunIngot) -> None:
    source = repository(tmp_path / "models", twice=ensemble(("Affine", 1, "INPUT", "OTHER"))) / "twice"
    assert "no step makes 'OUTPUT'" in refused(run_ingot("import", str(source)))
