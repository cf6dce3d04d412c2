"""Variants of archives in half precision, by ``quantize``; tests/quant/schemes/test_half.py tests their graphs."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest

import ingot
from ingot.demo import Data, Digits
from ingot.errors import InvalidArgument, QuantizationError
from ingot.model_store import Archive
from ingot.quant import BFloat16, Float16, QuantConfig, Quantized, StaticInt8
from ingot.quant import run as quantize
from ingot.runtime.machine import devices
from tests.quant import small_models
from tests.quant.small_models import make_faster, rows, run

HALVES = [BFloat16, Float16]


@pytest.fixture(scope="module")
def classifier() -> Archive:
    return small_models.classifier()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_cuda", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("kind", HALVES)
class TestForGPUs:
    @pytest.mark.matrix
    def test_the_archives_documents(self, classifier: Archive, kind: type[BFloat16 | Float16]) -> None:
        result = quantize(classifier, {"x": rows()}, config=kind())
        result.archive.verify()
        assert result.verdict == "quantized"
        assert [variant.name for variant in result.archive.variants] == ["fp32", kind.precision]  # not preferred
        serving = result.archive.variant(kind.precision).serving
        assert serving.requires["device"] == "cuda"
        assert serving.precision == kind.precision
        assert serving.parents == (classifier.variant().descriptor.digest,)
        assert serving.recipe is not None
        assert serving.recipe["operators"]["MatMul"] == 1
        assert (serving.evidence.latency, serving.evidence.holds) == ((), True)
        assert "made for GPUs and not timed, as this machine has none" in serving.provenance.notes
        assert serving.evidence.metric is not None
        assert serving.evidence.metric.after.value > 0.999
        assert result.report.outputs == serving.evidence.agreement
        assert result.report.notes == serving.provenance.notes

    @pytest.mark.matrix
    def test_kept_layers(self, classifier: Archive, kind: type[BFloat16 | Float16]) -> None:
        for config in (QuantConfig(kind(), keep=("first",)), kind(keep=("first",))):
            archive = quantize(classifier, {"x": rows()}, config=config).archive
            recipe = archive.variant(kind.precision).serving.recipe
            assert recipe is not None
            assert "MatMul" not in recipe["operators"]
            assert recipe["operators"]["Gemm"] == 1
        with pytest.raises(InvalidArgument, match="the nearest are: first"):
            quantize(classifier, {"x": rows()}, config=kind(keep=("frist",)))

    def test_a_variant_that_loses_too_much_is_refused_unless_forced(
        self, classifier: Archive, kind: type[BFloat16 | Float16]
    ) -> None:
        with pytest.raises(QuantizationError, match=rf"'{kind.name}' loses \S+ of the metric, more than the 0 allowed"):
            quantize(classifier, {"x": rows()}, config=QuantConfig(kind(), max_drop=0))
        result = quantize(classifier, {"x": rows()}, config=QuantConfig(kind(), max_drop=0, force=True))
        assert result.archive.variant(kind.precision).serving.evidence.holds is False
        assert result.report.chosen is not None
        assert not result.report.chosen.holds
        assert result.reason.startswith("loses ")


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.matrix
def test_stored_in_half_it_runs_anywhere_and_is_half_as_large(
    digits: tuple[Digits, Data, Data], digits_fp32: Path, kind: type[BFloat16 | Float16]
) -> None:
    result = quantize(digits_fp32, {"image": digits[1].images[:100]}, config=kind(device="any"))
    small, large = (result.archive.variant(name) for name in (kind.precision, "fp32"))
    assert small.size < 0.6 * large.size
    assert "device" not in small.serving.requires
    assert [item.rows for item in small.serving.evidence.latency] == [1, 8, 32]
    assert result.report.chosen is not None
    assert set(result.report.chosen.speedups) == {1, 8, 32}
    assert result.report.baseline == small.serving.evidence.baseline
    images = digits[2].images[:50]
    left, right = (run(result.archive, name, {"image": images})["logits"] for name in (kind.precision, "fp32"))
    assert (left.argmax(1) == right.argmax(1)).mean() > 0.95
    for golden in small.goldens():
        answer = run(result.archive, kind.precision, golden.inputs)["logits"]
        assert np.allclose(answer, golden.outputs["logits"], atol=1e-4)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.matrix
def test_a_gpus_variant_is_not_served_on_a_cpu_unless_named(
    classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_faster(monkeypatch)
    archive = quantize(classifier, {"x": rows()}, config=QuantConfig(StaticInt8(), force=True)).archive
    archive = quantize(archive, {"x": rows()}, config=BFloat16()).archive
    path = tmp_path / "three.ingot"
    archive.save(path)
    with (
        caplog.at_level(logging.INFO, "ingot"),
        ingot.serve(
            str(path), f"large={path}#fp32", http_port=0, grpc_port=0, device="cpu", choice_time=0.02
        ) as server,
        ingot.Client(server.http_url) as client,
    ):
        assert client.metadata("classifier")["properties"]["variant"] in ("int8", "fp32")
        assert client.metadata("large")["properties"]["variant"] == "fp32"
    assert "left out: bf16: it is made for GPUs" in caplog.text


def test_the_graph_is_in_half_precision(classifier: Archive) -> None:
    archive = quantize(classifier, {"x": rows()}, config=Float16()).archive.unpacked()
    model = onnx.load(archive.variant("fp16").path(), load_external_data=False)
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds.values()
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.matrix
def test_generated_inputs_are_reported(classifier: Archive) -> None:
    result: Quantized = quantize(classifier, config=BFloat16())
    assert "measured on generated inputs only: pass real ones for a reliable result" in result.report.notes
    assert result.report.data.digest == ""


@pytest.mark.matrix
def test_kept_layers_are_not_stored_in_half_precision(digits: tuple[Digits, Data, Data], digits_fp32: Path) -> None:
    data = {"image": digits[1].images[:40]}
    config = QuantConfig(Float16(device="any", keep=("classify",)), keep=("features.3",))
    operators = quantize(digits_fp32, data, config=Float16(device="any")).archive.variant("fp16").serving.recipe
    fewer = quantize(digits_fp32, data, config=config).archive.variant("fp16").serving.recipe
    assert operators is not None
    assert fewer is not None
    assert sum(fewer["operators"].values()) == sum(operators["operators"].values()) - 2
    with pytest.raises(InvalidArgument, match="there is no layer 'clasify' to keep"):
        quantize(digits_fp32, data, config=Float16(device="any", keep=("clasify",)))


def test_a_device_without_a_recipe_in_half_precision() -> None:
    with pytest.raises(InvalidArgument, match="device of bf16 is 'cpu'; it must be one of cuda, any"):
        BFloat16(device="cpu")  # type: ignore[arg-type]
