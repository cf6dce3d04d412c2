"""ONNX files as other exporters write them: dimensions without names, other names for outputs, free sizes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot.errors import InvalidArgument
from ingot.export import export_model
from ingot.model_store import Archive
from ingot.runtime import EngineSpec, load_engine
from tests import onnx_models
from tests.support import RunIngot, refused, succeeded

FLOAT = TensorProto.FLOAT


def paddle(folder: Path) -> Path:
    """y = the mean of each image, as Paddle's exporter writes it: height and width are both called ``?``."""
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)]
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    output: onnx_models.Dims = ("p2o.DynamicDimension.3", 3)
    return onnx_models.save(
        folder / "paddle.onnx", nodes, [("x", FLOAT, ("?", 3, "?", "?"))], [("y", FLOAT, output)], [axes]
    )


def tensorflow(folder: Path) -> Path:
    """Classes of 8 bytes, as tf2onnx writes it: other names for outputs, and names of tensors with colons."""
    rng = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("table", (50, 4)), ("weight", (4, 16)), ("out", (16, 3)))
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids:0"], ["rows"]),
        helper.make_node("ReduceMax", ["rows"], ["pooled"], keepdims=0, axes=[1]),
        helper.make_node("MatMul", ["pooled", "weight"], ["wide"]),
        helper.make_node("Relu", ["wide"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "out"], ["label:0"]),
    ]
    inputs = [("ids:0", TensorProto.INT32, ("unk__214", 8))]
    path = folder / "tensorflow.onnx"
    return onnx_models.save(path, nodes, inputs, [("label:0", FLOAT, ("unk__215", 3))], constants, opset=17)


def halving(folder: Path, pad: int = 0) -> Path:
    """y = x + its halves doubled again, so that height and width must be even; ``pad`` needs as many columns more."""
    halves = helper.make_node("AveragePool", ["x"], ["half"], kernel_shape=[2, 2], strides=[2, 2])
    doubled = helper.make_node("Resize", ["half", "", "scales"], ["back"], mode="nearest")
    nodes = [halves, doubled, helper.make_node("Add", ["x", "back"], ["sum"])]
    nodes.append(helper.make_node("Pad", ["sum", "pads"], ["y"], mode="reflect"))
    constants = [
        numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"),
        numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 0, 0, pad]), "pads"),
    ]
    outputs = [("y", FLOAT, ("a", 1, "b", "c"))]
    return onnx_models.save(folder / "halving.onnx", nodes, [("x", FLOAT, ("n", 1, "h", "w"))], outputs, constants)


def notes(archive: Archive) -> str:
    return " | ".join(archive.variant().serving.provenance.notes)


def shown(archive: Archive) -> list[str]:
    return list(map(str, (*archive.signature.inputs, *archive.signature.outputs)))


def test_a_served_file_accepts_any_sizes_of_dimensions_with_one_name(tmp_path: Path) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 2, 4], "data": [[1.0] * 8] * 3}]}
    with ingot.serve(str(paddle(tmp_path)), http_port=0, grpc_port=0) as server:
        answer = httpx.post(f"{server.http_url}/v2/models/paddle/infer", json=body, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == [1, 1, 1]


def test_an_export_of_such_a_file_gets_distinct_dimensions_and_a_batch(tmp_path: Path) -> None:
    archive = export_model(paddle(tmp_path))
    assert archive.signature.batch == "batch"
    assert shown(archive) == ["x:float32[batch,3,x_2,x_3]", "y:float32[batch,3]"]


def test_outputs_are_called_as_the_inputs_that_they_were_seen_to_follow(tmp_path: Path) -> None:
    archive = export_model(tensorflow(tmp_path), inputs="ids:0:int32[rows,8]", batch_dim="rows")
    assert archive.signature.batch == "rows"
    assert shown(archive) == ["ids:0:int32[rows,8]=-50..49", "label:0:float32[rows,3]"]  # of 50 embeddings
    assert max(golden.inputs["ids:0"].max() for golden in archive.variant().goldens()) > 10  # rows of the whole table


@pytest.mark.matrix
def test_accuracy_is_measured_where_the_file_has_another_name_for_the_batch_of_its_output(
    run_ingot: RunIngot, tmp_path: Path
) -> None:
    archive = export_model(tensorflow(tmp_path))
    archive.save(tmp_path / "a.ingot")
    ids = np.random.default_rng(1).integers(0, 50, (60, 8)).astype(np.int32)
    with contextlib.closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
        labels = engine.run({"ids:0": ids})["label:0"].argmax(1)
    arrays: dict[str, Any] = {"ids:0": ids, "labels": labels}
    np.savez(tmp_path / "data.npz", **arrays)
    first, second, data = tmp_path / "a.ingot", tmp_path / "q.ingot", tmp_path / "data.npz"
    options = ["--metric", "accuracy", "--recipe", "dynamic-int8", "--force"]
    result = run_ingot("quantize", first, "--calibrate", data, *options, "--out", second)
    succeeded(result)
    assert "1.0000 before, " in result.stderr
    assert "1.0000" in succeeded(run_ingot("compare", first, second, "--metric", "accuracy", "--data", data))


def test_sizes_in_multiples_are_found_and_noted(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("export", halving(tmp_path), "--out", tmp_path / "a.ingot")
    succeeded(result)
    assert (
        "note: the model does not run at all sizes; found by trying, the archive accepts h=2..:2, w=2..:2"
        in result.stderr
    )
    archive = Archive.open(tmp_path / "a.ingot")
    assert {name: bounds.step for name, bounds in archive.signature.ranges.items()} == {"h": 2, "w": 2}
    assert shown(archive)[-1] == "y:float32[n,1,h,w]"


@pytest.mark.matrix
def test_a_note_on_a_size_holds_the_reason_of_the_engine_alone(run_ingot: RunIngot, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "length"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.ones(16, np.float32), "table"),
        numpy_helper.from_array(np.array([0]), "zero"),
    ]
    outputs: list[tuple[str, int, onnx_models.Dims]] = [("y", FLOAT, ("batch", "n"))]
    path = onnx_models.save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ("batch", "n"))], outputs, constants)
    result = run_ingot("export", path, "--out", tmp_path / "a.ingot")
    succeeded(result)
    note = notes(Archive.open(tmp_path / "a.ingot"))
    assert "n=1..16" in note
    assert "the model does not run at n=" in note
    assert "InvalidArgument" not in note + result.stderr
    assert "generated" not in note


@pytest.mark.matrix
def test_invented_sizes_are_reported_with_a_way_to_declare_others(run_ingot: RunIngot, tmp_path: Path) -> None:
    path = halving(tmp_path, pad=1000)
    message = refused(run_ingot("export", path, "--out", tmp_path / "a.ingot"))
    assert message.startswith("the file does not run on x [3, 1, 5, 7]: ")
    assert "the sizes and values were generated: declare those that it accepts, such as" in message
    assert "--input 'x:float32[n,1,h,w]' with a size" in message
    assert shown(export_model(path, inputs="x:float32[n,1,h=..64:2,1002]"))[0] == "x:float32[n,1,h,1002]"


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["x:0", "petal length (cm)", "onnx::Gather_0", "0"])
def test_any_name_of_an_input_can_be_written(tmp_path: Path, name: str) -> None:
    nodes = [helper.make_node("Neg", [name], ["y"])]
    path = onnx_models.save(tmp_path / "m.onnx", nodes, [(name, FLOAT, ("a", 2))], [("y", FLOAT, ("b", 2))])
    written = f"{name}:float32[batch,2]" if ":" in name else f'"{name}":float32[batch,2]'
    archive = export_model(path, inputs=written)
    assert archive.signature.inputs[0].name == name
    assert shown(archive)[0] == written
    assert archive.signature.batch == "batch"


@pytest.mark.matrix
def test_several_inputs_without_names_have_one_batch_if_they_run_with_no_other(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    inputs: list[tuple[str, int, onnx_models.Dims]] = [("a", FLOAT, ("unk__1", 2)), ("b", FLOAT, ("unk__2", 2))]
    path = onnx_models.save(tmp_path / "m.onnx", nodes, inputs, [("y", FLOAT, ("unk__3", 2))])
    archive = export_model(path)
    assert shown(archive) == ["a:float32[batch,2]", "b:float32[batch,2]", "y:float32[batch,2]"]
    assert archive.signature.batch == "batch"
    archive = export_model(path, inputs=["a:float32[n,2]", "b:float32[n,2]"])
    declaration = "--input 'a:float32[batch,2]' --input 'b:float32[batch,2]'"
    advice = "if the first dimension of an input counts independent rows, name it 'batch'"
    assert f"{advice}: {declaration}" in notes(archive)


def forest(path: Path, *, zipped: bool = True, sequence: bool = False) -> Path:
    """A tree of three classes as skl2onnx writes it: the label, and the probabilities as a list of maps."""
    tree: dict[str, Any] = {
        "nodes_treeids": [0] * 5,
        "nodes_nodeids": [0, 1, 2, 3, 4],
        "nodes_featureids": [0, 0, 1, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.0] * 5,
        "nodes_truenodeids": [1, 0, 3, 0, 0],
        "nodes_falsenodeids": [2, 0, 4, 0, 0],
        "class_treeids": [0] * 3,
        "class_nodeids": [1, 3, 4],
        "class_ids": [0, 1, 2],
        "class_weights": [1.0] * 3,
        "classlabels_int64s": [10, 20, 30],
    }
    domain = "ai.onnx.ml"
    nodes = [
        helper.make_node("TreeEnsembleClassifier", ["X"], ["label", "probabilities"], domain=domain, **tree),
        helper.make_node("Cast", ["label"], ["output_label"], to=TensorProto.INT64),
    ]
    outputs = [helper.make_tensor_value_info("output_label", TensorProto.INT64, [None])]
    floats = helper.make_tensor_type_proto(FLOAT, None)
    if zipped:
        classes: dict[str, Any] = {"classlabels_int64s": tree["classlabels_int64s"]}
        nodes.append(helper.make_node("ZipMap", ["probabilities"], ["output_probability"], domain=domain, **classes))
        kind = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, floats))
        outputs.append(helper.make_value_info("output_probability", kind))
    if sequence:
        nodes.append(helper.make_node("SequenceConstruct", ["probabilities"], ["list"]))
        outputs.append(helper.make_value_info("list", helper.make_sequence_type_proto(floats)))
    graph = helper.make_graph(nodes, "forest", [helper.make_tensor_value_info("X", FLOAT, [None, 2])], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


class TestZipMap:
    ROWS = np.array([[-1, 0], [1, -1], [1, 1]], np.float32)

    def test_a_served_file_answers_with_labels_and_probabilities(self, tmp_path: Path) -> None:
        path = str(forest(tmp_path / "rf.onnx"))
        with ingot.serve(path, http_port=0, grpc_port=0) as server, ingot.Client(server.http_url) as client:
            answer = client.infer("rf", {"X": self.ROWS})
        assert answer["output_label"].tolist() == [10, 20, 30]
        assert answer["probabilities"].tolist() == np.eye(3).tolist()

    @pytest.mark.matrix
    def test_an_export_reports_it_and_is_batched(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        result = run_ingot("export", forest(tmp_path / "rf.onnx"), "--out", tmp_path / "a.ingot")
        succeeded(result)
        assert "note: the output 'output_probability' was a list of maps (ZipMap)" in result.stderr
        archive = Archive.open(tmp_path / "a.ingot").unpacked()
        assert archive.signature.batch == "batch"
        assert shown(archive) == [
            "X:float32[batch,2]",
            "output_label:int64[batch]",
            "probabilities:float32[batch,3]",
        ]
        with contextlib.closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
            assert engine.run({"X": self.ROWS})["probabilities"].tolist() == np.eye(3).tolist()

    @pytest.mark.matrix
    def test_a_list_that_cannot_be_cut_off_is_named(self, tmp_path: Path) -> None:
        path = forest(tmp_path / "rf.onnx", zipped=False, sequence=True)
        with pytest.raises(
            InvalidArgument, match=r"'list' is of type seq\(tensor\(float\)\); only tensors can be served"
        ):
            export_model(path)
        with pytest.raises(InvalidArgument, match=r"'list' is of type .* leave it out"):
            ingot.serve(str(path), http_port=0, grpc_port=0)
