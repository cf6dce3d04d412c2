from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ingot.errors import InvalidArchive, NotFound
from ingot.model_store import (
    Archive,
    BatchLatency,
    BlobFolder,
    Evidence,
    Golden,
    Provenance,
    Serving,
    add_variant,
    manifest,
    onnx_graph,
)
from ingot.model_store.diff import Diff, VariantDiff, diff, measured, view
from ingot.model_store.diff.records import GraphDiff, Values
from ingot.model_store.evidence import Agreement, Interval, MetricEvidence, ParityEvidence
from ingot.model_store.manifest import Descriptor
from ingot.tensors import Array, DType, Range, Signature, TensorSpec
from tests.model_store import forgeries, samples

LARGE = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)  # over 1 MiB: a blob of its own
EVIL = "<b>\x1b]0;owned\x07\nfake line"


def graph(
    *constants: onnx.TensorProto, nodes: Sequence[onnx.NodeProto] = (), opset: Sequence[tuple[str, int]] = (("", 20),)
) -> onnx.ModelProto:
    inner = helper.make_graph(list(nodes), "net", [], [], list(constants))
    imports = [helper.make_opsetid(domain, version) for domain, version in opset]
    return helper.make_model(inner, opset_imports=imports, ir_version=10)


def tensor(name: str, array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def one(model: onnx.ModelProto | bytes, serving: Serving | None = None, cases: Sequence[Golden] = ()) -> Archive:
    """Return an archive of one variant."""
    blobs = BlobFolder.scratch()
    return Archive.create(blobs, [variant(blobs, model, serving, cases)])


def variant(
    blobs: BlobFolder, model: onnx.ModelProto | bytes, serving: Serving | None = None, cases: Sequence[Golden] = ()
) -> Descriptor:
    weights: tuple[Descriptor, ...] = ()
    if isinstance(model, bytes):
        packed = blobs.put(model, manifest.WEIGHT)
    else:
        packed, weights = onnx_graph.pack(ir.from_proto(model), blobs)
    return add_variant(blobs, serving or samples.serving(), packed, weights, cases)


def with_evidence(**fields: Any) -> Serving:
    return samples.serving().model_copy(update={"evidence": Evidence(**fields)})


def variants(found: Diff) -> dict[str, VariantDiff]:
    return {item.name: item for item in found.variants}


def graphs(before: onnx.ModelProto, after: onnx.ModelProto) -> GraphDiff:
    (found,) = diff(one(before), one(after)).variants
    assert found.graph is not None
    return found.graph


def values(before: Array, after: Array) -> Values:
    """Return how one tensor changed, read out of graphs."""
    (change,) = graphs(graph(tensor("w", before)), graph(tensor("w", after))).changed
    assert change.values is not None
    return change.values


class TestArchives:
    def test_an_archive_does_not_differ_from_itself(self) -> None:
        archive = one(graph(tensor("w", LARGE)))
        found = diff(archive, archive)
        assert found.same
        assert found.shared == found.after.size == archive.size
        assert [(item.name, item.state) for item in found.variants] == [("fp32", "unchanged")]
        assert "They are the same archive." in view.text(found)

    def test_blobs_that_both_have_are_not_read(self) -> None:
        other = np.ones(3, np.float32)
        before = one(graph(tensor("w", LARGE), tensor("b", other)))
        after = one(graph(tensor("w", LARGE), tensor("b", other * 2)))
        for archive in (before, after):
            (blob,) = archive.variant().weights
            assert isinstance(archive.blobs, BlobFolder)
            archive.blobs.path(blob).unlink()
        found = diff(before, after)
        (item,) = found.variants
        assert item.size_after is not None
        assert item.shared == LARGE.nbytes
        assert LARGE.nbytes < found.shared < found.after.size
        assert item.graph is not None
        assert item.graph.unchanged == 1
        assert [change.name for change in item.graph.changed] == ["b"]

    def test_name_and_signature(self) -> None:
        other = Signature(
            (TensorSpec("x", DType.FP16, ("n", 3)),), (TensorSpec("z", DType.FP32, ("n",)),), "n", {"n": Range(1, 8)}
        )
        found = diff(one(b""), one(b"", samples.serving("small", "fp32", other)))
        assert [(item.what, item.before, item.after) for item in found.changes] == [
            ("name", "tiny", "small"),
            ("input x", "x:float32[batch,3]", "x:float16[n,3]"),
            ("output y", "y:float32[batch,3]", None),
            ("batch", "batch", "n"),
            ("range of batch", "1..64", None),
            ("output z", None, "z:float32[n]"),
            ("range of n", None, "1..8"),
        ]

    def test_variants_are_matched_by_name(self) -> None:
        blobs = BlobFolder.scratch()
        made = {name: variant(blobs, b"a graph", samples.serving(variant=name)) for name in ("fp32", "int8", "fp16")}
        before = Archive.create(blobs, [made["fp32"], made["int8"]])
        after = Archive.create(blobs, [made["fp16"], made["fp32"]])
        found = diff(before, after)
        assert {name: item.state for name, item in variants(found).items()} == {
            "fp16": "added",
            "fp32": "unchanged",
            "int8": "removed",
        }
        assert variants(found)["fp16"].shared == len(b"a graph")
        assert [(item.what, item.before, item.after) for item in found.changes] == [
            ("preferred variant", "fp32", "fp16")
        ]
        (named,) = diff(before, after, variants=("int8", "fp16")).variants
        assert (named.name, named.state, named.same_model) == ("int8 and fp16", "changed", True)
        (named,) = diff(before, after, variants=(None, "fp32")).variants
        assert (named.name, named.state) == ("fp32", "unchanged")
        with pytest.raises(NotFound, match="no variant 'int8'; it has: fp16, fp32"):
            diff(before, after, variants=("int8", None))

    def test_what_a_variant_is_needs_and_comes_from(self) -> None:
        first = samples.serving()
        second = first.model_copy(
            update={
                "precision": "int8",
                "requires": {"engine": "openvino"},
                "recipe": {"name": "auto", "plan": {"schemes": {"conv1": "w8a8"}}, "keep": ["fc"]},
                "provenance": Provenance(source="net.py", created=first.provenance.created, versions={"torch": "3.0"}),
            }
        )
        found = variants(diff(one(b"a graph", first), one(b"a graph", second)))["fp32"]
        assert found.same_model
        assert found.graph is None
        assert {item.what: (item.before, item.after) for item in found.changes} == {
            "precision": ("fp32", "int8"),
            "requires.engine": (None, "openvino"),
            "recipe.name": (None, "auto"),
            "recipe.plan.schemes.conv1": (None, "w8a8"),
            "recipe.keep": (None, '["fc"]'),
            "source": ("by hand", "net.py"),
            "versions.torch": (None, "3.0"),
        }


class TestMeasurements:
    def test_accuracy_agreement_and_parity(self) -> None:
        def metric(value: float, rows: int) -> MetricEvidence:
            at, drop = (Interval(value=item, low=item, high=item) for item in (value, 0.01))
            return MetricEvidence(name="accuracy", before=at, after=at, drop=drop, budget=0.01, rows=rows)

        parity = ParityEvidence(tensor="y", error=1e-6, tolerance=1e-3, cases=2)
        agreement = Agreement(tensor="y", cosine=0.99, error=0.02, sqnr=30.0)
        first = with_evidence(metric=metric(0.98, 100), parity=(parity,))
        second = with_evidence(metric=metric(0.97, 200), agreement=(agreement,), holds=True)
        found = variants(diff(one(b"", first), one(b"", second)))["fp32"]
        numbers = {item.what: (item.before, item.after) for item in found.measures}
        assert numbers["accuracy"] == (0.98, 0.97)
        assert numbers["y: cosine to its original"] == (None, 0.99)
        assert numbers["y: error of the export"] == (1e-6, None)
        assert "the metric was not measured on the same data" in found.notes
        assert [(item.what, item.after) for item in found.changes] == [("keeps its accuracy budget", "true")]

    def test_a_number_that_is_none_is_left_out(self) -> None:
        """Files can hold such: JSON's readers take NaN, and 1e999."""
        evidence = Evidence(parity=(ParityEvidence(tensor="y", error=float("inf"), tolerance=1e-3, cases=2),))
        assert [item.before for item in measured.measures(evidence, Evidence())] == [None]

    def test_latency_by_batch_with_a_word_about_other_machines(self) -> None:
        def timed(machine: str, *items: tuple[int, float]) -> Serving:
            latency = tuple(BatchLatency(rows=rows, seconds=seconds) for rows, seconds in items)
            return with_evidence(machine=machine, latency=latency)

        first = timed("old", (1, 0.004), (8, 0.008))
        found = variants(diff(one(b"", first), one(b"", timed("new", (1, 0.002), (32, 0.1)))))["fp32"]
        assert [(item.rows, item.before, item.after, item.speedup) for item in found.latency] == [
            (1, 0.004, 0.002, 2.0),
            (8, 0.008, None, None),
            (32, None, 0.1, None),
        ]
        assert "the latencies were measured on 'old' and on 'new'" in found.notes[0]
        found = variants(diff(one(b"", first), one(b"", timed("old", (1, 0.002)))))["fp32"]
        assert found.notes == ()

    def test_answers_to_the_same_golden_inputs(self) -> None:
        def case(x: float, *y: float) -> Golden:
            return Golden({"x": np.full((len(y), 3), x, np.float32)}, {"y": np.array([[item] * 3 for item in y], "f4")})

        first = [case(1, 2, 4), case(2, 8)]
        found = variants(diff(one(b"", cases=first), one(b"", cases=[case(3, 0), case(1, 2, 5)])))["fp32"]
        assert found.golden_cases == 1
        assert [(item.tensor, item.difference) for item in found.goldens] == [("y", 0.25)]
        found = variants(diff(one(b"", cases=first), one(b"", cases=[case(1, 2, float("nan"))])))["fp32"]
        assert found.goldens[0].difference is None
        found = variants(diff(one(b"", cases=first), one(b"", cases=[case(5, 1)])))["fp32"]
        assert found.notes == ("the golden answers are to different inputs",)


class TestTensors:
    def test_added_removed_renamed_and_of_another_type_or_shape(self) -> None:
        def named(**arrays: Array) -> onnx.ModelProto:
            return graph(*(tensor(name, array) for name, array in arrays.items()))

        row = np.arange(3, dtype=np.float32)
        before = named(same=row, gone=row + 1, old=row + 2, kind=row, shape=row, both=row, some=row)
        after = named(
            same=row,
            fresh=row + 3,
            young=row + 2,
            kind=row.astype(np.float16),
            shape=row[None],
            both=row + 5,
            some=row + np.array([0, 0, 1], "f4"),
        )
        found = graphs(before, after)
        assert found.unchanged == 1
        assert [(item.name, str(item), item.size) for item in found.added] == [("fresh", "float32[3]", 12)]
        assert [item.name for item in found.removed] == ["gone"]
        assert [(item.before, item.after) for item in found.renamed] == [("old", "young")]
        assert [(item.name, str(item.before), str(item.after)) for item in found.changed] == [
            ("kind", "float32[3]", "float16[3]"),
            ("shape", "float32[3]", "float32[1,3]"),
            ("both", "float32[3]", "float32[3]"),
            ("some", "float32[3]", "float32[3]"),
        ]

    def test_a_large_tensor_in_archive_files(self, tmp_path: Path) -> None:
        """It is longer than the blocks that it is read in."""
        other = LARGE.copy()
        other[0, 1] += 1
        other[-1, -1] -= 3
        for name, array in (("a", LARGE), ("b", other)):
            one(graph(tensor("w", array))).save(tmp_path / f"{name}.ingot")
        (found,) = diff(*(Archive.open(tmp_path / f"{name}.ingot") for name in "ab")).variants
        assert found.graph is not None
        ((change),) = found.graph.changed
        assert change.values is not None
        assert change.values.count == 2
        assert change.values.largest == pytest.approx(3)
        assert change.values.relative == pytest.approx(np.sqrt(10) / np.linalg.norm(LARGE.astype("f8")))

    @pytest.mark.parametrize(
        "kind",
        [
            "float16",
            "float64",
            "int8",
            "uint8",
            "int64",
            "uint64",
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.int4,
            ml_dtypes.uint4,
            ml_dtypes.float4_e2m1fn,
        ],
    )
    def test_values_of_every_type(self, kind: Any) -> None:
        before, after = (np.array(row).astype(kind) for row in ([1, 2, 2, 0, 4], [1, 2, 2, 3, 4]))
        assert values(before, after) == Values(relative=3 / 5, largest=3, count=1)

    def test_negative_numbers_of_four_bits(self) -> None:
        before, after = (np.array(row).astype(ml_dtypes.int4) for row in ([-8, 6, 0], [7, 6, 0]))
        assert values(before, after) == Values(relative=1.5, largest=15, count=1)

    def test_booleans_complex_numbers_and_text(self) -> None:
        assert values(np.array([True, False]), np.array([True, True])) == Values(relative=1, largest=1, count=1)
        assert values(np.array([3 + 4j]), np.array([3 + 3j])) == Values(relative=0.2, largest=1, count=1)
        before, after = (np.array(row, dtype=object) for row in (["a", "b", "ab"], ["a", "c", ""]))
        assert values(before, after) == Values(count=2)

    def test_weights_that_are_no_finite_numbers(self) -> None:
        nan, inf = float("nan"), float("inf")
        before = np.array([nan, nan, inf, 1, 2], np.float32)
        after = np.array([nan, 0, -inf, 1, 3], np.float32)
        found = values(before, after)
        assert (found.count, found.odd, found.largest) == (3, 2, 1)
        assert found.relative == pytest.approx(1 / np.sqrt(5))
        assert values(np.array([1e300]), np.array([-1e300])) == Values(largest=2e300, count=1)
        assert values(np.zeros(2, "f4"), np.ones(2, "f4")) == Values(largest=1, count=2)
        assert values(np.array([0.0]), np.array([-0.0])) == Values(relative=0, largest=0, count=0)

    def test_tensors_without_elements(self) -> None:
        empty = np.zeros((0, 3), np.float32)
        assert graphs(graph(tensor("w", empty)), graph(tensor("w", empty), tensor("v", empty))).unchanged == 1
        (change,) = graphs(graph(tensor("w", empty)), graph(tensor("w", empty[:, :2]))).changed
        assert change.values is None

    def test_a_blob_of_many_names_is_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [f"w{index}" for index in range(5)]
        before, after = (one(graph(*(tensor(name, array) for name in names))) for array in (LARGE, LARGE * 2))
        opened: list[str] = []
        real = BlobFolder.open

        def watched(self: BlobFolder, descriptor: Descriptor) -> BinaryIO:
            opened.append(descriptor.digest)
            return real(self, descriptor)

        monkeypatch.setattr(BlobFolder, "open", watched)
        (found,) = diff(before, after).variants
        assert found.graph is not None
        assert len(found.graph.changed) == 5
        for archive in (before, after):
            assert opened.count(archive.variant().weights[0].digest) == 1

    def test_those_of_branches_and_constants(self) -> None:
        def branched(factor: float) -> onnx.ModelProto:
            def branch(value: float) -> onnx.GraphProto:
                out = helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])
                return helper.make_graph([], "branch", [], [out], [tensor("w", np.array([value], "f4"))])

            constant = helper.make_node("Constant", [], ["c"], value=tensor("", np.array(factor, "f4")))
            node = helper.make_node("If", ["flag"], ["y"], then_branch=branch(1), else_branch=branch(factor))
            return graph(tensor("flag", np.array(True)), nodes=[constant, node])

        found = graphs(branched(2), branched(3))
        assert found.unchanged == 2
        assert [(item.name, item.values and item.values.largest) for item in found.changed] == [("c", 1), ("w", 1)]


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
        assert found.notes == ("tensors and operators are compared of ONNX graphs; the format is aoti",)

    def test_without_onnx_ir_all_else_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "ingot.model_store.diff.graphs", raising=False)
        monkeypatch.delattr("ingot.model_store.diff.graphs", raising=False)
        monkeypatch.setitem(sys.modules, "onnx_ir", None)
        serving = samples.serving().model_copy(update={"precision": "fp16"})
        before, after = one(graph(tensor("w", LARGE))), one(graph(tensor("w", LARGE * 2)), serving)
        (found,) = diff(before, after).variants
        assert found.graph is None
        assert "needs the package 'onnx_ir', which is not installed: pip install 'ingot[export]'" in found.notes[0]
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
            (external(location="BLOB", offset="much"), "is no ONNX graph"),
            (raw(dims=[3]), r"holds 8 bytes; float32\[3\] has 12"),
            (raw(dims=[-1, -2]), "has a dimension below zero"),
            (raw(data_type=99), "is no ONNX graph"),
            (raw(data_type=TensorProto.STRING), "'w'|is no ONNX graph"),
            (raw(name=EVIL, dims=[3]), r"<b>\\x1b\]0;owned\\x07\\nfake line"),
        ],
    )
    def test_a_tensor_that_is_not_where_or_what_it_says(self, constant: onnx.TensorProto, message: str) -> None:
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

    def test_what_is_no_graph(self) -> None:
        with pytest.raises(InvalidArchive, match=r"^a: variant 'fp32': graph sha256:\w+ is no ONNX graph: "):
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


class TestView:
    def test_names_from_the_archive_drive_neither_terminal_nor_page(self) -> None:
        node = helper.make_node(EVIL, ["x"], ["y"])
        first = with_evidence(machine=EVIL, latency=(BatchLatency(rows=1, seconds=1e-3),))
        second = first.model_copy(
            update={"precision": EVIL, "recipe": {"name": EVIL, EVIL: EVIL}, "evidence": Evidence()}
        )
        before = one(graph(tensor(EVIL, np.ones(3, "f4")), tensor(f"{EVIL}2", np.ones(2, "f4"))), first)
        after = one(graph(tensor(EVIL, np.zeros(3, "f4")), nodes=[node]), second)
        found = diff(before, after, labels=(EVIL, EVIL))
        lines = view.text(found)
        assert "owned" in lines
        assert not any(line.startswith("fake") for line in lines.splitlines())
        assert lines.replace("\n", "").isprintable()
        page = view.html(found)
        assert "<b>" not in page
        assert page.isprintable()

    def test_only_so_many_rows_are_shown(self) -> None:
        first, second = (
            graph(*(tensor(f"w{index}", np.array([1, index * factor], "f4")) for index in range(1, 9)))
            for factor in (1, 2)
        )
        found = diff(one(first), one(second))
        lines = [line.split()[0] for line in view.text(found, 2).splitlines() if line.startswith("    ")]
        assert lines == ["type", "w8", "w7", "and"]
        assert "and 6 more" in view.html(found, 2)
        assert "tensors: 0 unchanged, 8 changed" in view.text(found, 2)
