"""``ingot.quantize`` as a user calls it: the result, its quality, and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.demo import Data, Digits, predict
from ingot.errors import InvalidArgument, QuantizationError, Unsupported
from ingot.model_store import Archive
from ingot.model_store.format import manifest
from ingot.quant import DynamicInt8, QuantConfig, Quantized, StaticInt8, WeightInt4, WeightInt8
from ingot.quant import run as quantize
from ingot.quant.config import RECIPES, Recipe
from ingot.quant.report.records import DOCUMENT, Report
from ingot.quant.schemes.plan import Plan
from ingot.runtime.machine import devices
from ingot.tensors import Array
from tests.quant import small_models
from tests.quant.small_models import make_faster, rows, run, sentences

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def _any_machine() -> Iterator[None]:
    """Make candidates faster on any machine; these tests are not about speed."""
    with pytest.MonkeyPatch.context() as patch:
        make_faster(patch)
        yield


@pytest.fixture(scope="module")
def classifier() -> Archive:
    return small_models.classifier()


@pytest.fixture(scope="module")
def labelled(classifier: Archive) -> dict[str, Any]:
    x = rows(200)
    return {"x": x, "y": run(classifier, "fp32", {"x": x})["logits"].argmax(1)}


@pytest.fixture(scope="module")
def quantized(classifier: Archive, labelled: dict[str, Any]) -> Quantized:
    return quantize(classifier, labelled, config=QuantConfig(metric="accuracy:labels=y", max_drop=0.05))


class TestArchive:
    @pytest.mark.matrix
    def test_the_new_variant_is_preferred_and_the_original_stays(
        self, classifier: Archive, quantized: Quantized
    ) -> None:
        archive = quantized.archive
        archive.verify()
        assert [variant.name for variant in archive.variants] == ["int8", "fp32"]
        assert archive.variant("fp32").descriptor == classifier.variant().descriptor
        assert archive.signature == classifier.signature
        assert [variant.name for variant in classifier.variants] == ["fp32"]
        assert (quantized.verdict, quantized.reason) == ("quantized", "")

    @pytest.mark.matrix
    def test_the_content_of_serving_json(self, classifier: Archive, quantized: Quantized) -> None:
        serving = quantized.archive.variant("int8").serving
        assert serving.recipe is not None
        assert serving.recipe["name"] == "auto"
        assert serving.defaults == small_models.LABELLED
        assert set(serving.recipe["plan"]["schemes"]) == {"first", "second"}
        assert serving.recipe["quantized_ops"] == sum(serving.recipe["operators"].values()) > 0
        assert serving.parents == (classifier.variant().descriptor.digest,)
        evidence = serving.evidence
        assert evidence.holds is True
        assert [item.rows for item in evidence.latency] == [1, 8, 32]
        assert evidence.speedups() == {1: pytest.approx(2), 8: pytest.approx(2), 32: pytest.approx(2)}
        assert [item.tensor for item in evidence.agreement] == ["logits"]
        metric = evidence.metric
        assert metric is not None
        assert (metric.name, metric.budget, metric.rows, metric.held_out) == ("accuracy:labels=y", 0.05, 100, True)
        assert metric.before.value == 1
        assert metric.after.low <= metric.after.value <= metric.after.high <= 1
        assert metric.drop.value == pytest.approx(metric.before.value - metric.after.value)
        assert metric.data.startswith("sha256:")

    def test_the_report_travels_in_the_archive(self, quantized: Quantized, tmp_path: Path) -> None:
        quantized.archive.save(tmp_path / "q.ingot")
        variant = Archive.open(tmp_path / "q.ingot").variant("int8")
        report = manifest.decode(Report, variant.document(DOCUMENT) or b"", DOCUMENT)
        assert report == quantized.report
        assert report.chosen is not None
        assert (report.variant, report.chosen.holds, report.chosen.rejected) == ("int8", True, "")
        assert {layer.name: layer.operator for layer in report.layers} == {"first": "MatMul", "second": "Gemm"}
        assert all(layer.sqnr is not None and layer.sqnr > 20 for layer in report.layers)
        assert (report.data.calibration_rows, report.data.evaluation_rows) == (100, 100)
        assert report.data.source == "data in memory"
        assert report.audit is not None
        assert report.audit.quantized
        assert b"<svg" in (variant.document("quantization.html") or b"")
        assert variant.document("quantization.txt")

    def test_its_goldens_are_its_own_answers_to_the_originals_questions(self, quantized: Quantized) -> None:
        theirs, ours = (quantized.archive.variant(name).goldens() for name in ("fp32", "int8"))
        assert len(theirs) == len(ours) > 0
        for their, our in zip(theirs, ours, strict=True):
            assert np.array_equal(their.inputs["x"], our.inputs["x"])
            assert np.array_equal(our.outputs["logits"], run(quantized.archive, "int8", our.inputs)["logits"])

    @pytest.mark.matrix
    def test_it_is_served_under_both_names(self, quantized: Quantized, tmp_path: Path) -> None:
        path = tmp_path / "q.ingot"
        quantized.archive.save(path)
        x = rows(5)
        with ingot.serve(f"small={path}#int8", f"large={path}#fp32", **FREE) as server:
            for model, variant in (("small", "int8"), ("large", "fp32")):
                for url in (server.http_url, server.grpc_url):
                    with ingot.Client(url) as client:
                        answer = client.infer(model, {"x": x})["logits"]
                    assert np.allclose(answer, run(quantized.archive, variant, {"x": x})["logits"], atol=1e-5)


def test_quantized_digits_predict_like_pytorch(digits: tuple[Digits, Data, Data], digits_archive: Path) -> None:
    model, _, held_out = digits
    archive = Archive.open(digits_archive)
    expected = predict(model, held_out.images)
    actual = run(archive, "int8", {"image": held_out.images})["logits"].argmax(1)
    assert (expected == held_out.labels).mean() > 0.95
    assert abs((actual == held_out.labels).mean() - (expected == held_out.labels).mean()) <= 0.01
    assert (actual == expected).mean() > 0.98
    assert np.array_equal(run(archive, "fp32", {"image": held_out.images})["logits"].argmax(1), expected)


def test_quantized_digits_are_really_in_integers_and_small(digits_archive: Path) -> None:
    archive = Archive.open(digits_archive)
    small, large = archive.variant("int8"), archive.variant("fp32")
    assert small.serving.recipe is not None
    operators = small.serving.recipe["operators"]
    assert operators["QLinearConv"] == 3
    assert operators["QGemm"] == 1
    assert small.size < large.size / 2


def images() -> dict[str, Array]:
    return {"image": rows(512).reshape(64, 1, 8, 8)}


def sequences() -> list[dict[str, Array]]:
    """Of several lengths; the batch is the second dimension."""
    return [{"x": np.stack([rows(6, length + step) for step in range(length)])} for length in (3, 4, 7, 3)]


INTEGERS = "static-int8 dynamic-int8 weight-int8 weight-int4"
MODELS: list[tuple[Callable[[], Archive], Callable[[], Any], str]] = [
    (small_models.classifier, lambda: {"x": rows()}, f"{INTEGERS} bf16 fp16"),
    (lambda: small_models.classifier(np.float16), lambda: {"x": rows().astype(np.float16)}, INTEGERS),
    (small_models.pictures, images, f"{INTEGERS} bf16 fp16"),
    (small_models.texts, sentences, f"{INTEGERS} bf16 fp16"),
    (small_models.unbatched, lambda: [{"x": rows(3, seed)} for seed in range(20)], f"{INTEGERS} bf16 fp16"),
    (small_models.recurrent, sequences, "dynamic-int8"),
]
NAMES = ["classifier", "half precision", "pictures", "texts of several lengths", "no batch", "batch in second place"]


@pytest.mark.parametrize(("make", "data", "recipes"), MODELS, ids=NAMES)
class TestModels:
    """Several inputs and outputs, integers, several lengths, no batch, another type: by search and by recipes."""

    @pytest.mark.matrix
    def test_a_search_with_data(self, make: Callable[[], Archive], data: Callable[[], Any], recipes: str) -> None:
        model = make()
        result = quantize(model, data())
        assert result.verdict == "quantized"
        assert [variant.name for variant in result.archive.variants] == ["int8", model.variant().name]
        result.archive.verify()
        evidence = result.archive.variant().serving.evidence
        assert evidence.metric is not None
        assert (evidence.metric.name, evidence.metric.held_out) == ("cosine", True)
        assert 0.99 <= evidence.metric.after.value < 1
        assert {item.tensor for item in evidence.agreement} == {spec.name for spec in model.signature.outputs}

    @pytest.mark.matrix
    def test_a_search_without_data(self, make: Callable[[], Archive], data: Callable[[], Any], recipes: str) -> None:
        result = quantize(make())
        assert result.verdict == "quantized"
        assert result.report.notes[0] == "measured on generated inputs only: pass real ones for a reliable result"
        assert "need calibration data were not tried" in result.report.notes[1]
        assert (result.report.data.digest, result.report.data.source) == ("", "")
        assert not result.report.data.held_out
        serving = result.archive.variant().serving
        assert serving.recipe is not None
        assert "static" not in serving.recipe["plan"]["schemes"].values()
        assert result.report.notes == serving.provenance.notes

    @pytest.mark.matrix
    def test_each_recipe(self, make: Callable[[], Archive], data: Callable[[], Any], recipes: str) -> None:
        model = make()
        for name, recipe in RECIPES.items():
            config = QuantConfig(recipe(), force=True)
            if name not in recipes:
                if name != "fp16" or model.variant().name != "fp16":
                    with pytest.raises(QuantizationError, match="nothing in th"):
                        quantize(model, data(), config=config)
                continue
            archive = quantize(model, data(), config=config).archive
            archive.verify()
            (made,) = [variant for variant in archive.variants if variant.name != model.variant().name]
            serving = made.serving
            assert made.name == serving.precision == recipe.precision
            assert serving.recipe is not None
            assert {"name": name, "version": 1} == {key: serving.recipe[key] for key in ("name", "version")}
            assert serving.evidence.metric is not None
            assert serving.evidence.metric.after.value > 0.98


class TestRecipes:
    @pytest.mark.parametrize("recipe", [StaticInt8(), DynamicInt8(), WeightInt8(), WeightInt4()], ids=lambda r: r.name)
    @pytest.mark.parametrize("by", ["config", "recipe"])
    @pytest.mark.one_case
    def test_kept_layers_stay_in_floating_point(self, classifier: Archive, recipe: Recipe, by: str) -> None:
        kept = type(recipe)(keep=("second",))
        config = QuantConfig(kept if by == "recipe" else recipe, keep=("second",) if by == "config" else (), force=True)
        report = quantize(classifier, {"x": rows()}, config=config).report
        assert [layer.scheme == "float" for layer in report.layers] == [False, True]

    @pytest.mark.matrix
    def test_a_search_keeps_them_in_every_candidate(self, classifier: Archive) -> None:
        report = quantize(classifier, {"x": rows()}, config=QuantConfig(keep=("first",))).report
        assert all(set(item.recipe["schemes"]) == {"second"} for item in report.candidates)

    def test_a_prefix_keeps_all_below_it(self, digits_fp32: Path, digits: tuple[Digits, Data, Data]) -> None:
        config = QuantConfig(StaticInt8(keep=("features",)), max_drop=1, force=True)
        report = quantize(digits_fp32, {"image": digits[1].images[:50]}, config=config).report
        schemes = {layer.name: layer.scheme for layer in report.layers}
        assert schemes == {
            **dict.fromkeys(("features.0", "features.3", "features.7"), "float"),
            "classify": "static int8",
        }

    def test_a_layer_that_there_is_not(self, classifier: Archive) -> None:
        for config in (QuantConfig(keep=("secnd",)), StaticInt8(keep=("secnd",))):
            with pytest.raises(InvalidArgument, match="there is no layer 'secnd' to keep; the nearest are: second"):
                quantize(classifier, {"x": rows()}, config=config)

    def test_nothing_left_to_quantize(self, classifier: Archive) -> None:
        """The message names the layers that are kept, not the recipe."""
        for config in (QuantConfig(StaticInt8(keep=("first", "second"))), QuantConfig(keep=("first", "second"))):
            with pytest.raises(InvalidArgument, match=r"every layer is kept in floating point.*keep fewer \(--keep\)"):
                quantize(classifier, {"x": rows()}, config=config)
        pictures = small_models.pictures()
        with pytest.raises(QuantizationError, match="every layer that 'dynamic-int8' supports is kept in floating"):
            quantize(pictures, config=DynamicInt8(keep=("head",)))

    @pytest.mark.parametrize(
        "recipe",
        [
            StaticInt8(calibration="mse"),
            StaticInt8(calibration="percentile"),
            StaticInt8(calibration="entropy"),
            StaticInt8(activations="u16"),
            StaticInt8(per_channel=False, between=False),
            StaticInt8(migrate=0.5, correct=True),
            DynamicInt8(per_channel=False),
            WeightInt8(block=32),
            WeightInt4(block=16),
        ],
        ids=repr,
    )
    @pytest.mark.one_case
    def test_options_are_kept_in_the_archive(
        self, classifier: Archive, recipe: Recipe, capfd: pytest.CaptureFixture[str]
    ) -> None:
        result = quantize(classifier, {"x": rows()}, config=QuantConfig(recipe, force=True))
        serving = result.archive.variant(recipe.precision).serving
        assert serving.recipe is not None
        assert {**recipe.record(), "keep": ()}.items() <= {**serving.recipe, "keep": ()}.items()
        assert serving.evidence.agreement[0].cosine > 0.97
        assert capfd.readouterr() == ("", "")


class TestData:
    @pytest.mark.matrix
    def test_the_rows_of_the_metric_are_not_used_for_ranges(self, classifier: Archive) -> None:
        """A row far out of the others' range shows in which part it is."""
        x = rows(100)
        x[7] = 1000
        report = quantize(classifier, {"x": x, "row": np.arange(100)}, config=QuantConfig(metric=_has_row_7)).report
        assert report.after is not None
        layers = {layer.name: layer for layer in report.layers}
        measured_on_it, learnt_from_it = report.after.value == 1, (layers["first"].high or 0) >= 1000
        static = any(layer.scheme == "static int8" for layer in report.layers)
        assert not (measured_on_it and learnt_from_it)
        assert not static or measured_on_it or learnt_from_it

    @pytest.mark.matrix
    def test_the_split_depends_on_the_seed_alone(self, classifier: Archive) -> None:
        digests = [
            quantize(classifier, {"x": rows(100)}, config=QuantConfig(DynamicInt8(), seed=seed)).report.data.digest
            for seed in (0, 0, 1)
        ]
        assert digests[0] == digests[1] != digests[2]

    @pytest.mark.matrix
    def test_data_for_the_metric_alone(self, classifier: Archive, labelled: dict[str, Any], tmp_path: Path) -> None:
        np.savez(tmp_path / "val.npz", **labelled)
        config = QuantConfig(metric="accuracy:labels=y", max_drop=0.05)
        report = quantize(classifier, validate=tmp_path / "val.npz", config=config).report
        assert report.data.source == "val.npz"  # and not its folder
        assert report.data.digest.startswith("sha256:")
        assert (report.data.calibration_rows, report.data.evaluation_rows, report.data.held_out) == (0, 200, True)
        assert any("need calibration data were not tried" in remark for remark in report.notes)
        with pytest.raises(InvalidArgument, match="'static-int8' needs calibration data; pass some"):
            quantize(classifier, validate=labelled, config=StaticInt8())

    def test_both_kinds_of_data(self, classifier: Archive, labelled: dict[str, Any]) -> None:
        config = QuantConfig(StaticInt8(), metric="accuracy:labels=y", max_drop=0.05)
        report = quantize(classifier, {"x": rows(70, seed=5)}, validate=labelled, config=config).report
        assert (report.data.calibration_rows, report.data.evaluation_rows, report.data.held_out) == (70, 200, True)

    @pytest.mark.matrix
    def test_the_same_data_for_both_is_not_held_out(self, classifier: Archive) -> None:
        report = quantize(classifier, {"x": rows()}, validate={"x": rows()}).report
        assert not report.data.held_out
        assert "64 of the 64 rows of the metric were also used for calibration" in report.notes

    def test_rows_that_are_in_both_are_not_held_out(self, classifier: Archive, labelled: dict[str, Any]) -> None:
        mixed = np.concatenate([rows(40, seed=5), labelled["x"][[7, 90]]])
        config = QuantConfig(StaticInt8(), metric="accuracy:labels=y", max_drop=0.05)
        report = quantize(classifier, {"x": mixed}, validate=labelled, config=config).report
        assert not report.data.held_out
        assert "2 of the 200 rows of the metric were also used for calibration" in report.notes

    def test_little_data_serves_both_and_is_reported(self, classifier: Archive) -> None:
        report = quantize(classifier, {"x": rows(3)}).report
        assert (report.data.calibration_rows, report.data.evaluation_rows, report.data.held_out) == (3, 3, False)
        assert report.notes == ("all 3 samples were used for both calibration and the metric",)

    @pytest.mark.matrix
    def test_a_single_row(self, classifier: Archive) -> None:
        assert quantize(classifier, {"x": rows(1)}).verdict == "quantized"

    @pytest.mark.matrix
    def test_a_file_in_and_a_file_out(self, classifier: Archive, labelled: dict[str, Any], tmp_path: Path) -> None:
        classifier.save(tmp_path / "a.ingot")
        np.savez(tmp_path / "data.npz", **labelled)
        steps: list[str] = []
        config = QuantConfig(metric="accuracy:labels=y", max_drop=0.05)
        path = str(tmp_path / "a.ingot")
        archive = ingot.quantize(path, str(tmp_path / "data.npz"), config=config, progress=steps.append)
        archive.save(path)
        assert [variant.name for variant in Archive.open(path).variants] == ["int8", "fp32"]
        assert steps[0] == "Running the original on 100 samples"
        assert "Trying dynamic int8" in steps


def _has_row_7(outputs: dict[str, Array], data: dict[str, Array]) -> float:
    """1 if the row is among those of the metric; never a drop."""
    return float(7 in data["row"])


class TestMetric:
    @pytest.mark.matrix
    def test_a_function_sees_all_rows(self, classifier: Archive) -> None:
        def score(outputs: dict[str, Array], data: dict[str, Array]) -> float:
            assert outputs["logits"].shape == (len(data["weight"]), 4)
            return float((outputs["logits"].argmax(1) * data["weight"]).sum())

        result = quantize(
            classifier, {"x": rows(), "weight": np.ones(64)}, config=QuantConfig(metric=score, max_drop=9)
        )
        assert result.verdict == "quantized"
        assert result.report.metric.endswith("score")

    @pytest.mark.matrix
    def test_a_lower_value_may_be_the_better_one(self, classifier: Archive) -> None:
        x = rows()
        y = run(classifier, "fp32", {"x": x})["logits"]
        config = QuantConfig(metric="mae:labels=y", max_drop=0.1)
        report = quantize(classifier, {"x": x, "y": y}, config=config).report
        assert report.before is not None
        assert report.after is not None
        assert report.drop is not None
        assert report.before.value == pytest.approx(0, abs=1e-6)
        assert report.drop.value == pytest.approx(report.after.value - report.before.value)
        assert 0 < report.drop.value < 0.1


def test_a_result_with_nan_is_never_packed(classifier: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.quant.measure.trial import Built

    load = Built.load

    class Broken:
        def __init__(self, engine: Any):
            self._engine = engine

        def run(self, inputs: Any) -> dict[str, Array]:
            return {name: array * np.float32("nan") for name, array in self._engine.run(inputs).items()}

        def close(self) -> None:
            self._engine.close()

    monkeypatch.setattr(Built, "load", lambda *arguments: Broken(load(*arguments)))
    for config in (QuantConfig(DynamicInt8()), QuantConfig(DynamicInt8(), force=True), QuantConfig()):
        with pytest.raises(QuantizationError, match="returns NaN"):
            quantize(classifier, {"x": rows()}, config=config)


@pytest.mark.matrix
def test_for_openvino_too_where_it_is_installed(
    digits_fp32: Path, digits: tuple[Digits, Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(devices, "has_bf16", lambda: False)
    images = digits[1].images[:100]
    archive = quantize(digits_fp32, {"image": images}, config=QuantConfig(engines=("openvino",), max_drop=0.1)).archive
    serving = archive.variant("int8").serving
    assert serving.requires["engine"] == "openvino"
    assert serving.recipe is not None
    assert serving.recipe["plan"]["engine"] == "openvino"
    archive.save(tmp_path / "q.ingot")
    with (
        ingot.serve(f"digits={tmp_path / 'q.ingot'}#int8", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        answer = client.infer("digits", {"image": images})["logits"]
    assert (answer.argmax(1) == run(archive, "fp32", {"image": images})["logits"].argmax(1)).mean() > 0.95


@pytest.mark.matrix
def test_the_best_are_timed_side_by_side_even_with_linked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of weights that one model links is read for another."""
    monkeypatch.setattr("ingot.model_store.format.onnx_graph.EXTERNAL_BYTES", 64)
    plans = [Plan(f"{name} alone", {name: "dynamic"}) for name in ("first", "second")]
    monkeypatch.setattr("ingot.quant.search.search.families", lambda *arguments: iter(plans))
    found = quantize(small_models.classifier(), {"x": rows()}, config=QuantConfig(max_drop=0.1))
    assert found.verdict == "quantized"
    assert all(not item.rejected for item in found.report.candidates)


@pytest.mark.matrix
def test_bf16_is_a_candidate_where_the_processor_has_it(
    digits_fp32: Path, digits: tuple[Digits, Data, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All candidates are as fast here, and it is the most exact of them."""
    pytest.importorskip("openvino")
    if not devices.has_bf16():
        pytest.skip("the processor has no bfloat16")
    images = digits[1].images[:100]
    config = QuantConfig(engines=("openvino", "onnxruntime"), max_drop=0.1)
    found = quantize(digits_fp32, {"image": images}, config=config)
    names = [item.name for item in found.report.candidates]
    assert names[0] == "bf16, OpenVINO"
    assert names[1] == "dynamic int8"
    assert found.report.layers[0].scheme == "bf16"
    variant = found.archive.variant("bf16-openvino")
    assert variant.serving.precision == "bf16"
    assert variant.serving.requires["engine"] == "openvino"
    assert variant.serving.requires["inference_precision"] == "bf16"
    assert variant.size == found.archive.variant("fp32").size
    assert 1e-7 < variant.serving.evidence.agreement[0].error < 0.05  # measured in the engine that serves it
    found.archive.save(tmp_path / "q.ingot")
    with (
        ingot.serve(f"digits={tmp_path / 'q.ingot'}#bf16-openvino", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        answer = client.infer("digits", {"image": images})["logits"]
    exact = run(found.archive, "fp32", {"image": images})["logits"]
    error = np.abs(answer - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05  # float32 is some thousand times as exact

    monkeypatch.setattr(devices, "has_bf16", lambda: False)
    with ingot.serve(f"digits={tmp_path / 'q.ingot'}", **FREE) as server, ingot.Client(server.http_url) as client:
        assert client.metadata("digits")["properties"]["variant"] == "fp32"
    with pytest.raises(Unsupported, match="lacks bfloat16 instructions"):
        ingot.serve(f"digits={tmp_path / 'q.ingot'}#bf16-openvino", **FREE)
    names = [item.name for item in quantize(digits_fp32, {"image": images}, config=config).report.candidates]
    assert not any("bf16" in name for name in names)


@pytest.mark.matrix
def test_layers_to_keep_leave_bf16_out(digits_fp32: Path, digits: tuple[Digits, Data, Data]) -> None:
    pytest.importorskip("openvino")
    layer = quantize(digits_fp32, config=QuantConfig(DynamicInt8(), max_drop=1)).report.layers[-1].name
    config = QuantConfig(engines=("openvino", "onnxruntime"), max_drop=0.1, keep=(layer,))
    found = quantize(digits_fp32, {"image": digits[1].images[:100]}, config=config)
    assert not any("bf16" in item.name for item in found.report.candidates)
