"""ONNX files as the source: they are described, proved against themselves and packed like any model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.errors import InvalidArgument, NotFound
from ingot.export import export_model
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import DType, Range
from tests import onnx_models


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", list(DType))
def test_a_file_of_any_datatype(tmp_path: Path, dtype: DType) -> None:
    archive = export_model(onnx_models.identity(tmp_path, dtype))
    assert archive.name == f"identity-{dtype.value.lower()}"
    assert archive.signature.batch == "batch"
    assert str(archive.signature.inputs[0]) == f"x:{dtype.torch_name}[batch,2]"
    (first, _) = archive.variant().goldens()
    assert first.outputs["y"].tolist() == first.inputs["x"].tolist()


def test_the_archive_answers_as_the_file_does(tmp_path: Path) -> None:
    archive = export_model(onnx_models.affine(tmp_path), name="team/affine")
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    assert engine.run({"x": np.array([[1, 2, 3]], np.float32)})["y"].tolist() == [[3, 5, 7]]
    engine.close()
    assert archive.name == "team/affine"


def test_its_dynamic_dimensions_can_be_renamed_and_bounded(tmp_path: Path) -> None:
    """One description suffices: a name that two inputs share is renamed in both."""
    archive = export_model(onnx_models.pair(tmp_path), inputs=["a:float32[N,L=2..8]"], batch_dim="N")
    assert [str(spec) for spec in (*archive.signature.inputs, *archive.signature.outputs)] == [
        "a:float32[N,L]",
        "b:float32[N,L]",
        "y:float32[N,L]",
    ]
    assert archive.signature.batch == "N"
    assert archive.signature.ranges == {"L": Range(2, 8)}


def test_a_dynamic_dimension_can_be_fixed(tmp_path: Path) -> None:
    archive = export_model(onnx_models.pair(tmp_path), inputs=["a:float32[batch,4]"])
    assert {spec.shape for spec in archive.signature.inputs} == {("batch", 4)}


def test_rows_that_touch_are_never_joined(tmp_path: Path) -> None:
    archive = export_model(onnx_models.unbatched(tmp_path), inputs=["x:float32[batch]"])
    assert archive.signature.batch is None
    assert "depends on the other samples" in "".join(archive.variant().serving.provenance.notes)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["c:float32[N,L]"], r"has no input 'c'; it has: a:float32\[batch,seq\], b:float32\[batch,seq\]"),
        (["a:int32[N,L]"], "which does not fit the declared a:int32"),
        (["a:float32[N]"], r"which does not fit the declared a:float32\[N\]"),
        (["a:float32[N,L]", "b:float32[M,L]"], "dimension 'batch' is called both 'N' and 'M'"),
    ],
)
def test_a_description_that_does_not_fit_the_file(tmp_path: Path, inputs: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        export_model(onnx_models.pair(tmp_path), inputs=inputs)


def test_a_fixed_dimension_of_the_file_stays(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"is x:float32\[batch,3\], which does not fit the declared x:float32\[batch,4\]"
    ):
        export_model(onnx_models.affine(tmp_path), inputs=["x:float32[batch,4]"])


@pytest.mark.parametrize("content", [b"", b"text", bytes(100)])
def test_what_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"x\.onnx"):
        export_model(tmp_path / "x.onnx")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        export_model(tmp_path / "x.onnx")
