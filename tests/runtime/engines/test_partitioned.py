"""Plans of several parts; those that PyTorch runs are made in tests/export/lower/test_partition.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ingot.errors import InvalidArchive, InvalidArgument, Unsupported
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import PartitionPlan, Segment
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.tensors import DType, Signature, TensorSpec
from tests import onnx_models

SHAPE = ("batch", 3)
X, Y, W = (TensorSpec(name, DType.FP32, SHAPE) for name in "xyw")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts as blobs: y, z = 2 x + 1, -x; and w = y z."""
    kind = onnx.TensorProto.FLOAT
    takes, gives = [("y", kind, SHAPE), ("z", kind, SHAPE)], [("w", kind, SHAPE)]
    nodes = [onnx.helper.make_node("Mul", ["y", "z"], ["w"])]
    for path in (onnx_models.affine(tmp_path), onnx_models.save(tmp_path / "product.onnx", nodes, takes, gives)):
        path.rename(tmp_path / digest(path.stem))
    return tmp_path


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def segment(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], blob: str = "") -> Segment:
    return Segment(format="onnx", blob=blob or digest(name), inputs=inputs, outputs=outputs)


def plan(folder: Path, **changes: Any) -> Path:
    """Write a plan of one part, y, z = affine(x), that returns z as w and x as y; ``changes`` are made unchecked."""
    fields = {
        "signature": Signature((X,), (W, Y), "batch"),
        "segments": (segment("affine", ("x",), ("y", "z")),),
        "outputs": ("z", "x"),
    }
    path = folder / "plan"
    path.write_bytes(manifest.encode(PartitionPlan.model_construct(**{"schema_version": 1, **fields, **changes})))
    return path


def _unchecked(**changes: Any) -> Segment:
    fields = {"format": "onnx", "blob": digest("affine"), "inputs": ("x",), "outputs": ("z",)}
    return Segment.model_construct(**{**fields, **changes})


def load(path: Path) -> Engine:
    return load_engine(EngineSpec(path, format="partitioned", device="cpu", threads=1, allow_code=True))


def test_values_flow_from_part_to_part_and_out(folder: Path) -> None:
    parts = (segment("affine", ("x",), ("y", "z")), segment("product", ("y", "z"), ("w",)))
    engine = load(plan(folder, signature=Signature((X,), (W,), "batch"), segments=parts, outputs=("w",)))
    assert engine.run({"x": np.array([[1, 2, 3]], np.float32)})["w"].tolist() == [[-3, -10, -21]]


def test_outputs_may_be_any_values_also_inputs(folder: Path) -> None:
    engine = load(plan(folder))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = engine.run({"x": x})
    assert np.array_equal(answer["w"], -x)
    assert np.array_equal(answer["y"], x)
    answer["y"][...] = 7
    assert np.array_equal(x, np.arange(6).reshape(2, 3))
    assert engine.signature == Signature((X,), (W, Y), "batch")
    assert (engine.device, engine.platform) == ("cpu", "ingot_partitioned")
    engine.close()


def test_a_value_that_is_returned_twice_is_two_arrays(folder: Path) -> None:
    engine = load(plan(folder, outputs=("z", "z")))
    answer = engine.run({"x": np.ones((1, 3), np.float32)})
    answer["w"][...] = 7
    assert answer["y"].tolist() == [[-1, -1, -1]]
    engine.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"segments": (segment("product", ("x", "v"), ("z",)),)}, "uses a value that no earlier segment produces"),
        ({"segments": (segment("affine", ("x",), ("x", "z")),)}, "produces a value that exists already"),
        ({"outputs": ("z",)}, "its outputs are not values"),
        ({"outputs": ("z", "v")}, "its outputs are not values"),
        ({"segments": ()}, "at least 1 item"),
        (
            {"segments": (Segment.model_construct(format="onnx", blob="../x", inputs=("x",), outputs=("z",)),)},
            "pattern",
        ),
        ({"segments": (_unchecked(format="aoti"),)}, "'onnx'"),
        ({"schema_version": 2}, "schema_version"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(folder: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArchive, match=rf"the plan is not valid.*{says}"):
        load(plan(folder, **changes))


def test_parts_must_have_the_signature_of_the_plan(folder: Path) -> None:
    with pytest.raises(InvalidArchive, match="differ from those in the plan"):
        load(plan(folder, segments=(segment("affine", ("x",), ("z",)),)))


def test_a_missing_part_is_reported(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no model file"):
        load(plan(folder, segments=(segment("none", ("x",), ("z",)),)))
    with pytest.raises(InvalidArgument, match=r"the plan .* cannot be read"):
        load(folder / "no plan")


def test_a_plan_is_loaded_only_where_code_is_allowed(folder: Path) -> None:
    with pytest.raises(Unsupported, match="format 'partitioned' can run its author's code"):
        load_engine(EngineSpec(plan(folder), format="partitioned"))
