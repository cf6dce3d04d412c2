from __future__ import annotations

import numpy as np
import pytest

from ingot.quant.agreement import agreement
from ingot.tensors import DType


def test_the_same_answers_agree() -> None:
    batch = {"y": np.random.default_rng(0).standard_normal((5, 3))}
    assert agreement([batch, batch], [batch, batch]) == {"cosine": pytest.approx(1), "top1": 1}


def test_each_row_counts_once_whatever_its_batch() -> None:
    expected = [{"y": np.array([[1.0, 0], [1, 0], [1, 0]])}, {"y": np.array([[1.0, 0]])}]
    actual = [{"y": np.array([[1.0, 0], [2, 0], [0, 1]])}, {"y": np.array([[1.0, 0]])}]
    assert agreement(expected, actual) == {"cosine": pytest.approx(3 / 4), "top1": 3 / 4}


def test_scale_does_not_count_but_direction_does() -> None:
    expected = [{"y": np.array([[1.0, 2.0]])}]
    assert agreement(expected, [{"y": np.array([[10.0, 20.0]])}])["cosine"] == pytest.approx(1)
    assert agreement(expected, [{"y": np.array([[-1.0, -2.0]])}])["cosine"] == pytest.approx(-1)
    assert agreement(expected, [{"y": np.array([[0.0, 0.0]])}])["cosine"] == 0


def test_the_first_floating_point_output_is_compared() -> None:
    label, logits = np.array([1, 2]), np.array([[0.0, 1], [1, 0]], np.float32)
    other = {"label": label + 5, "logits": logits}
    assert agreement([{"label": label, "logits": logits}], [other])["cosine"] == pytest.approx(1)


def test_without_one_there_is_nothing_to_say() -> None:
    assert agreement([{"label": np.array([1])}], [{"label": np.array([2])}]) == {}


def test_one_value_a_row_has_no_class() -> None:
    assert agreement([{"y": np.array([1.0, -2])}], [{"y": np.array([3.0, -4])}]) == {"cosine": pytest.approx(1)}
    assert agreement([{"y": np.array(2.0)}], [{"y": np.array(-2.0)}]) == {"cosine": pytest.approx(-1)}


def test_half_types_are_compared_in_full() -> None:
    large = np.full((1, 64), 300, DType.FP16.numpy)  # whose squares and sums FP16 cannot hold
    assert agreement([{"y": large}], [{"y": large}])["cosine"] == pytest.approx(1)
    bf16 = large.astype(DType.BF16.numpy)
    assert agreement([{"y": bf16}], [{"y": bf16}])["cosine"] == pytest.approx(1)
