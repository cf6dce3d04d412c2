from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.errors import InvalidArgument, NotFound
from ingot.model_store import BlobFolder
from ingot.model_store.format import manifest, onnx_graph
from ingot.tensors import Array
from tests import onnx_models

SIZE = 600  # a float32 matrix of 600 x 600 has more than 1 MiB
LARGE = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE


def matmul(path: Path, shift: float, external: bool = False) -> Path:
    """y = x LARGE + shift."""
    constants = [
        numpy_helper.from_array(LARGE, "large"),
        numpy_helper.from_array(np.array([shift], np.float32), "shift"),
    ]
    nodes = [helper.make_node("MatMul", ["x", "large"], ["h"]), helper.make_node("Add", ["h", "shift"], ["y"])]
    kind, shape = TensorProto.FLOAT, ("batch", SIZE)
    onnx_models.save(path, nodes, [("x", kind, shape)], [("y", kind, shape)], constants)
    if external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, size_threshold=0, location="beside.bin")
    return path


def run(path: Path, x: Array) -> Array:
    (y,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return np.asarray(y)


def test_a_large_tensor_is_a_blob_that_graphs_share(tmp_path: Path) -> None:
    blobs = BlobFolder.scratch()
    x = np.random.default_rng(1).standard_normal((3, SIZE)).astype(np.float32)
    weights = []
    for shift in (1.0, 2.0):
        source = matmul(tmp_path / "model.onnx", shift)
        graph, layers = onnx_graph.pack(onnx_graph.load(source), blobs)
        assert graph.size < 2000
        weights.append(layers)
        packed = blobs.path(graph)
        assert np.array_equal(run(packed, x), run(source, x))
    ((first,), (second,)) = weights
    assert first == second
    assert first.size == LARGE.nbytes
    assert first.annotations == {manifest.FILEPATH: first.hex}
    assert blobs.path(first).read_bytes() == LARGE.tobytes()


def test_external_weights_of_the_source_are_included(tmp_path: Path) -> None:
    """Even small ones: the archive must not need the folder that it was made from."""
    source = matmul(tmp_path / "model.onnx", 1.0, external=True)
    x = np.ones((1, SIZE), np.float32)
    expected = run(source, x)
    blobs = BlobFolder.scratch()
    graph, layers = onnx_graph.pack(onnx_graph.load(source), blobs)
    (tmp_path / "beside.bin").unlink()
    assert [layer.size for layer in layers] == [LARGE.nbytes]
    assert np.array_equal(run(blobs.path(graph), x), expected)


def test_large_tensors_of_branches_are_blobs_too(tmp_path: Path) -> None:
    kind = TensorProto.FLOAT

    def branch(factor: float) -> onnx.GraphProto:
        weight = numpy_helper.from_array(LARGE * np.float32(factor), f"w{factor}")
        node = helper.make_node("MatMul", ["x", f"w{factor}"], [f"y{factor}"])
        out = helper.make_tensor_value_info(f"y{factor}", kind, ["batch", SIZE])
        return helper.make_graph([node], f"branch{factor}", [], [out], [weight])

    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch(1), else_branch=branch(2))
    inputs = [("x", kind, ("batch", SIZE)), ("flag", TensorProto.BOOL, ())]
    source = onnx_models.save(tmp_path / "if.onnx", [node], inputs, [("y", kind, ("batch", SIZE))])
    blobs = BlobFolder.scratch()
    graph, layers = onnx_graph.pack(onnx_graph.load(source), blobs)
    assert len(layers) == 2
    packed = onnxruntime.InferenceSession(blobs.path(graph), providers=["CPUExecutionProvider"])
    x = np.ones((1, SIZE), np.float32)
    for flag, factor in ((True, 1), (False, 2)):
        (y,) = packed.run(None, {"x": x, "flag": np.array(flag)})
        assert np.allclose(y, x @ (LARGE * factor), atol=1e-5)


def test_notes_about_the_users_machine_are_left_out(tmp_path: Path) -> None:
    model = onnx_graph.load(matmul(tmp_path / "model.onnx", 1.0))
    for node in model.graph:
        node.doc_string = "/home/me/secret.py"
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "/home/me/secret.py"
    model.graph.inputs[0].metadata_props["note"] = "/home/me/secret.py"
    model.graph.metadata_props["pkg.torch.export.graph_signature"] = "/home/me/secret.py"
    blobs = BlobFolder.scratch()
    graph, _ = onnx_graph.pack(model, blobs)
    assert b"secret" not in blobs.path(graph).read_bytes()


@pytest.mark.parametrize("content", [b"text", b"\x00" * 100, b"\x08\x0a\xff\xff"])
def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"x\.onnx is not an ONNX model"):
        onnx_graph.load(tmp_path / "x.onnx")


def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        onnx_graph.load(tmp_path / "x.onnx")


@pytest.mark.matrix
def test_a_model_of_strings_keeps_them_inside(tmp_path: Path) -> None:
    words = numpy_helper.from_array(np.array(["word"] * 300_000, dtype=object), "words")
    nodes = [helper.make_node("Gather", ["words", "i"], ["y"])]
    source = onnx_models.save(
        tmp_path / "s.onnx", nodes, [("i", TensorProto.INT64, ("n",))], [("y", TensorProto.STRING, ("n",))], [words]
    )
    blobs = BlobFolder.scratch()
    graph, layers = onnx_graph.pack(onnx_graph.load(source), blobs)
    assert layers == ()
    assert isinstance(ir.load(blobs.path(graph)), ir.Model)
