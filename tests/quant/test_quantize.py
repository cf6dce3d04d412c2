from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from ingot.quant.recipes import static_int8
from onnx import TensorProto, helper, numpy_helper

from ingot.demo.digits import Data, Digits, predict
from ingot.errors import InvalidArgument, NotFound, QuantizationError
from ingot.export import export_model
from ingot.model_store import Archive
from ingot.quant import StaticInt8, quantize
from ingot.runtime import load_engine
from ingot.tensors import Array
from tests import onnx_models

RNG = np.random.default_rng(0)


def matmul(folder: Path, dtype: type[np.floating[Any]] = np.float32) -> Path:
    """y = x weight, [batch, 8] to [batch, 4]; its one node is called 'product'."""
    weight = numpy_helper.from_array(RNG.standard_normal((8, 4)).astype(dtype), "weight")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("MatMul", ["x", "weight"], ["y"], name="product")
    return onnx_models.save(
        folder / "matmul.onnx", [node], [("x", kind, ("batch", 8))], [("y", kind, ("batch", 4))], [weight]
    )


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return export_model(matmul(tmp_path_factory.mktemp("matmul")))


@pytest.fixture(scope="module")
def samples() -> Array:
    return RNG.standard_normal((50, 8)).astype(np.float32)  # 50: the last batch is not full


@pytest.fixture(scope="module")
def quantized(product: Archive, samples: Array) -> Archive:
    return quantize(product, {"x": samples})


def run(archive: Archive, variant: str, inputs: Mapping[str, Array]) -> Array:
    unpacked = archive.unpacked()  # its folder goes with it
    engine = load_engine(unpacked.variant(variant).path(), device="cpu")
    try:
        return next(iter(engine.run(inputs).values()))
    finally:
        engine.close()


def test_int8_digits_predict_like_pytorch(digits: tuple[Digits, Data, Data], digits_archive: Path) -> None:
    model, _, held_out = digits
    archive = Archive.open(digits_archive)
    expected = predict(model, held_out.images)
    actual = run(archive, "int8", {"image": held_out.images}).argmax(1)
    assert (expected == held_out.labels).mean() > 0.95
    assert abs((actual == held_out.labels).mean() - (expected == held_out.labels).mean()) <= 0.01
    assert (actual == expected).mean() > 0.98
    assert np.array_equal(run(archive, "fp32", {"image": held_out.images}).argmax(1), expected)


def test_int8_digits_are_really_int8(digits_archive: Path) -> None:
    archive = Archive.open(digits_archive)
    small, large = archive.variant("int8"), archive.variant("fp32")
    recipe = small.serving.recipe
    assert recipe is not None
    assert recipe["quantized_ops"] == 4  # three convolutions and a linear layer
    assert small.size < large.size / 2


class TestArchive:
    def test_the_new_variant_is_preferred_and_the_old_one_stays(self, product: Archive, quantized: Archive) -> None:
        assert [variant.name for variant in quantized.variants] == ["int8", "fp32"]
        assert quantized.variant("fp32").descriptor == product.variant().descriptor
        assert quantized.signature == product.signature
        assert [variant.name for variant in product.variants] == ["fp32"]

    def test_it_says_how_it_was_made_and_from_what(self, product: Archive, quantized: Archive) -> None:
        serving = quantized.variant().serving
        assert serving.recipe is not None
        assert {"name": "static-int8", "version": 1, "calibration": "minmax"}.items() <= serving.recipe.items()
        assert serving.parents == (product.variant().descriptor.digest,)
        assert "calibrated on 50 samples" in serving.provenance.notes

    def test_its_evidence_is_measured_against_the_original(self, quantized: Archive) -> None:
        evidence = quantized.variant().serving.evidence
        (item,) = evidence.agreement
        assert item.tensor == "y"
        assert 0.99 < item.cosine <= 1 + 1e-9
        assert item.top1 is not None
        assert 0.8 < item.top1 <= 1
        assert [item.rows for item in evidence.latency] == [1, 8, 32]
        assert [item.rows for item in evidence.baseline] == [1, 8, 32]
        assert set(evidence.speedups()) == {1, 8, 32}

    def test_its_goldens_are_its_own_answers_to_the_originals_questions(self, quantized: Archive) -> None:
        theirs, ours = quantized.variant("fp32").goldens(), quantized.variant("int8").goldens()
        assert len(theirs) == len(ours) > 0
        for their, our in zip(theirs, ours, strict=True):
            assert np.array_equal(their.inputs["x"], our.inputs["x"])
            assert np.array_equal(our.outputs["y"], run(quantized, "int8", our.inputs))

    def test_a_file_and_npz_with_more_in_it_will_do(self, product: Archive, samples: Array, tmp_path: Path) -> None:
        product.save(tmp_path / "a.ingot")
        np.savez(tmp_path / "data.npz", x=samples, label=np.arange(50))
        steps: list[str] = []
        result = quantize(tmp_path / "a.ingot", tmp_path / "data.npz", progress=steps.append)
        assert result.variant().name == "int8"
        assert "Calibrating on 50 samples" in steps


class TestRecipe:
    @pytest.mark.parametrize("calibration", ["entropy", "percentile"])
    def test_other_ways_to_calibrate(
        self, product: Archive, samples: Array, calibration: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        result = quantize(product, {"x": samples}, config=StaticInt8(calibration=calibration))
        assert result.variant().serving.evidence.agreement[0].cosine > 0.95
        assert capfd.readouterr() == ("", "")

    def test_one_scale_for_a_whole_tensor(self, product: Archive, samples: Array) -> None:
        result = quantize(product, {"x": samples}, config=StaticInt8(per_channel=False))
        assert result.variant().serving.evidence.agreement[0].cosine > 0.99
        recipe = result.variant().serving.recipe
        assert recipe is not None
        assert recipe["per_channel"] is False

    def test_kept_nodes_stay_in_floating_point(self, product: Archive, samples: Array) -> None:
        with pytest.raises(InvalidArgument, match="nothing in this model can be quantized"):
            quantize(product, {"x": samples}, config=StaticInt8(keep=("product",)))

    def test_a_node_that_there_is_not(self, product: Archive, samples: Array) -> None:
        with pytest.raises(InvalidArgument, match="there is no node 'other' to keep; some nodes are: product"):
            quantize(product, {"x": samples}, config=StaticInt8(keep=("other",)))

    def test_half_precision_is_quantized_too(self, tmp_path: Path, samples: Array) -> None:
        result = quantize(export_model(matmul(tmp_path, np.float16)), {"x": samples.astype(np.float16)})
        assert [variant.name for variant in result.variants] == ["int8", "fp16"]
        assert result.variant().serving.evidence.agreement[0].cosine > 0.99


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({}, "lacks the input 'x'; it holds: nothing"),
            ({"y": np.ones(3)}, "lacks the input 'x'; it holds: y"),
            ({"x": np.ones((0, 8), np.float32)}, r"is empty: 'x' has shape \[0, 8\]"),
            ({"x": np.full((5, 8), np.nan, np.float32)}, "holds NaN or infinity in 'x'"),
            ({"x": np.full((5, 8), np.inf, np.float32)}, "holds NaN or infinity in 'x'"),
            ({"x": np.ones((5, 8))}, "input 'x' has datatype FP64, the model takes FP32"),
            ({"x": [[1.0] * 8]}, "input 'x' has datatype FP64, the model takes FP32"),
            ({"x": np.ones((5, 8), np.int64)}, "input 'x' has datatype INT64, the model takes FP32"),
            ({"x": np.ones((5, 7), np.float32)}, "dimension 1 of input 'x' is 7, the model takes 8"),
            ({"x": np.ones(8, np.float32)}, "input 'x' has 1 dimensions"),
        ],
    )
    def test_data_that_does_not_fit(self, product: Archive, data: Any, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            quantize(product, data)

    def test_the_file_with_the_data_is_named(self, product: Archive, tmp_path: Path) -> None:
        np.savez(tmp_path / "data.npz", y=np.ones(3))
        with pytest.raises(InvalidArgument, match=r"calibration data in \S*data\.npz lacks the input 'x'; it holds: y"):
            quantize(product, tmp_path / "data.npz")

    def test_files_that_are_not_there(self, product: Archive, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"nope\.npz"):
            quantize(product, tmp_path / "nope.npz")
        with pytest.raises(NotFound, match=r"nope\.ingot"):
            quantize(tmp_path / "nope.ingot", {"x": np.ones((1, 8), np.float32)})

    def test_what_is_quantized_already(self, quantized: Archive, samples: Array) -> None:
        with pytest.raises(
            InvalidArgument, match="has a variant 'int8' already; quantize the archive that it was made"
        ):
            quantize(quantized, {"x": samples})

    def test_a_source_that_is_quantized_already(self, quantized: Archive, samples: Array) -> None:
        again = export_model_of(quantized)
        with pytest.raises(InvalidArgument, match="is quantized already; quantize the floating-point variant"):
            quantize(again, {"x": samples})

    def test_a_model_with_nothing_to_quantize(self, tmp_path: Path) -> None:
        archive = export_model(onnx_models.affine(tmp_path))
        with pytest.raises(InvalidArgument, match="it has no convolution or matrix product"):
            quantize(archive, {"x": np.ones((4, 3), np.float32)})

    def test_a_result_that_gives_nan_is_never_packed(
        self, product: Archive, samples: Array, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        apply = static_int8.apply

        def broken(*arguments: Any) -> Any:
            model = apply(*arguments)
            for value in model.graph.initializers.values():
                if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
                    value.const_value = ir.Tensor(np.full_like(value.const_value.numpy(), np.nan), name=value.name)
            return model

        monkeypatch.setattr(static_int8, "apply", broken)
        with pytest.raises(QuantizationError, match="gives NaN"):
            quantize(product, {"x": samples})


def export_model_of(archive: Archive) -> Archive:
    """Export the int8 graph of an archive as if it were somebody's own ONNX file."""
    graph = archive.variant("int8").path()
    path = graph.with_name("model.onnx")
    path.write_bytes(graph.read_bytes())
    return export_model(path)


def test_a_model_without_a_batch_and_with_one_number_as_its_answer(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(RNG.standard_normal((8, 4)).astype(np.float32), "weight")
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("ReduceMean", ["h"], ["y"], keepdims=0),
    ]
    kind = TensorProto.FLOAT
    path = onnx_models.save(tmp_path / "mean.onnx", nodes, [("x", kind, (3, 8))], [("y", kind, ())], [weight])
    data = {"x": RNG.standard_normal((3, 8)).astype(np.float32)}
    result = quantize(export_model(path), data)
    assert result.variant().serving.evidence.agreement[0].cosine == pytest.approx(1)
    assert [item.rows for item in result.variant().serving.evidence.latency] == [1]
