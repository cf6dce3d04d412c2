from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ingot.model_store import Archive, BlobFolder, Descriptor
from ingot.model_store.diff import diff
from ingot.model_store.diff.records import Values
from ingot.tensors import Array
from tests.model_store.diff.models import LARGE, graph, graphs, one, tensor, values


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

    def test_non_finite_weights(self) -> None:
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
