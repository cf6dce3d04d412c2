from __future__ import annotations

import numpy as np
import pytest

from ingot.model_store import Agreement
from ingot.quant.data.samples import Samples
from ingot.quant.metric.agreement import agreement, by_output
from ingot.tensors import Array, DType, Signature, parse_spec


def one(expected: Array, actual: Array) -> Agreement:
    (item,) = agreement([{"y": expected}], [{"y": actual}])
    return item


def test_the_same_answers_agree() -> None:
    batch = np.random.default_rng(0).standard_normal((5, 3))
    assert one(batch, batch) == Agreement(tensor="y", cosine=1, error=0, top1=1, sqnr=200)


def test_each_row_counts_once_in_any_batch() -> None:
    expected = [{"y": np.array([[1.0, 0], [1, 0], [1, 0]])}, {"y": np.array([[1.0, 0]])}]
    actual = [{"y": np.array([[1.0, 0], [2, 0], [0, 1]])}, {"y": np.array([[1.0, 0]])}]
    (item,) = agreement(expected, actual)
    assert item.cosine == pytest.approx(3 / 4)
    assert item.top1 == 3 / 4


def test_cosine_sees_direction_and_error_sees_scale() -> None:
    expected = np.array([[1.0, 2.0]])
    assert one(expected, expected * 10).cosine == pytest.approx(1)
    assert one(expected, expected * 10).error == pytest.approx(9)
    assert one(expected, -expected).cosine == pytest.approx(-1)
    assert one(expected, expected * 0).cosine == 0
    assert one(expected * 0, expected * 0).cosine == 1


def test_sqnr_is_in_decibels_over_all_values() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert one(expected, expected + np.array([[0.3, 0.4], [0, 0]])).sqnr == pytest.approx(20)
    assert one(expected, -9 * expected).sqnr == pytest.approx(-20)
    assert one(expected * 0, expected).sqnr is None  # no signal
    assert one(expected, expected * np.nan).sqnr is None
    assert one(expected, expected * (1 + 1e-15)).sqnr == 200


def test_every_floating_point_output_is_compared_and_no_other() -> None:
    expected = {"label": np.array([1, 2]), "logits": np.array([[0.0, 1], [1, 0]]), "score": np.array([[0.5], [1]])}
    actual = {**expected, "label": np.array([6, 7]), "score": np.array([[0.5], [-1]])}
    items = {item.tensor: item for item in agreement([expected], [actual])}
    assert set(items) == {"logits", "score"}
    assert items["logits"].cosine == pytest.approx(1)
    assert items["score"].cosine < 0


def test_one_value_per_row_is_compared_over_all_rows_from_their_mean() -> None:
    item = one(np.array([1.0, -2, 4]), np.array([3.0, -4, 5]))
    assert item.cosine == pytest.approx(27 / (18 * 45) ** 0.5)
    assert item.top1 is None
    assert one(np.array(2.0), np.array(-2.0)).cosine == pytest.approx(-1)


def test_a_constant_answer_does_not_agree() -> None:
    for shape in ((50,), (50, 4)):
        answers = 200000 + 3000 * np.random.default_rng(0).standard_normal(shape)
        assert one(answers, np.full(shape, 200000.0)).cosine < 0.2
        assert one(answers, answers + 1).cosine == pytest.approx(1)


@pytest.mark.parametrize("said", [np.full((4, 2), np.nan), np.full(4, np.inf), np.ones((4, 0))])
def test_an_output_without_a_finite_value_has_no_agreement(said: Array) -> None:
    assert agreement([{"y": said}], [{"y": said}]) == ()
    width = "" if said.ndim == 1 else f",{said.shape[1]}"
    specs = [parse_spec(text)[0] for text in ("x:float32[batch]", f"y:float64[batch{width}]")]
    takes = Signature((specs[0],), (specs[1],), "batch")
    samples = Samples.read(takes, {"x": np.ones(4, np.float32)})
    found, notes = by_output(takes, [{"y": said}], [{"y": said}], samples)
    assert (found, notes) == ((), ["the first has no finite value in 'y', so it cannot be compared"])


def test_half_types_are_compared_in_full() -> None:
    large = np.full((1, 64), 300, DType.FP16.numpy)  # whose squares and sums FP16 cannot hold
    assert one(large, large).cosine == pytest.approx(1)
    bf16 = large.astype(DType.BF16.numpy)
    assert one(bf16, bf16).cosine == pytest.approx(1)
