"""Messages of quantization without a gain, and refusals."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import InvalidArgument, NotFound, QuantizationError, StorageFull
from ingot.export import export_model
from ingot.model_store import Archive, BatchLatency
from ingot.quant import BFloat16, DynamicInt8, Float16, QuantConfig, StaticInt8, WeightInt4, WeightInt8
from ingot.quant import run as quantize
from ingot.quant.measure.limits import Deadline
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.measure.trial import Trial
from ingot.quant.schemes.plan import EngineName
from ingot.quant.search.search import Search
from ingot.tensors import Array
from tests.quant import small_models
from tests.quant.small_models import make_faster, rows, run


@pytest.fixture(scope="module")
def classifier() -> Archive:
    return small_models.classifier()


@pytest.fixture(scope="module")
def quantized(classifier: Archive) -> Archive:
    return quantize(classifier, {"x": rows()}, config=QuantConfig(DynamicInt8(), force=True)).archive


def exacting(classifier: Archive) -> tuple[QuantConfig, list[dict[str, Array]]]:
    """A metric that no quantized model keeps, and data for it."""
    x = rows(40)
    y = run(classifier, "fp32", {"x": x})["logits"]
    return QuantConfig(metric="mae:labels=y", max_drop=0), [
        {"x": x[index : index + 1], "y": y[index : index + 1]} for index in range(40)
    ]


class TestVerdicts:
    @pytest.mark.matrix
    def test_nothing_is_faster(self, classifier: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        make_faster(monkeypatch, 0.9)
        result = quantize(classifier, {"x": rows()})
        assert (result.verdict, result.archive.digest) == ("nothing faster", classifier.digest)
        assert result.reason == "no candidate is faster than the original on this machine"
        assert {item.rejected for item in result.report.candidates} == {"not faster than the original"}
        assert result.report.chosen is None
        assert result.report.baseline

    @pytest.mark.matrix
    def test_an_archive_that_is_returned_unchanged_is_logged(
        self, classifier: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_faster(monkeypatch, 0.9)
        config = QuantConfig(batches=(1,))
        assert ingot.quantize(classifier, {"x": rows()}, config=config).digest == classifier.digest
        assert "no candidate is faster than the original on this machine; 'classifier' is returned" in caplog.text

    def test_time_before_the_call_counts(self, classifier: Archive) -> None:
        """Such as that of importing the packages, in the command."""
        steps: list[str] = []
        result = quantize(
            classifier,
            {"x": rows()},
            config=QuantConfig(budget=50),
            began=time.monotonic() - 60,
            progress=steps.append,
        )
        assert result.reason == "the time was up before anything was tried"
        assert result.archive.digest == classifier.digest
        assert steps == ["Running the original on 32 samples"]

    def test_undecided_timings_do_not_count(self, classifier: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        make_faster(monkeypatch, 1.01)
        assert quantize(classifier, {"x": rows()}).verdict == "nothing faster"

    def test_nothing_in_it_can_be_quantized(self) -> None:
        table = small_models.table()
        result = quantize(table, {"x": rows()[:, :3].copy()})
        assert (result.verdict, result.archive.digest) == ("nothing faster", table.digest)
        assert result.reason == "nothing in this model can be quantized"

    @pytest.mark.matrix
    def test_a_model_in_double_precision(self) -> None:
        data, told = (
            {"x": rows().astype(np.float64)},
            "layers in float64 cannot be quantized: cast the model to float32",
        )
        assert told in quantize(small_models.classifier(np.float64), data).reason
        with pytest.raises(QuantizationError, match=told):
            quantize(small_models.classifier(np.float64), data, config=StaticInt8())

    @pytest.mark.matrix
    def test_an_original_unrelated_to_the_labels_is_reported(self, classifier: Archive) -> None:
        labels = np.random.default_rng(0).permutation(np.arange(200) % 5 == 0).astype(np.int64)
        config = QuantConfig(metric="accuracy:labels=y", max_drop=1)
        report = quantize(classifier, validate={"x": rows(200), "y": labels}, config=config).report
        assert any("no better than always choosing the most frequent class" in note for note in report.notes)

    @pytest.mark.matrix
    def test_the_accuracy_budget_cannot_be_met(self, classifier: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        make_faster(monkeypatch)
        config, data = exacting(classifier)
        result = quantize(classifier, data, config=config)
        assert (result.verdict, result.archive.digest) == ("budget broken", classifier.digest)
        best = min((item for item in result.report.candidates if item.drop), key=lambda item: item.drop.value)  # type: ignore[union-attr]
        assert result.reason.startswith("no candidate that is faster keeps the metric within 0; the most exact is '")
        assert f"'{best.name}': it loses " in result.reason
        assert result.reason.endswith("and is 2.00 times as fast")
        assert all(not item.holds for item in result.report.candidates)
        assert any("kept" in item.name for item in result.report.candidates)  # it tried hard

    def test_the_time_is_up_before_the_first(self, classifier: Archive) -> None:
        result = quantize(classifier, {"x": rows()}, config=QuantConfig(budget=1e-9))
        assert (result.verdict, result.archive.digest) == ("nothing faster", classifier.digest)
        assert result.reason == "the time was up before anything was tried"

    def test_the_time_is_up_later(self, classifier: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        make_faster(monkeypatch)
        attempt = TrialRunner.attempt
        tried: list[str] = []

        def slow(runner: TrialRunner, plan: Any) -> Any:
            tried.append(plan.name)
            if len(tried) == 2:
                monkeypatch.setattr(Deadline, "now", 1e12)
            return attempt(runner, plan)

        monkeypatch.setattr(TrialRunner, "attempt", slow)
        result = quantize(classifier, {"x": rows()}, config=QuantConfig(budget=1000))
        assert result.verdict == "quantized"
        assert len(tried) == 2
        assert len(result.report.candidates) == 1  # the second was given up
        assert "the time was up before the search was complete" in result.report.notes

    @pytest.mark.matrix
    def test_only_slower_batches_are_reported_as_slower(
        self, classifier: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All are three times as fast at batch 1, and a bit slower at batch 8."""

        def measure(engines: Any, *arguments: Any, **options: Any) -> Any:
            times = {1: (3e-3, 1e-3), 8: (8e-3, 1e-2)}
            return [
                tuple(BatchLatency(rows=rows, seconds=pair[place > 0]) for rows, pair in times.items())
                for place, _ in enumerate(engines)
            ]

        make_faster(monkeypatch)
        monkeypatch.setattr("ingot.runtime.profiling.profile.measure_together", measure)
        result = quantize(classifier, {"x": rows()}, config=QuantConfig(batches=(1, 8)))
        assert {item.rejected for item in result.report.candidates} == {"slower at batch 8 (0.80x)"}
        assert result.reason.startswith(
            "no candidate is faster than the original without being slower at some batch size; '"
        )
        assert result.reason.endswith("but slower at batch 8 (0.80x): pass the batch sizes that you serve")
        with pytest.raises(QuantizationError, match=r"is slower at batch 8 on this machine \(3.00x at batch 1, 0.80x"):
            quantize(classifier, {"x": rows()}, config=QuantConfig(WeightInt8(), batches=(1, 8)))

    def test_a_recipe_that_is_slower_is_refused_unless_forced(
        self, classifier: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_faster(monkeypatch, 0.5)
        message = (
            r"the result of 'weight-int8' is not faster than the original on this machine \(0.50x at batch 1, 0.50x at "
            r"batch 4\); force keeps it \(--force\)"
        )
        config = QuantConfig(WeightInt8(), batches=(1, 4))
        with pytest.raises(QuantizationError, match=message):
            quantize(classifier, {"x": rows()}, config=config)
        result = quantize(classifier, {"x": rows()}, config=QuantConfig(WeightInt8(), batches=(1, 4), force=True))
        assert result.verdict == "quantized"
        assert "is not faster than the original" in result.reason
        assert [variant.name for variant in result.archive.variants] == ["fp32", "int8"]
        assert result.archive.variant("int8").serving.evidence.holds is True

    def test_a_recipe_that_breaks_the_budget_is_refused_unless_forced(
        self, classifier: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_faster(monkeypatch)
        config, data = exacting(classifier)
        message = r"the result of 'dynamic-int8' loses 0\.\d+ of the metric, more than the 0 allowed; force keeps it"
        with pytest.raises(QuantizationError, match=message):
            quantize(classifier, data, config=QuantConfig(DynamicInt8(), metric=config.metric, max_drop=0))
        forced = QuantConfig(DynamicInt8(), metric=config.metric, max_drop=0, force=True)
        result = quantize(classifier, data, config=forced)
        assert result.reason.startswith("loses ")
        assert [variant.name for variant in result.archive.variants] == ["fp32", "int8"]
        assert result.archive.variant("int8").serving.evidence.holds is False
        assert result.report.chosen is not None
        assert not result.report.chosen.holds


class TestFailures:
    @pytest.mark.matrix
    def test_a_search_of_which_nothing_can_be_run(
        self, classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not treated as a search without a gain, and not remembered once the cause is fixed."""
        make_faster(monkeypatch)
        journal = tmp_path / "journal"
        with monkeypatch.context() as patch:
            patch.setattr(TrialRunner, "attempt", lambda runner, plan: Trial(plan, failure="the engine is broken"))
            message = r"none of the \d+ candidates can be run; 'dynamic int8' failed: the engine is broken"
            with pytest.raises(QuantizationError, match=message):
                quantize(classifier, {"x": rows()}, journal=journal)
        assert quantize(classifier, {"x": rows()}, journal=journal).verdict == "quantized"

    @pytest.mark.parametrize("recipe", [None, DynamicInt8()])
    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
            InvalidArgument("/tmp/x cannot be written: No space left on device"),
            RuntimeError("[ONNXRuntimeError] : 1 : FAIL : write: No space left on device"),
            RuntimeError(
                '[ONNXRuntimeError] : 1 : FAIL : Failed to write external initializers to file: "weights.bin"'
            ),
        ],
        ids=lambda error: type(error).__name__,
    )
    @pytest.mark.matrix
    def test_a_full_disk(
        self, classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, recipe: Any
    ) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise error

        make_faster(monkeypatch)
        journal = str(tmp_path / "journal")
        with monkeypatch.context() as patch:
            patch.setattr("ingot.quant.measure.runner.onnx_graph.pack", fail)
            with pytest.raises(StorageFull, match=r"no space is left in .*: free some, or set TMPDIR to a folder"):
                quantize(classifier, {"x": rows()}, config=recipe, journal=journal)
        assert quantize(classifier, {"x": rows()}, config=recipe, journal=journal).verdict == "quantized"


class TestJournal:
    @pytest.mark.matrix
    def test_an_interrupted_search_resumes(
        self, classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_faster(monkeypatch)
        journal = tmp_path / "journal"
        attempt = TrialRunner.attempt
        tried: list[str] = []

        def interrupted(runner: TrialRunner, plan: Any) -> Any:
            if len(tried) == 2:
                raise KeyboardInterrupt
            tried.append(plan.key)
            return attempt(runner, plan)

        with monkeypatch.context() as patch:
            patch.setattr(TrialRunner, "attempt", interrupted)
            with pytest.raises(KeyboardInterrupt):
                quantize(classifier, {"x": rows()}, journal=journal)
        assert journal.is_file()

        later: list[str] = []

        def going_on(runner: TrialRunner, plan: Any) -> Any:
            later.append(plan.key)
            return attempt(runner, plan)

        monkeypatch.setattr(TrialRunner, "attempt", going_on)
        steps: list[str] = []
        result = quantize(classifier, {"x": rows()}, journal=journal, progress=steps.append)
        assert "Continuing after 2 candidates of an interrupted search" in steps
        assert result.verdict == "quantized"
        assert later[0] not in tried  # known plans are measured again at the end if they are among the best
        assert len(later) == len(set(later))
        assert {item.name for item in result.report.candidates} >= {"static int8", "static int8, layers alone"}
        assert journal.exists()  # until the result is saved
        assert result.journal is not None
        result.journal.remove()
        assert not journal.exists()

    @pytest.mark.matrix
    def test_a_journal_of_other_data_is_of_no_use(
        self, classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_faster(monkeypatch)
        journal = tmp_path / "journal"

        def stop(search: Search, finalists: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Search, "_time_again", stop)
            with pytest.raises(KeyboardInterrupt):
                quantize(classifier, {"x": rows()}, journal=journal)
        assert len(journal.read_text().splitlines()) > 2
        steps: list[str] = []
        quantize(classifier, {"x": rows(seed=1)}, journal=journal, progress=steps.append)
        assert not any("Continuing" in step for step in steps)

    @pytest.mark.matrix
    def test_a_search_that_is_done_leaves_none(
        self, classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_faster(monkeypatch)
        journal = tmp_path / "journal"
        ingot.quantize(classifier, {"x": rows()}, journal=journal)
        assert not journal.exists()

    @pytest.mark.matrix
    def test_an_edited_metric_starts_over(
        self, classifier: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_faster(monkeypatch)

        def steps(body: str) -> str:
            space: dict[str, Any] = {}
            exec(f"def metric(outputs, data):\n    return {body}", space)
            told: list[str] = []
            config = QuantConfig(metric=space["metric"])
            quantize(classifier, {"x": rows()}, config=config, journal=tmp_path / "journal", progress=told.append)
            return " ".join(told)

        steps("outputs['logits'].mean()")
        assert "Continuing" in steps("outputs['logits'].mean()")
        assert "Continuing" not in steps("outputs['logits'].std()")

    def test_a_place_where_none_can_be(self, classifier: Archive, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="journal cannot be written: there is no folder"):
            quantize(classifier, {"x": rows()}, journal=tmp_path / "nowhere" / "journal")
        with pytest.raises(InvalidArgument, match="the journal is of type int; it must be the path of a file"):
            quantize(classifier, {"x": rows()}, journal=7)  # type: ignore[arg-type]


class TestRefusedData:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({}, "lacks the input 'x'; it contains: nothing"),
            ([], "the (calibration|validation) data"),
            ({"z": np.ones(3)}, "lacks the input 'x'; it contains: z"),
            ({"x": np.ones((0, 8), np.float32)}, r"is empty: 'x' has shape \[0, 8\]"),
            ({"x": np.full((5, 8), np.nan, np.float32)}, "contains NaN or infinity in 'x'"),
            ({"x": np.full((5, 8), np.inf, np.float32)}, "contains NaN or infinity in 'x'"),
            ({"x": np.ones((5, 8))}, "input 'x' has datatype FP64, the model takes FP32"),
            ({"x": np.ones((5, 8), np.int64)}, "input 'x' has datatype INT64, the model takes FP32"),
            ({"x": np.ones((5, 7), np.float32)}, "dimension 1 of input 'x' is 7, the model takes 8"),
            ({"x": np.ones(8, np.float32)}, "input 'x' has 1 dimensions"),
            ({"x": rows(5), "y": np.arange(4)}, "'y'"),
            (7, "of type int"),
        ],
    )
    @pytest.mark.parametrize("place", ["data", "validate"])
    def test_mismatched_arguments(self, classifier: Archive, data: Any, message: str, place: str) -> None:
        given = {"data": data} if place == "data" else {"data": {"x": rows()}, "validate": data}
        with pytest.raises(InvalidArgument, match=message):
            quantize(classifier, **given)

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ({"y": np.zeros(64, np.int64)}, "class"),
            ({"y": np.arange(64) % 5}, "4"),
            ({"y": np.arange(64) % 4 + 0.5}, "labels"),
            ({"z": np.arange(64) % 4}, "has no array 'y'; it contains: z"),
            ({}, "has no array 'y'; it contains: only the inputs"),
        ],
    )
    def test_labels_that_do_not_fit(self, classifier: Archive, labels: dict[str, Array], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            quantize(classifier, {"x": rows(), **labels}, config=QuantConfig(metric="accuracy:labels=y"))

    def test_labels_without_data(self, classifier: Archive) -> None:
        with pytest.raises(InvalidArgument, match="the metric 'accuracy:labels=y' needs labels, and no data was given"):
            quantize(classifier, config=QuantConfig(metric="accuracy:labels=y"))

    def test_files(self, classifier: Archive, tmp_path: Path) -> None:
        np.savez(tmp_path / "data.npz", y=np.ones(3))
        with pytest.raises(
            InvalidArgument, match=r"calibration data in \S*data\.npz lacks the input 'x'; it contains: y"
        ):
            quantize(classifier, tmp_path / "data.npz")
        with pytest.raises(NotFound, match=r"nope\.npz"):
            quantize(classifier, tmp_path / "nope.npz")
        with pytest.raises(NotFound, match=r"nope\.ingot"):
            quantize(tmp_path / "nope.ingot", {"x": rows()})


class TestRefusedModels:
    @pytest.mark.parametrize("config", [None, StaticInt8(), DynamicInt8(), WeightInt8()], ids=repr)
    def test_an_archive_with_a_quantized_variant(self, quantized: Archive, config: Any) -> None:
        """Reported before the work, not after."""
        steps: list[str] = []
        message = "'classifier' has a variant 'int8' already; quantize the archive from which it was made"
        with pytest.raises(InvalidArgument, match=message):
            quantize(quantized, {"x": rows()}, config=config, progress=steps.append)
        assert steps == []

    @pytest.mark.matrix
    def test_other_precisions_may_be_added_to_it(self, quantized: Archive) -> None:
        archive = quantize(quantized, {"x": rows()}, config=BFloat16()).archive
        names = [variant.name for variant in archive.variants]
        assert sorted(names) == ["bf16", "fp32", "int8"]
        archive = quantize(archive, {"x": rows()}, config=Float16()).archive
        assert sorted(variant.name for variant in archive.variants) == ["bf16", "fp16", "fp32", "int8"]
        assert archive.variant("int8").descriptor == quantized.variant("int8").descriptor

    def test_a_source_that_is_quantized_already(self, quantized: Archive) -> None:
        local = quantized.unpacked()
        graph = local.variant("int8").path()
        path = graph.with_name("model.onnx")
        path.write_bytes(graph.read_bytes())
        again = export_model(path)
        with pytest.raises(InvalidArgument, match="is quantized already; quantize the floating-point variant"):
            quantize(again, {"x": rows()})

    def test_an_archive_that_is_already_in_half_precision(self) -> None:
        half = small_models.classifier(np.float16)
        with pytest.raises(InvalidArgument, match="'classifier' is in fp16 already"):
            quantize(half, config=Float16())


class TestRefusedConfigurations:
    @pytest.mark.parametrize("kind", [DynamicInt8, WeightInt8, WeightInt4, Float16])
    def test_an_engine_without_kernels_for_a_recipe(self, classifier: Archive, kind: type[Any]) -> None:
        """Reported before the work, whether the engine is installed or not."""
        steps: list[str] = []
        with pytest.raises(InvalidArgument, match=f"OpenVINO has no kernels for the result of '{kind.name}'"):
            quantize(classifier, config=QuantConfig(kind(), engines=("openvino",)), progress=steps.append)
        assert steps == []

    @pytest.mark.parametrize(("engine", "title"), [("onnxruntime", "ONNX Runtime"), ("openvino", "OpenVINO")])
    def test_an_engine_that_computes_nothing_in_integers(
        self, classifier: Archive, engine: EngineName, title: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TrialRunner, "attempt", lambda runner, plan, *timing: Trial(plan))
        with pytest.raises(
            QuantizationError, match=f"{title} computes nothing of the result of 'static-int8' in integ"
        ):
            quantize(classifier, {"x": rows()}, config=QuantConfig(StaticInt8(), engines=(engine,)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_drop": -1}, "the largest drop is -1; it must be 0 or more"),
            ({"max_drop": float("nan")}, "the largest drop is nan"),
            ({"batches": ()}, r"the batch sizes are \[\]; pass at least one, each 1 or more"),
            ({"batches": (8, 0)}, r"the batch sizes are \[8, 0\]"),
            ({"budget": 0}, "the time budget is 0 s; it must be more than 0"),
            ({"budget": float("nan")}, "the time budget is nan s"),
            ({"threads": 0}, "0 threads cannot run a model"),
            ({"threads": 100_000}, r"100000 threads cannot run a model; give at most \d+, 16 per core"),
            ({"max_drop": float("inf")}, "the largest drop is inf; give the accepted loss of the metric, such as 0.01"),
            ({"max_drop": 1e200}, r"the largest drop is 1e\+200; give"),
            ({"max_drop": "0.01"}, "max_drop is '0.01'; it must be a number"),
            ({"budget": "5m"}, "budget is '5m'; it must be a number or None"),
            ({"batches": ("8",)}, r"batches is \('8',\); it must be a tuple, each a whole number"),
            ({"batches": 8}, "batches is 8; it must be a tuple, each a whole number"),
            ({"threads": 1.5}, "threads is 1.5; it must be a whole number or None"),
            ({"threads": True}, "threads is True; it must be a whole number or None"),
            ({"seed": None}, "seed is None; it must be a whole number"),
            ({"keep": "layers.3"}, "keep is 'layers.3'; it must be a tuple, each text"),
            ({"engines": "openvino"}, "engines is 'openvino'; it must be a tuple, each text or None"),
            ({"engines": ("tensorrt",)}, "unknown engine 'tensorrt'"),
            ({"force": "no"}, "force is 'no'; it must be True or False"),
            ({"seed": -1}, "the seed is -1; it must be 0 or more"),
            ({"recipe": "static-int8"}, r"'static-int8' is not a recipe; pass one such as StaticInt8\(\)"),
        ],
    )
    def test_of_the_run(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            QuantConfig(**options)

    def test_numbers_and_lists_of_any_kind(self) -> None:
        config = QuantConfig(max_drop=np.float32(0.5), batches=[np.int64(8)], seed=np.uint8(3), threads=1, budget=5)  # type: ignore[arg-type]
        assert (config.max_drop, config.batches, config.seed) == (0.5, (8,), 3)

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            (StaticInt8, {"calibration": "median"}, "calibration of static-int8 is 'median'; it must be one of minmax"),
            (StaticInt8, {"activations": "u7"}, "activations of static-int8 is 'u7'; it must be one of u8, s8, u16"),
            (StaticInt8, {"migrate": "0.5"}, "migrate is '0.5'; it must be a number"),
            (StaticInt8, {"per_channel": "no"}, "per_channel is 'no'; it must be True or False"),
            (StaticInt8, {"calibration": ["minmax"]}, r"calibration is \('minmax',\); it must be text"),
            (DynamicInt8, {"keep": "layers.3"}, "keep is 'layers.3'; it must be a tuple, each text"),
            (StaticInt8, {"migrate": 2}, "migrate is 2; it must be from 0 to 1"),
            (WeightInt8, {"block": 7}, "the block is 7; it must be 16, 32"),
            (BFloat16, {"device": "tpu"}, "device of bf16 is 'tpu'; it must be one of cuda, any"),
        ],
    )
    def test_of_a_recipe(self, kind: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            kind(**options)

    @pytest.mark.parametrize(
        ("metric", "message"),
        [
            ("acuracy", "there is no metric 'acuracy'; did you mean accuracy"),
            ("accuracy:lables=y", "'lables=y' of the metric"),
            ("cosine:output=nope", "the model has no output 'nope'"),
            ("nowhere:score", "nowhere"),
            (7, "metric is 7; it must be text or a function or None"),
        ],
    )
    def test_of_the_metric(self, classifier: Archive, metric: Any, message: str) -> None:
        steps: list[str] = []
        with pytest.raises(InvalidArgument, match=message):
            quantize(classifier, {"x": rows()}, config=QuantConfig(metric=metric), progress=steps.append)
        assert steps == []

    def test_a_recipe_that_needs_data(self, classifier: Archive) -> None:
        message = "'static-int8' needs calibration data; pass some .--calibrate., or use dynamic-int8"
        with pytest.raises(InvalidArgument, match=message):
            quantize(classifier, config=StaticInt8())
