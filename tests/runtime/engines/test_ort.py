from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.errors import InvalidArgument, Unsupported
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.machine import devices
from ingot.runtime.profiling.profile import measure, repeat
from ingot.tensors import DType
from tests import onnx_models
from tests.server.samples import sample


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_every_datatype_round_trips(tmp_path: Path, dtype: DType) -> None:
    engine = load_engine(EngineSpec(onnx_models.identity(tmp_path, dtype)))
    assert engine.signature.inputs[0].dtype is dtype
    array = sample(dtype)
    result = engine.run({"x": array})["y"]
    assert result.dtype == array.dtype
    assert result.tolist() == array.tolist()


def test_the_batch_of_a_bare_file_is_taken_from_well_known_names_only(tmp_path: Path) -> None:
    assert load_engine(EngineSpec(onnx_models.affine(tmp_path))).signature.batch == "batch"
    assert load_engine(EngineSpec(onnx_models.unbatched(tmp_path))).signature.batch is None


def test_a_dimension_without_a_name_is_dynamic(tmp_path: Path) -> None:
    path = tmp_path / "nameless.onnx"
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    signature = load_engine(EngineSpec(path)).signature
    assert signature.inputs[0].wire_shape == [-1, 2]
    assert signature.batch is None


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no model file"):
        load_engine(EngineSpec(tmp_path / "none.onnx"))
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(InvalidArgument, match=r"cannot load text\.onnx"):
        load_engine(EngineSpec(tmp_path / "text.onnx"))


def test_positions_beyond_a_table_are_refused(tmp_path: Path) -> None:
    """ONNX Runtime fuses a gather of consecutive positions to a slice, which ends with the table."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Squeeze", ["shape"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["positions"]),
        helper.make_node("Gather", ["table", "positions"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["y"], keepdims=0),
    ]
    constants = [
        numpy_helper.from_array(np.arange(8, dtype=np.float32), "table"),
        numpy_helper.from_array(np.array(0), "zero"),
        numpy_helper.from_array(np.array(1), "one"),
    ]
    path = onnx_models.save(
        tmp_path / "m.onnx", nodes, [("x", TensorProto.FLOAT, ("n",))], [("y", TensorProto.FLOAT, ())], constants
    )
    with contextlib.closing(load_engine(EngineSpec(path))) as engine:
        assert engine.run({"x": np.zeros(8, np.float32)})["y"] == 3.5
        with pytest.raises(InvalidArgument, match="out of data bounds"):
            engine.run({"x": np.zeros(9, np.float32)})


def test_devices_that_cannot_be_had(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(InvalidArgument, match="auto, cpu, cuda"):
        load_engine(EngineSpec(path, device="tpu"))
    if not devices.has_cuda():
        with pytest.raises(Unsupported, match="not available"):
            load_engine(EngineSpec(path, device="cuda"))
        assert load_engine(EngineSpec(path, device="auto")).device == "cpu"


def test_a_value_that_the_model_rejects_is_the_callers_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = load_engine(EngineSpec(onnx_models.embedding(tmp_path)))
    with pytest.raises(InvalidArgument, match="out of data bounds"):
        engine.run({"ids": np.array([[10]])})
    assert capfd.readouterr() == ("", "")  # a client must not be able to fill the log


def test_the_profile_covers_the_batches(tmp_path: Path) -> None:
    engine = load_engine(EngineSpec(onnx_models.affine(tmp_path)))
    example = {"x": np.array([[1, 2, 3], [4, 5, 6]], np.float32)}
    profile = measure(engine, engine.signature, example, batches=(1, 4), budget=0.01)
    assert [item.rows for item in profile] == [1, 4]
    assert all(item.seconds > 0 for item in profile)
    assert repeat(engine.signature, example, 3)["x"].tolist() == [[1, 2, 3]] * 3


def test_rows_that_are_compared_with_each_other_are_not_a_batch(tmp_path: Path) -> None:
    """A matrix of similarities has the batch in both dimensions: batched, it would leak data between clients."""
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    path = onnx_models.save(
        tmp_path / "similar.onnx", nodes, [("x", kind, ("batch", 3))], [("y", kind, ("batch", "batch"))]
    )
    assert load_engine(EngineSpec(path)).signature.batch is None


def test_a_format_that_no_engine_runs(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="format 'pt2'"):
        load_engine(EngineSpec(onnx_models.affine(tmp_path), format="pt2"))
