"""The judge and the tables of the quantization benchmark; the run itself takes half an hour and is not a test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quant import data, table
from benchmarks.quant.judge import Judgement, judge, rank_correlation, similarities
from benchmarks.quant.runner import Outcome
from benchmarks.quant.ways import Array
from benchmarks.quant.wordpiece import Tokenizer, split_words

RANDOM = np.random.default_rng(0)


def one_hot(labels: Array) -> Array:
    return np.eye(10, dtype=np.float32)[labels]


class TestJudge:
    LABELS = np.arange(1000) % 10

    def worse_by(self, rows: int) -> Judgement:
        wrong = self.LABELS.copy()
        wrong[:rows] = (wrong[:rows] + 1) % 10
        return judge("accuracy", one_hot(self.LABELS), one_hot(wrong), self.LABELS)

    def test_half_a_point_of_accuracy_holds_and_one_row_more_does_not(self) -> None:
        assert self.worse_by(5).drop == pytest.approx(0.005)
        assert self.worse_by(5).holds
        assert not self.worse_by(6).holds

    def test_a_gain_is_a_negative_drop(self) -> None:
        wrong = (self.LABELS + 1) % 10
        found = judge("accuracy", one_hot(wrong), one_hot(self.LABELS), self.LABELS)
        assert found.drop == -1
        assert found.holds

    def test_nan_never_holds(self) -> None:
        broken = one_hot(self.LABELS)
        broken[0, 3] = np.nan
        assert not judge("accuracy", one_hot(self.LABELS), broken, self.LABELS).holds
        assert not judge("cosine", one_hot(self.LABELS), broken).holds

    def test_embeddings_are_judged_by_their_cosine(self) -> None:
        expected = RANDOM.normal(size=(50, 16)).astype(np.float32)
        near = expected + RANDOM.normal(0, 0.05, expected.shape)
        far = expected + RANDOM.normal(0, 0.5, expected.shape)
        assert judge("similarity", expected, near).holds
        assert not judge("similarity", expected, far).holds
        assert judge("similarity", expected, near).drop < judge("similarity", expected, far).drop
        assert judge("similarity", expected, expected).drop == pytest.approx(0)

    def test_other_shapes_and_missing_labels_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"\[2, 3\] instead of \[2, 4\]"):
            judge("cosine", np.ones((2, 4)), np.ones((2, 3)))
        with pytest.raises(ValueError, match="labels"):
            judge("accuracy", np.ones((2, 4)), np.ones((2, 4)))


def test_rank_correlation_sees_order_alone() -> None:
    values = RANDOM.normal(size=100)
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)


def test_similarities_are_those_of_pairs_of_different_rows() -> None:
    assert similarities(np.array([[1, 0], [0, 2], [3, 3]])) == pytest.approx([0, 0.5**0.5, 0.5**0.5])


def test_words_are_lower_case_without_accents_and_apart_from_punctuation() -> None:
    assert list(split_words("Café's $5, bitte!")) == ["cafe", "'", "s", "$", "5", ",", "bitte", "!"]


def test_tokens_are_the_longest_known_pieces(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##want", "##wanted", "dog", "."]))
    ids, mask = Tokenizer(vocabulary).encode(["Unwanted dog.", "cat"], 8)
    assert ids.tolist() == [[2, 4, 6, 7, 8, 3, 0, 0], [2, 1, 3, 0, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [6, 3]
    assert Tokenizer(vocabulary).encode(["dog dog dog dog"], 4)[0].tolist() == [[2, 7, 7, 3]]


def test_sentences_are_many_and_no_group_is_in_two_parts(tmp_path: Path) -> None:
    lines = data.SENTENCES.read_text(encoding="utf-8").split("\n", 1)[1].strip()
    groups = lines.split("\n\n")
    assert all(len(group.split("\n")) == 3 for group in groups)
    sentences = lines.replace("\n\n", "\n").split("\n")
    assert len(set(sentences)) == len(sentences) == 300


@pytest.mark.matrix
def test_the_parts_of_the_digits_share_no_image_and_are_always_the_same() -> None:
    pytest.importorskip("sklearn")
    parts = data.digits("image", (1, 32, 32))
    again = data.digits("image", (1, 32, 32))
    assert np.array_equal(parts.held_out.inputs["image"], again.held_out.inputs["image"])
    assert [len(part.inputs["image"]) for part in (parts.train, parts.calibration, parts.held_out)] == [5400, 800, 1988]


def outcome(way: str, speed: float, holds: bool = True, case: str = "resnet") -> Outcome:
    speedups = dict.fromkeys((1, 8, 32), speed)
    return Outcome(case, way, judgement=Judgement(0.0, 1.0, 1.0, holds), speedups=speedups, milliseconds=speedups)


class TestVerdict:
    def test_the_best_peer_is_the_fastest_that_holds(self) -> None:
        found = table.verdict(
            [outcome("ort", 1), outcome("ingot", 2.9), outcome("nncf", 3), outcome("torchao", 4, holds=False)]
        )
        assert found.best_peer == "nncf"
        assert found.ratio == pytest.approx(2.9 / 3)
        assert found.reached

    def test_a_fast_way_outside_the_budget_misses_the_aim(self) -> None:
        assert table.verdict([outcome("ort", 1), outcome("ingot", 9, holds=False)]).reached is False

    def test_without_ingot_there_is_no_ratio(self) -> None:
        found = table.verdict([outcome("ort", 1), outcome("nncf", 3)])
        assert found.ratio is None
        assert found.reached is None


def test_the_tables_hold_every_way_and_no_folder_of_the_machine(tmp_path: Path) -> None:
    failed = Outcome("resnet", "torchao", problem="OSError: no file /home/me/cache/model.pt2 | none")
    found = {"resnet": [outcome("ort", 1), outcome("ingot", 3), failed]}
    table.write(found, {"resnet": "digits ResNet"}, {"machine": "test"}, tmp_path)
    page = (tmp_path / "quant.md").read_text()
    assert "do not edit" in page
    assert "/home/me" not in page + (tmp_path / "quant.json").read_text()
    assert "`torchao` failed: OSError: no file model.pt2" in page
    record = json.loads((tmp_path / "quant.json").read_text())
    assert [item["way"] for item in record["outcomes"]] == ["ort", "ingot", "torchao"]
    assert record["verdicts"][0]["ratio"] == pytest.approx(3)
