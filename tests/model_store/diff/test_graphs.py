from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ingot.errors import InvalidArchive
from ingot.model_store import Archive, BlobFolder, add_variant
from ingot.model_store.diff import diff, view
from ingot.model_store.format import manifest, onnx_graph
from tests.model_store import forgeries, samples
from tests.model_store.diff.models import EVIL, LARGE, graph, graphs, one, tensor


class TestGraphs:
    def test_operators_are_counted(self) -> None:
        def chain(*operators: str) -> onnx.ModelProto:
            nodes = [helper.make_node(name, ["x"], [f"v{index}"]) for index, name in enumerate(operators)]
            nodes.append(helper.make_node("Norm", ["x"], ["n"], domain="acme"))
            return graph(nodes=nodes, opset=[("", 20), ("acme", 1)])

        found = graphs(chain("Relu", "Relu", "Neg"), chain("Relu", "Abs", "Neg"))
        assert [(item.operator, item.before, item.after) for item in found.operators] == [("Abs", 0, 1), ("Relu", 2, 1)]
        found = graphs(chain(), graph())
        assert [item.operator for item in found.operators] == ["acme::Norm"]

    def test_a_change_that_has_no_row_is_named(self) -> None:
        first, second = (graph(nodes=[helper.make_node("Elu", ["x"], ["y"], alpha=alpha)]) for alpha in (1.0, 2.0))
        (found,) = diff(one(first), one(second)).variants
        assert found.notes == ("the graphs differ in the names, attributes or order of their nodes alone",)

    def test_parts_of_a_partitioned_model(self) -> None:
        def parts(factor: float) -> Archive:
            blobs = BlobFolder.scratch()
            part, weights = onnx_graph.pack(ir.from_proto(graph(tensor("w", LARGE * factor))), blobs)
            code = blobs.put(b"a program", manifest.WEIGHT)
            segments = [
                {"format": "pt2", "blob": code.hex, "inputs": ["x"], "outputs": ["h"]},
                {"format": "onnx", "blob": part.hex, "inputs": ["h"], "outputs": ["y"]},
            ]
            serving = samples.serving().model_copy(update={"format": "partitioned"})
            signature = serving.model_dump(mode="json")["signature"]
            plan = {"signature": signature, "segments": segments, "outputs": ["y"]}
            document = blobs.put(json.dumps(plan).encode(), manifest.WEIGHT)
            return Archive.create(blobs, [add_variant(blobs, serving, document, [part, code, *weights], [])])

        (found,) = diff(parts(1), parts(2)).variants
        assert found.graph is not None
        ((change),) = found.graph.changed
        assert change.values is not None
        assert change.values.relative == pytest.approx(1)

    def test_compiled_models_are_compared_as_files(self) -> None:
        serving = samples.serving().model_copy(update={"format": "aoti"})
        (found,) = diff(one(b"code", serving), one(b"other code", serving)).variants
        assert (found.same_model, found.graph) == (False, None)
        assert found.notes == ("tensors and operators are compared for ONNX graphs only; the format is aoti",)

    def test_without_onnx_ir_the_rest_is_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "ingot.model_store.diff.graphs", raising=False)
        monkeypatch.delattr("ingot.model_store.diff.graphs", raising=False)
        monkeypatch.setitem(sys.modules, "onnx_ir", None)
        serving = samples.serving().model_copy(update={"precision": "fp16"})
        before, after = one(graph(tensor("w", LARGE))), one(graph(tensor("w", LARGE * 2)), serving)
        (found,) = diff(before, after).variants
        assert found.graph is None
        assert (
            "needs the package 'onnx_ir', which is not installed: pip install 'ingot-serve[export]'" in found.notes[0]
        )
        assert [item.what for item in found.changes] == ["precision"]


def external(*, location: str = "", dims: Sequence[int] = (600, 600), **fields: str) -> onnx.TensorProto:
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **fields}.items():
        made.external_data.add(key=key, value=value)
    return made


def raw(**fields: Any) -> onnx.TensorProto:
    return TensorProto(**{"name": "w", "data_type": TensorProto.FLOAT, "dims": [2], "raw_data": b"12345678", **fields})


class TestHostileGraphs:
    """Each is compared with a good one; nothing outside the archive is read."""

    @pytest.mark.parametrize(
        ("constant", "message"),
        [
            (external(location="/etc/hostname"), "'w' is in '/etc/hostname', which the manifest does not list"),
            (external(location="../../x"), "which the manifest does not list"),
            (external(location="BLOB", offset="4"), "is not the whole of its blob"),
            (external(location="BLOB", length="99"), "is not the whole of its blob"),
            (external(location="BLOB", dims=[1 << 40, 1 << 40]), "is not the whole of its blob"),
            (external(location="BLOB", offset="much"), "is not an ONNX graph"),
            (raw(dims=[3]), r"holds 8 bytes; float32\[3\] has 12"),
            (raw(dims=[-1, -2]), "has a negative dimension"),
            (raw(data_type=99), "is not an ONNX graph"),
            (raw(data_type=TensorProto.STRING), "'w'|is not an ONNX graph"),
            (raw(name=EVIL, dims=[3]), r"<b>\\x1b\]0;owned\\x07\\nfake line"),
        ],
    )
    def test_a_tensor_with_a_wrong_location_or_type(self, constant: onnx.TensorProto, message: str) -> None:
        blobs = BlobFolder.scratch()
        blob = blobs.put(LARGE.tobytes(), manifest.WEIGHT)
        for entry in constant.external_data:
            entry.value = entry.value.replace("BLOB", blob.hex)
        bad = blobs.put(graph(constant).SerializeToString(), manifest.WEIGHT)
        archive = forgeries.forged(blobs, samples.serving(), bad, [blob])
        with pytest.raises(InvalidArchive, match=message) as caught:
            diff(one(graph()), archive, labels=("a.ingot", "b.ingot"))
        assert str(caught.value).startswith("b.ingot: variant 'fp32': ")
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_not_a_graph(self) -> None:
        with pytest.raises(InvalidArchive, match=r"^a: variant 'fp32': graph sha256:\w+ is not an ONNX graph: "):
            diff(one(b"some text"), one(graph()), labels=("a", "b"))

    def test_damage_in_a_tensor_is_found(self) -> None:
        before, after = (one(graph(tensor("w", array))) for array in (LARGE, LARGE * 2))
        assert isinstance(after.blobs, BlobFolder)
        path = after.blobs.path(after.variant().weights[0])
        path.chmod(0o644)
        path.write_bytes(bytes(LARGE.nbytes))
        with pytest.raises(InvalidArchive, match=r"b: variant 'fp32': blob sha256:\w+ .* is damaged"):
            diff(before, after, labels=("a", "b"))
        path.unlink()
        with pytest.raises(InvalidArchive, match=r"b: variant 'fp32': blob sha256:\w+ is missing"):
            diff(before, after, labels=("a", "b"))

    def test_a_plan_that_names_a_blob_of_another_model(self) -> None:
        blobs = BlobFolder.scratch()
        serving = samples.serving().model_copy(update={"format": "partitioned"})
        segments = [{"format": "onnx", "blob": "0" * 64, "inputs": ["x"], "outputs": ["y"]}]
        plan = {"signature": serving.model_dump(mode="json")["signature"], "segments": segments, "outputs": ["y"]}
        document = blobs.put(json.dumps(plan).encode(), manifest.WEIGHT)
        archive = forgeries.forged(blobs, serving, document)
        with pytest.raises(InvalidArchive, match="which the manifest does not list"):
            diff(one(graph()), archive)

    @pytest.mark.matrix
    @given(position=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
    def test_a_graph_with_any_byte_changed_is_read_or_refused(self, position: int, byte: int, cut: bool) -> None:
        good = graph(
            tensor("w", np.ones((2, 3), np.float32)),
            tensor("t", np.array(["a", "b"], dtype=object)),
            nodes=[helper.make_node("Constant", [], ["c"], value=tensor("", np.arange(4)))],
        )
        content = bytearray(good.SerializeToString())
        position %= len(content)
        content[position] = byte
        bad = one(bytes(content[:position] if cut else content))
        try:
            found = diff(one(good), bad)
        except InvalidArchive:
            return
        json.dumps(found.model_dump(mode="json"), allow_nan=False)
        assert "variant fp32" in view.text(found)
