from __future__ import annotations

import numpy as np
import pytest

from ingot.errors import NotFound
from ingot.model_store import Archive, BlobFolder, Provenance
from ingot.model_store.diff import diff, view
from ingot.tensors import DType, Range, Signature, TensorSpec
from tests.model_store import samples
from tests.model_store.diff.models import LARGE, graph, one, tensor, variant, variants


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

    def test_form_requirements_and_origin_of_a_variant(self) -> None:
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
