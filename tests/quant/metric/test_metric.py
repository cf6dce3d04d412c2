from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import InvalidArgument, QuantizationError
from ingot.quant.data.samples import Samples
from ingot.quant.metric import Comparison, parse_metric
from ingot.tensors import Array, Signature, parse_spec

RNG = np.random.default_rng(0)
ROWS = 200


def signature(*outputs: str, batch: str | None = "batch") -> Signature:
    takes = "x:float32[batch,2]" if batch else "x:float32[2]"
    return Signature((parse_spec(takes)[0],), tuple(parse_spec(text)[0] for text in outputs), batch)


CLASSES = signature("y:float32[batch,10]")
VALUE = signature("y:float32[batch]")


def samples(takes: Signature, rows: int = ROWS, **extras: Any) -> Samples:
    return Samples.read(takes, {"x": np.ones((rows, 2), np.float32), **extras}, purpose="evaluation data")


def batches(**outputs: Array) -> list[dict[str, Array]]:
    """Cut outputs as batches() cuts samples."""
    rows = len(next(iter(outputs.values())))
    return [{name: array[start : start + 32] for name, array in outputs.items()} for start in range(0, rows, 32)]


def compare(
    spec: Any, takes: Signature, before: Mapping[str, Array], after: Mapping[str, Array], **extras: Any
) -> Comparison:
    rows = samples(takes, len(next(iter(before.values()))), **extras)
    metric = parse_metric(spec, takes)
    metric.check(rows)
    return metric.compare(batches(**before), batches(**after), rows)


def answers(rows: int = ROWS, classes: int = 10) -> tuple[Array, Array]:
    """Return labels, and logits that are mostly right."""
    labels = RNG.integers(0, classes, rows)
    logits = RNG.standard_normal((rows, classes)).astype(np.float32)
    logits[np.arange(rows), labels] += 2
    return labels, logits


def rank(values: Array) -> Array:
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


class TestAgreement:
    @pytest.mark.parametrize("spec", [None, "cosine", "top1", "similarity", "sqnr"])
    def test_the_same_answers_drop_nothing(self, spec: str | None) -> None:
        _, logits = answers()
        found = compare(spec, CLASSES, {"y": logits}, {"y": logits})
        assert found.drop.value == pytest.approx(0, abs=1e-9)
        assert found.before.value == pytest.approx(found.after.value)
        assert found.after.value == pytest.approx(100 if spec == "sqnr" else 1)

    def test_cosine_is_the_mean_of_the_rows(self) -> None:
        _, logits = answers()
        other = logits + RNG.standard_normal(logits.shape).astype(np.float32) / 4
        expected = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(logits, other, strict=True)]
        found = compare(None, CLASSES, {"y": logits}, {"y": other})
        assert found.after.value == pytest.approx(np.mean(expected))
        assert found.drop.value == pytest.approx(1 - np.mean(expected))
        error = 1.96 * np.std(expected) / np.sqrt(ROWS)
        assert found.after.high - found.after.value == pytest.approx(error, rel=0.2)
        assert found.after.value - found.after.low == pytest.approx(error, rel=0.2)

    def test_of_one_value_a_row_all_rows_are_one_vector_from_their_mean(self) -> None:
        before, after = np.array([1.0, -2, 4], np.float32), np.array([3.0, -4, 5], np.float32)
        found = compare("cosine", VALUE, {"y": before}, {"y": after})
        assert found.after.value == pytest.approx(27 / (18 * 45) ** 0.5)  # of [0, -3, 3] and [2, -5, 4]
        for same in (before * 0, before * 0 + 7):  # a constant has only its direction from 0
            assert compare("cosine", VALUE, {"y": same}, {"y": same}).after.value == 1
            assert compare("cosine", VALUE, {"y": same}, {"y": same - 3}).after.value < 0.1 + (same[0] > 0)

    @pytest.mark.parametrize("takes", [VALUE, CLASSES])
    def test_answers_that_hardly_vary_are_seen_from_their_mean(self, takes: Signature) -> None:
        shape = (ROWS,) if takes is VALUE else (ROWS, 10)
        before = (200000 + 3000 * RNG.standard_normal(shape)).astype(np.float32)
        close = (before + 100 * RNG.standard_normal(shape)).astype(np.float32)
        before[3] = np.nan  # counts for neither
        assert compare(None, takes, {"y": before}, {"y": before}).after.value == pytest.approx(1)
        assert 0.99 < compare(None, takes, {"y": before}, {"y": close}).after.value < 0.9999
        for useless in (np.full_like(before, 200000), np.full_like(before, 7), before - 200000, before * 2):
            assert compare(None, takes, {"y": before}, {"y": np.nan_to_num(useless)}).drop.value > 0.5

    def test_rounding_noise_is_not_an_answer(self) -> None:
        before = (1000 + RNG.standard_normal(ROWS) / 10000).astype(np.float32)
        assert compare(None, VALUE, {"y": before}, {"y": before[::-1]}).after.value == pytest.approx(1)

    def test_the_worst_output_counts(self) -> None:
        takes = signature("y:float32[batch,10]", "z:float32[batch,10]", "n:int64[batch]")
        _, logits = answers()
        before = {"y": logits, "z": logits, "n": np.arange(ROWS)}
        for spec in ("cosine", "top1"):
            assert compare(spec, takes, before, {**before, "z": -logits}).drop.value > 0.9
        assert compare("cosine:output=y", takes, before, {**before, "z": -logits}).drop.value == pytest.approx(0)
        assert compare("cosine", takes, before, {**before, "n": np.zeros(ROWS, np.int64)}).drop.value == pytest.approx(
            0
        )
        assert compare("top1", takes, before, {**before, "n": np.arange(ROWS) + 1}).after.value == 0

    def test_top1(self) -> None:
        _, logits = answers()
        other = logits.copy()
        other[:50] = np.roll(other[:50], 1, axis=1)
        assert compare("top1", CLASSES, {"y": logits}, {"y": other}).after.value == pytest.approx(0.75)
        pixels = signature("y:float32[batch,n,2]")
        before = np.tile(np.array([[0.0, 1], [1, 0]], np.float32), (4, 1, 1))
        after = before.copy()
        after[0, 0] = [1, 0]
        assert compare("top1", pixels, {"y": before}, {"y": after}).after.value == pytest.approx(7 / 8)

    def test_top1_of_one_value_is_its_side(self) -> None:
        before, after = np.array([0.9, 0.2, 0.6, 0.4], np.float32), np.array([0.8, 0.3, 0.1, 0.45], np.float32)
        assert compare("top1", VALUE, {"y": before}, {"y": after}).after.value == 0.75
        assert compare("top1", VALUE, {"y": before - 1}, {"y": after}).after.value == 0  # logits: below and above 0

    def test_a_model_of_integers_is_compared_for_equality(self) -> None:
        takes = signature("y:int64[batch]")
        assert compare(None, takes, {"y": np.arange(4)}, {"y": np.array([0, 1, 2, 9])}).after.value == 0.75

    def test_sqnr(self) -> None:
        _, logits = answers()
        found = compare("sqnr", CLASSES, {"y": logits}, {"y": logits * np.float32(1.1)})
        assert found.after.value == pytest.approx(20, abs=1e-3)
        assert found.drop.value == pytest.approx(80, abs=1e-3)

    def test_similarity_is_the_rank_correlation_of_all_pairs(self) -> None:
        takes = signature("y:float32[batch,6]")
        before = RNG.standard_normal((30, 6)).astype(np.float32)
        after = before + RNG.standard_normal((30, 6)).astype(np.float32) / 2
        pairs = []
        for part in (before, after):
            units = part.astype(np.float64) / np.linalg.norm(part.astype(np.float64), axis=1, keepdims=True)
            pairs.append((units @ units.T)[np.triu_indices(30, 1)])
        expected = np.corrcoef(rank(pairs[0]), rank(pairs[1]))[0, 1]
        found = compare("similarity", takes, {"y": before}, {"y": after})
        assert found.after.value == pytest.approx(expected)
        assert found.after.low < expected < found.after.high
        assert found.after.high - found.after.low > 0.01

    @pytest.mark.matrix
    def test_similarity_of_many_rows(self) -> None:
        takes = signature("y:float32[batch,6]")
        rows = RNG.standard_normal((2000, 6)).astype(np.float32)
        assert compare("similarity", takes, {"y": rows}, {"y": rows * 3}).after.value == pytest.approx(1)
        same = np.ones((10, 6), np.float32)  # constant, like the other one
        assert compare("similarity", takes, {"y": same}, {"y": same}).after.value == 1
        assert compare("similarity", takes, {"y": same}, {"y": rows[:10]}).after.value == 0

    def test_similarity_needs_some_rows_of_one_size(self) -> None:
        metric = parse_metric("similarity", CLASSES)
        with pytest.raises(InvalidArgument, match="needs at least 4; the evaluation data has 3"):
            metric.check(samples(CLASSES, 3))
        parts: list[dict[str, Array]] = [{"y": np.ones((32, 3))}, {"y": np.ones((8, 4))}]
        with pytest.raises(InvalidArgument, match="'y' has rows of several sizes"):
            metric.compare(parts, parts, samples(CLASSES, 40))

    def test_a_batch_that_is_not_the_first_axis_of_the_output(self) -> None:
        takes = signature("y:float32[3,batch]")
        before = RNG.standard_normal((3, 20)).astype(np.float32)
        after = before.copy()
        after[:, 0] *= -1
        found = parse_metric(None, takes).compare([{"y": before}], [{"y": after}], samples(takes, 20))
        assert found.after.value == pytest.approx(0.9)

    def test_a_model_without_a_batch(self) -> None:
        takes = signature("y:float32[n]", batch=None)
        rows = Samples.read(takes, [np.ones(2, np.float32)] * 3)
        parts: list[dict[str, Array]] = [{"y": np.arange(1, n, dtype=np.float32)} for n in (3, 5, 3)]
        other = [parts[0], parts[1], {"y": -parts[2]["y"]}]
        assert parse_metric(None, takes).compare(parts, other, rows).after.value == pytest.approx(1 / 3)


class TestLabels:
    def test_accuracy(self) -> None:
        labels, logits = answers()
        other = logits.copy()
        wrong = np.flatnonzero(logits.argmax(1) == labels)[:20]
        other[wrong, labels[wrong]] = -9
        found = compare("accuracy:labels=digit", CLASSES, {"y": logits}, {"y": other}, digit=labels)
        assert found.before.value == pytest.approx((logits.argmax(1) == labels).mean())
        assert found.drop.value == pytest.approx(0.1)
        assert 0.05 < found.drop.low < 0.1 < found.drop.high < 0.15
        # Resampled in pairs: the interval of the drop is that of 20 rows, not of two independent accuracies.
        assert found.drop.high - found.drop.low < found.before.high - found.before.low

    def test_an_improvement_is_a_negative_drop(self) -> None:
        labels, logits = answers()
        assert compare("accuracy", CLASSES, {"y": -logits}, {"y": logits}, labels=labels).drop.value < -0.5

    def test_intervals_are_deterministic(self) -> None:
        labels, logits = answers()
        first, second = (compare("f1", CLASSES, {"y": logits}, {"y": logits / 2}, labels=labels) for _ in range(2))
        assert first == second

    def test_nan_is_wrong(self) -> None:
        labels, logits = answers()
        logits[np.arange(ROWS), labels] = 9
        other = logits.copy()
        other[:20] = np.nan
        for metric in ("accuracy", "top5", "f1"):
            found = compare(metric, CLASSES, {"y": logits}, {"y": other}, labels=labels)
            assert found.before.value == 1
            assert found.after.value == pytest.approx(0.9, abs=0.06 if metric == "f1" else 1e-9)

    def test_top5(self) -> None:
        scores = np.tile(np.arange(10, dtype=np.float32), (4, 1))
        found = compare("top5", CLASSES, {"y": scores}, {"y": -scores}, labels=np.array([5, 9, 4, 8]))
        assert (found.before.value, found.after.value) == (0.75, 0.25)

    @pytest.mark.parametrize(("metric", "right"), [("accuracy", 40), ("top5", 80)])
    def test_an_original_at_chance_is_reported(self, metric: str, right: int) -> None:
        labels = np.repeat(np.arange(10), [40, 10, 10, 10, 10, 4, 4, 4, 4, 4])
        rows = samples(CLASSES, 100, labels=labels)
        chosen = parse_metric(metric, CLASSES)

        def told(scores: Array) -> tuple[str, ...]:
            parts = batches(y=scores)
            return chosen.notes(parts, chosen.compare(parts, parts, rows).before, rows)

        useless = np.tile(-np.arange(10, dtype=np.float32), (100, 1))
        (note,) = told(useless)
        assert note.startswith(f"the original is right in {right} % of the rows, no better than always choosing the ")
        assert len(told(-useless)) == 1
        assert told(np.eye(10, dtype=np.float32)[labels]) == ()

    def test_f1_is_the_mean_of_the_classes(self) -> None:
        takes = signature("y:float32[batch,3]")
        labels = np.array([0, 0, 0, 1, 1, 0])
        said = np.eye(3, dtype=np.float32)[[0, 0, 1, 1, 2, 0]]
        found = compare("f1", takes, {"y": said}, {"y": said}, labels=labels)
        assert found.after.value == pytest.approx((6 / 7 + 1 / 2 + 0) / 3)

    def test_one_value_per_row(self) -> None:
        labels = np.array([1, 0, 1, 0])
        chance = np.array([0.9, 0.2, 0.4, 0.4], np.float32)
        assert compare("accuracy", VALUE, {"y": chance}, {"y": chance}, labels=labels).after.value == 0.75
        logits = chance * 4 - 2
        assert compare("accuracy", VALUE, {"y": logits}, {"y": logits}, labels=labels[:, None]).after.value == 0.75

    def test_an_output_that_is_the_class(self) -> None:
        takes = signature("y:int64[batch]", "score:float32[batch]")
        labels = np.array([-1, 1, 1, -1])
        outputs = {"y": np.array([-1, 1, -1, -1]), "score": np.ones(4, np.float32)}
        for metric, value in (("accuracy", 0.75), ("f1", (0.8 + 2 / 3) / 2)):
            spec = f"{metric}:output=y,labels=y"
            assert compare(spec, takes, outputs, outputs, y=labels).after.value == pytest.approx(value)

    @pytest.mark.parametrize(("metric", "value"), [("mae", 0.5), ("mse", 0.25), ("rmse", 0.5)])
    def test_errors_are_better_when_lower(self, metric: str, value: float) -> None:
        labels = RNG.standard_normal(ROWS)
        before = labels.astype(np.float32)
        found = compare(metric, VALUE, {"y": before}, {"y": before + np.float32(0.5)}, labels=labels)
        assert found.before.value == pytest.approx(0, abs=1e-6)
        assert found.after.value == pytest.approx(value, abs=1e-5)
        assert found.drop.value == pytest.approx(value, abs=1e-5)

    def test_spearman(self) -> None:
        labels = RNG.integers(0, 5, ROWS)
        before = (labels + RNG.standard_normal(ROWS)).astype(np.float32)
        found = compare("spearman", VALUE, {"y": before}, {"y": np.zeros(ROWS, np.float32)}, labels=labels)
        assert found.before.value == pytest.approx(np.corrcoef(rank(labels), rank(before))[0, 1])
        assert found.before.low < found.before.value < found.before.high
        assert found.after.value == 0

    @pytest.mark.parametrize(
        ("spec", "labels", "message"),
        [
            ("accuracy", np.full(8, 3), r"contain only one class \(3\), so they cannot measure accuracy"),
            ("f1", np.full(8, 3), "contain only one class"),
            (
                "accuracy",
                np.arange(8) / 2,
                "are of type float64; they must be the number of each row's class, as int64",
            ),
            ("accuracy", np.array(list("abcdefgh")), "are of type string"),
            ("accuracy", np.arange(8) + 3, r"contain the class 10; the output 'y' has 10, from 0 to 9"),
            ("accuracy", np.arange(8) - 1, "contain the class -1"),
            ("accuracy", np.arange(8, dtype=np.uint64) + 2**63, "contain the class 9223372036854775815, which exceeds"),
            ("accuracy", np.ones((8, 2), np.int64), r"have the shape \[8, 2\]; there must be one class per row"),
            (
                "accuracy:labels=z",
                np.arange(8),
                "the evaluation data has no array 'z'; it contains: labels; name the labels",
            ),
            ("spearman", np.ones(8), "are all 1, so they cannot measure accuracy"),
            ("spearman", np.ones((8, 2)), "have 2 values per row; there must be one"),
            ("mae", np.array([np.nan] * 8), "contain NaN or infinity"),
            ("mae", np.array(list("abcdefgh")), "are text; they must be numbers"),
        ],
    )
    def test_bad_labels(self, spec: str, labels: Array, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            parse_metric(spec, CLASSES).check(samples(CLASSES, 8, labels=labels))

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("mae", "the labels 'labels' have 1 values per row, the output 'y' has 10"),
            ("spearman", "spearman needs one value per row; the output 'y' has 10"),
        ],
    )
    def test_outputs_that_the_labels_do_not_fit(self, spec: str, message: str) -> None:
        labels, logits = answers(8)
        with pytest.raises(InvalidArgument, match=message):
            compare(spec, CLASSES, {"y": logits}, {"y": logits}, labels=labels)


class TestBroken:
    @pytest.mark.parametrize("spec", [None, "cosine", "sqnr", "similarity", "top1", "accuracy", "top5", "f1", "mae"])
    @pytest.mark.parametrize("value", [np.nan, -np.inf, None])
    def test_an_uninformative_original_is_refused(self, spec: str | None, value: float | None) -> None:
        takes = CLASSES if value is not None else signature("y:float32[batch,n]")
        said = np.full((8, 10), value, np.float32) if value is not None else np.ones((8, 0), np.float32)
        with pytest.raises(
            InvalidArgument, match="the original has no finite value in 'y' for this data, so it cannot be"
        ):
            compare(spec, takes, {"y": said}, {"y": said}, labels=np.arange(8))

    def test_rows_without_a_value_are_reported(self) -> None:
        _, logits = answers()
        logits[3:5] = np.nan
        logits[7, 2] = -np.inf
        parts = batches(y=logits)
        for spec in ("cosine", "top1"):
            metric, rows = parse_metric(spec, CLASSES), samples(CLASSES)
            before = metric.compare(parts, parts, rows).before
            assert metric.notes(parts, before, rows) == ("the original has no finite value in 'y' for 2 of 200 rows",)
            assert metric.notes(batches(y=answers()[1]), before, rows) == ()

    def test_the_worst_output_must_be_informative(self) -> None:
        takes = signature("y:float32[batch,10]", "n:int64[batch,0]")
        _, logits = answers(8)
        outputs = {"y": logits, "n": np.ones((8, 0), np.int64)}
        assert compare("cosine", takes, outputs, outputs).drop.value == pytest.approx(0)
        with pytest.raises(InvalidArgument, match="the original has no finite value in 'n'"):
            compare("top1", takes, outputs, outputs)
        assert compare("top1:output=y", takes, outputs, outputs).drop.value == 0

    @pytest.mark.parametrize("spec", ["cosine", "sqnr", "similarity", "mae"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_no_score_of_nan(self, spec: str, value: float) -> None:
        _, logits = answers(8)
        other = logits.copy()
        other[3, 3] = value
        with pytest.raises(QuantizationError, match="the quantized model returns NaN or infinity in 'y'"):
            compare(spec, CLASSES, {"y": logits}, {"y": other}, labels=logits)

    def test_nans_of_the_original_are_left_out(self) -> None:
        _, logits = answers()
        logits[:, 0] = -np.inf
        assert compare("cosine", CLASSES, {"y": logits}, {"y": logits}).after.value == pytest.approx(1)

    def test_other_shapes(self) -> None:
        _, logits = answers(8)
        with pytest.raises(QuantizationError, match=r"returns the shape \[8, 9\] in 'y', the original \[8, 10\]"):
            compare("cosine", CLASSES, {"y": logits}, {"y": logits[:, :9]})
        with pytest.raises(QuantizationError, match="returns 8 rows in 'y' for 9 rows of data"):
            parse_metric(None, CLASSES).compare(batches(y=logits), batches(y=logits), samples(CLASSES, 9))


def accuracy(outputs: Mapping[str, Array], data: Mapping[str, Array]) -> float:
    return float((outputs["y"].argmax(1) == data["labels"]).mean())


def _grouped(outputs: Mapping[str, Array], data: Mapping[str, Array]) -> float:
    return accuracy(outputs, data)


_grouped.groups = "group"  # type: ignore[attr-defined]


class TestFunctions:
    def test_a_function(self) -> None:
        labels, logits = answers()
        found = compare(accuracy, CLASSES, {"y": logits}, {"y": -logits}, labels=labels)
        known = compare("accuracy", CLASSES, {"y": logits}, {"y": -logits}, labels=labels)
        assert (found.before.value, found.drop.value) == (known.before.value, known.drop.value)
        assert found.before.low == pytest.approx(known.before.low, abs=0.03)

    def test_rows_of_several_sizes_come_as_lists(self) -> None:
        takes = signature("y:float32[batch,n]")
        seen: list[Any] = []

        def shortest(outputs: Mapping[str, Sequence[Array]], data: object) -> float:
            seen.append(outputs["y"])
            return float(min(len(row) for row in outputs["y"]))

        parts: list[dict[str, Array]] = [{"y": np.ones((32, 3))}, {"y": np.ones((8, 4))}]
        found = parse_metric(shortest, takes).compare(parts, parts, samples(takes, 40))
        assert found.before.value == 3
        assert isinstance(seen[0], list)
        assert len(seen[0]) == 40

    def test_a_function_of_a_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_metric.py").write_text("def best(outputs, data):\n    return outputs['y'].max()\nnumber = 3\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        metric = parse_metric("my_metric:best", CLASSES)
        assert metric.name == "my_metric:best"
        _, logits = answers()
        found = metric.compare(batches(y=logits), batches(y=logits), samples(CLASSES))
        assert found.after.value == logits.max()
        with pytest.raises(InvalidArgument, match="'my_metric:number' is not a function: there is no callable"):
            parse_metric("my_metric:number", CLASSES)
        with pytest.raises(InvalidArgument, match="'no_metric:best' cannot be imported: ModuleNotFoundError"):
            parse_metric("no_metric:best", CLASSES)

    def test_functions_that_fail(self) -> None:
        _, logits = answers()

        def fails(outputs: Any, data: Any) -> float:
            return float(data["labels"][0])

        with pytest.raises(InvalidArgument, match=r"fails failed \(test_metric\.py:\d+\): KeyError: 'labels'"):
            compare(fails, CLASSES, {"y": logits}, {"y": logits})
        with pytest.raises(QuantizationError, match=r"of the original is nan; it must be a finite number"):
            compare(lambda outputs, data: np.nan, CLASSES, {"y": logits}, {"y": logits})

    def test_values_of_units_are_compared_one_by_one(self) -> None:
        labels, logits = answers()
        mean = compare("accuracy", CLASSES, {"y": logits}, {"y": -logits}, labels=labels)
        each = compare(
            lambda outputs, data: outputs["y"].argmax(1) == data["labels"],
            CLASSES,
            {"y": logits},
            {"y": -logits},
            labels=labels,
        )
        assert each == mean
        found = {"y": np.ones((ROWS, 10))}, {"y": np.tile([1.0, 0.0], (ROWS, 5))}
        with pytest.raises(QuantizationError, match="returns 2000 values for the original and 1000 for the quantized"):
            compare(lambda outputs, data: outputs["y"][outputs["y"] > 0], CLASSES, *found)
        with pytest.raises(InvalidArgument, match=r"returns an array of shape \[200, 10\]; return a number"):
            compare(lambda outputs, data: outputs["y"], CLASSES, {"y": logits}, {"y": logits})

    def test_groups_are_drawn_whole(self) -> None:
        labels, logits = answers()
        wide, narrow = (
            compare(function, CLASSES, {"y": logits.repeat(4, 0)}, {"y": logits.repeat(4, 0)}, **extras)
            for function, extras in (
                (_grouped, {"labels": labels.repeat(4), "group": np.arange(ROWS).repeat(4)}),
                (accuracy, {"labels": labels.repeat(4)}),
            )
        )
        assert wide.before.value == narrow.before.value
        width = narrow.before.high - narrow.before.low
        assert wide.before.high - wide.before.low == pytest.approx(2 * width, rel=0.3)

    def test_malformed_groups(self) -> None:
        _, logits = answers()
        with pytest.raises(
            InvalidArgument, match=r"metric _grouped needs its groups: .* has no array 'group'; it contains: only the "
        ):
            compare(_grouped, CLASSES, {"y": logits}, {"y": logits})
        with pytest.raises(InvalidArgument, match="has only one group in 'group'"):
            compare(_grouped, CLASSES, {"y": logits}, {"y": logits}, group=np.ones(ROWS))
        with pytest.raises(InvalidArgument, match="groups need one value per row"):
            compare(_grouped, CLASSES, {"y": logits}, {"y": logits}, group=np.ones((ROWS, 2)))

    @pytest.mark.parametrize("widths", [(3, 3), (3, 4)])
    def test_a_function_cannot_change_what_it_is_given(self, widths: tuple[int, int]) -> None:
        takes = signature("y:float32[batch,n]")
        parts: list[dict[str, Array]] = [
            {"y": np.ones((32, widths[0]), np.float32)},
            {"y": np.ones((8, widths[1]), np.float32)},
        ]

        def writes(outputs: Any, data: Any) -> float:
            outputs["y"][0][...] = 0
            return 1.0

        def writes_labels(outputs: Any, data: Any) -> float:
            data["labels"][...] = 0
            return 1.0

        def empties(outputs: Any, data: Any) -> float:
            rows = outputs.pop("y")
            count = len(rows)
            if isinstance(rows, list):  # of several sizes
                rows.clear()
            return float(count)

        rows = samples(takes, 40, labels=np.arange(40))
        for function in (writes, writes_labels):
            with pytest.raises(
                InvalidArgument,
                match=r"failed \(test_metric\.py:\d+\): ValueError: assignment destination is read-only",
            ):
                parse_metric(function, takes).compare(parts, parts, rows)
        assert parse_metric(empties, takes).compare(parts, parts, rows).after.value == 40
        assert all((part["y"] == 1).all() for part in parts)

    def test_its_identity_changes_with_its_code(self) -> None:
        def made(body: str) -> str:
            space: dict[str, Any] = {}
            exec(f"def metric(outputs, data):\n    return {body}", space)
            identity = parse_metric(space["metric"], CLASSES).identity
            assert identity == parse_metric(partial(space["metric"]), CLASSES).identity.replace("partial", "metric")
            return identity

        bodies = ["outputs.a", "outputs.b", "1", "2", "0 in {1, 2}", "0 in {1, 3}", "max(0 for _ in ())", "lambda: 1"]
        assert len({made(body) for body in bodies}) == len(bodies)
        assert made("lambda: 1 in {'a', 'b'}") == made("lambda: 1 in {'a', 'b'}")
        assert parse_metric(max, CLASSES).identity == "max"

    def test_resamples_without_a_value_are_left_out(self) -> None:
        def picky(outputs: Mapping[str, Array], data: Mapping[str, Array]) -> float:
            if len(np.unique(data["labels"])) < 3:
                raise ValueError("not all classes")
            return 1.0

        _, logits = answers(4)
        found = compare(picky, CLASSES, {"y": logits}, {"y": logits}, labels=np.array([0, 1, 2, 2]))
        assert (found.drop.value, found.drop.low, found.drop.high) == (0, 0, 0)


class TestNames:
    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("acuracy:labels=y", "there is no metric 'acuracy'; did you mean accuracy.; known: cosine, top1"),
            ("", "there is no metric ''; known: "),
            (
                "accuracy:label=y",
                "'label=y' of the metric 'accuracy:label=y' is not a valid option; the options, each",
            ),
            ("accuracy:labels=", "'labels=' of the metric"),
            ("accuracy:labels=a,labels=b", "'labels=b' of the metric"),
            ("cosine:labels=y", "each at most once, are: output=NAME"),
            ("accuracy:output=z", "the model has no output 'z' for the metric accuracy; it has: y"),
            (5, "a metric is a name or a function, not of type int"),
        ],
    )
    def test_unknown_metrics(self, spec: Any, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            parse_metric(spec, CLASSES)

    def test_the_output_must_be_clear(self) -> None:
        takes = signature("y:float32[batch,10]", "z:float32[batch,10]", "n:int64[batch]")
        with pytest.raises(InvalidArgument, match="the model has: y, z, n; choose one with accuracy:output=NAME"):
            parse_metric("accuracy", takes)
        with pytest.raises(InvalidArgument, match="cosine needs a floating-point output"):
            parse_metric("cosine:output=n", takes)
        parse_metric("accuracy", signature("y:float32[batch,10]", "n:int64[batch]"))
        parse_metric("accuracy", signature("y:float32[batch,10,1,1]"))
        with pytest.raises(InvalidArgument, match=r"one class per row; the output y:float32\[batch,n,10\] has more"):
            parse_metric("accuracy", signature("y:float32[batch,n,10]"))

    def test_descriptions_of_metrics(self) -> None:
        assert parse_metric(None, CLASSES).name == "cosine"
        assert parse_metric(None, CLASSES).labels is None
        assert parse_metric("accuracy", CLASSES).labels == "labels"
        assert parse_metric("accuracy:output=y", CLASSES).name == "accuracy:labels=labels,output=y"
        assert parse_metric("similarity:output=y", CLASSES).name == "similarity:output=y"
        assert parse_metric(" accuracy : labels = y ", CLASSES).labels == "y"


def test_one_row() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare(None, CLASSES, {"y": np.ones((1, 10))}, {"y": np.ones((1, 10))})
    assert (found.after.low, found.after.high) == pytest.approx((1, 1))
