from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot.demo import Data, Digits
from ingot.errors import InvalidArgument, NotFound, QuantizationError, Unsupported
from ingot.export import export_model
from ingot.model_store import Archive, BlobFolder, Serving, add_variant
from ingot.model_store.format import onnx_graph
from ingot.quant.report.records import ModelComparison
from ingot.tensors import Array
from tests import onnx_models

RNG = np.random.default_rng(0)


def linear(
    folder: Path, name: str, weight: Array, shape: tuple[str | int, int] = ("batch", 4), out: str = "y"
) -> Archive:
    """y = x weight, of which the second output is the index of the largest value."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], [out]),
        helper.make_node("ArgMax", [out], ["label"], axis=1, keepdims=0),
    ]
    outputs = [(out, TensorProto.FLOAT, (shape[0], 3)), ("label", TensorProto.INT64, (shape[0],))]
    path = onnx_models.save(
        folder / f"{name}.onnx",
        nodes,
        [("x", TensorProto.FLOAT, shape)],
        outputs,
        [numpy_helper.from_array(weight.astype(np.float32), "weight")],
    )
    return export_model(path)


@pytest.fixture(scope="module")
def weight() -> Array:
    return RNG.standard_normal((4, 3))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, weight: Array) -> Archive:
    return linear(tmp_path_factory.mktemp("linear"), "linear", weight)


@pytest.fixture(scope="module")
def rows() -> dict[str, Array]:
    x = RNG.standard_normal((50, 4)).astype(np.float32)
    return {"x": x, "labels": RNG.integers(0, 3, 50)}


@pytest.mark.matrix
def test_two_variants_of_one_archive(digits: tuple[Digits, Data, Data], digits_archive: Path) -> None:
    held_out = digits[2]
    found = ingot.compare(
        f"{digits_archive}#fp32",
        digits_archive,
        {"image": held_out.images, "y": held_out.labels},
        metric="accuracy:labels=y",
        batches=(1, 4),
    )
    assert (found.before.variant, found.after.variant) == ("fp32", "int8")
    assert found.metric == "accuracy:labels=y"
    assert found.score_before is not None
    assert found.score_after is not None
    assert found.drop is not None
    assert found.score_before.value > 0.95
    assert found.drop.value == pytest.approx(found.score_before.value - found.score_after.value)
    assert found.size_ratio < 0.5
    assert set(found.speedups) == {1, 4}
    (logits,) = found.outputs
    assert logits.cosine > 0.99
    assert logits.sqnr is not None
    assert 10 < logits.sqnr < 80
    assert found.data.evaluation_rows == len(held_out.images)
    assert not found.goldens
    assert ModelComparison.model_validate_json(found.model_dump_json()) == found


@pytest.mark.matrix
def test_without_data_the_goldens_are_used_and_it_is_reported(original: Archive) -> None:
    found = ingot.compare(original, original, batches=(1, 2))
    assert found.goldens
    assert found.notes[0].startswith("no data was given: the models were run on the ")
    assert found.notes[1] == "both are the same variant: differences are noise"
    assert found.metric == "cosine"
    assert found.drop is not None
    assert found.drop.value == 0
    assert found.outputs[0].sqnr == 200


@pytest.mark.matrix
def test_every_output_is_compared(tmp_path: Path, original: Archive, weight: Array, rows: dict[str, Array]) -> None:
    other = linear(tmp_path, "other", -weight)
    found = ingot.compare(original, other, rows, batches=())
    (y,) = found.outputs
    assert y.cosine == pytest.approx(-1)
    assert y.sqnr == pytest.approx(-20 * np.log10(2), abs=1e-3)
    assert "'label' is equal in 0 of 50 values" in found.notes
    assert found.speedups == {}
    assert found.after.latency == ()


def test_a_variant_and_a_name_of_ones_own(original: Archive, rows: dict[str, Array]) -> None:
    found = ingot.compare(original.variant(), original.variant(), rows, names=("old", "new"), batches=[1])
    assert (found.before.label, found.after.label) == ("old#fp32", "new#fp32")


def test_a_file_may_have_a_number_sign_in_its_name(tmp_path: Path, original: Archive) -> None:
    path = tmp_path / "model#2.ingot"
    original.save(path)
    for source in (str(path), f"{path}#fp32"):
        assert ingot.compare(source, original, batches=()).before.variant == "fp32"
    with pytest.raises(NotFound, match="has no variant 'int8'; it has: fp32"):
        ingot.compare(f"{path}#int8", original)


@pytest.mark.matrix
def test_differences_are_reported(tmp_path: Path, original: Archive, weight: Array) -> None:
    renamed = linear(tmp_path, "renamed", weight, out="z")
    with pytest.raises(InvalidArgument, match=r"the outputs of the first are y:float32\[batch,3\], .* z:float32"):
        ingot.compare(original, renamed)
    wider = linear(tmp_path, "wider", RNG.standard_normal((6, 3)), ("batch", 6))
    with pytest.raises(InvalidArgument, match=r"#fp32 and .*#fp32 cannot be compared: the inputs of the first are x:"):
        ingot.compare(original, wider)
    single = linear(tmp_path, "single", weight, (2, 4))
    with pytest.raises(InvalidArgument, match="their batch dimensions differ: batch and none"):
        ingot.compare(original, single)


def test_dimensions_may_be_called_otherwise(
    tmp_path: Path, original: Archive, weight: Array, rows: dict[str, Array]
) -> None:
    other = linear(tmp_path, "other", weight, ("n", 4))
    assert other.signature != original.signature
    found = ingot.compare(original, other, rows, batches=())
    assert found.outputs[0].cosine == pytest.approx(1)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"z": np.zeros((2, 4), np.float32)}, {}, "the data lacks the input 'x'"),
        ({"x": np.zeros((2, 4), np.float32)}, {"metric": "accuracy"}, "labels"),
        ({"x": np.zeros((2, 4), np.float32)}, {"metric": "nonsense"}, "there is no metric 'nonsense'"),
        ({"x": np.zeros((2, 4), np.float32)}, {"batches": (4, 0)}, "a call cannot be timed with 0 rows"),
    ],
)
def test_impossible_comparisons(
    original: Archive, data: dict[str, Array], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ingot.compare(original, original, data, **options)


def test_a_broken_model(tmp_path: Path, original: Archive, weight: Array, rows: dict[str, Array]) -> None:
    broken = linear_with_nan(original)
    with pytest.raises(QuantizationError, match="returns NaN or infinity in 'y' where the original does not"):
        ingot.compare(original, broken, rows, batches=())
    found = ingot.compare(original, broken, rows, metric="accuracy:labels=labels,output=y", batches=())
    assert found.score_after is not None
    assert found.score_after.value == 0
    assert found.outputs == ()
    assert "the second returns NaN or infinity in 'y' where the first does not" in found.notes


def changed(archive: Archive, **changes: object) -> Archive:
    """Return an archive with the first's graph, but another serving.json."""
    variant = archive.unpacked().variant()
    blobs = BlobFolder.scratch()
    for layer in variant.manifest.layers:
        blobs.copy(variant.blobs, layer)
    serving = Serving.model_validate({**variant.serving.model_dump(), **changes})
    return Archive.create(blobs, [add_variant(blobs, serving, variant.graph, variant.weights, ())])


def linear_with_nan(archive: Archive) -> Archive:
    variant = archive.unpacked().variant()
    blobs = BlobFolder.scratch()
    model = onnx_graph.load(variant.path())
    weight = next(iter(model.graph.initializers.values()))
    weight.const_value = ir.tensor(np.full((4, 3), np.nan, np.float32), name=weight.name)
    graph, weights = onnx_graph.pack(model, blobs)
    return Archive.create(blobs, [add_variant(blobs, variant.serving, graph, weights, ())])


def test_no_goldens_and_no_data(original: Archive) -> None:
    with pytest.raises(InvalidArgument, match="has no golden inputs to compare on; pass data"):
        ingot.compare(changed(original), original)


def test_code_runs_only_where_it_is_allowed(original: Archive) -> None:
    with pytest.raises(Unsupported, match=r"linear#fp32 cannot be run here: .*allow_code=True"):
        ingot.compare(original, changed(original, format="pt2"))
