"""The kinds of steps that read texts from pictures, against the rules that they stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import InvalidArgument, Unsupported
from ingot.steps import image_to_text, text_detection
from ingot.steps.after.ctc import Ctc
from ingot.steps.after.text_boxes import TextBoxes
from ingot.steps.images.opencv import opencv_linear
from ingot.steps.images.operations import Pad
from ingot.steps.images.sizes import Target
from ingot.steps.step import Step, Values
from ingot.steps.tasks.declared import read_steps


def run(step: Step, **values: Any) -> Values:
    return step.open(lambda name: b"")(values)


def test_pixels_are_resized_as_opencv_does() -> None:
    cv2: Any = pytest.importorskip("cv2")
    random = np.random.default_rng(0)
    for index in range(200):
        rows, columns, height, width = map(int, random.integers(1, 120, 4))
        if index % 4 == 0:
            rows, columns = 2 * height, 2 * width  # the mean of four
        pixels = random.integers(0, 256, (rows, columns, 3), np.uint8)
        assert np.array_equal(opencv_linear(pixels, height, width), cv2.resize(pixels, (width, height)))


@pytest.mark.parametrize(
    ("size", "options", "wanted"),
    [
        ((31, 100), {"rule": "line", "height": 48, "width": 320}, (48, 155)),  # 154.8 is rounded up
        ((31, 333), {"rule": "line", "height": 48, "width": 320}, (48, 515)),  # 515.6, wider than 320, down
        ((31, 333), {"rule": "line", "height": 48, "width": 320, "longest": 320}, (48, 320)),
        ((500, 1000), {"rule": "page", "edge": 736, "multiple": 32}, (736, 1472)),
        ((800, 1000), {"rule": "page", "edge": 736, "multiple": 32}, (800, 992)),  # 31.25 multiples
        ((800, 1000), {"rule": "page", "longest": 960, "multiple": 32}, (768, 960)),
    ],
)
def test_sizes_of_lines_and_pages(size: tuple[int, int], options: dict[str, Any], wanted: tuple[int, int]) -> None:
    assert Target(**options).of(size) == wanted


def test_a_picture_is_extended_to_the_least_size() -> None:
    pad = Pad(to="at_least", height=2, width=3)
    assert pad.apply(np.ones((2, 1, 3), np.float32), 100)[..., 0].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert pad.apply(np.ones((2, 5, 3), np.float32), 100).shape == (2, 5, 3)


def test_the_score_is_the_mean_of_the_characters() -> None:
    probabilities = np.zeros((2, 6, 4), np.float32)
    probabilities[:, :, 0] = 0.1
    for frame, (token, value) in enumerate([(3, 0.9), (1, 0.8), (1, 0.4), (0, 0.7), (1, 0.6), (3, 0.5)]):
        probabilities[0, frame, token] = value
    step = Ctc(tokens=("", "a", "b", " "), blank="", delimiter="", strip=False, score="score")
    found = run(step, logits=probabilities)
    assert found["text"].tolist() == [b" aa ", b""]
    assert found["score"].tolist() == pytest.approx([(0.9 + 0.8 + 0.6 + 0.5) / 4, 0])
    assert run(step.model_copy(update={"strip": True, "score": ""}), logits=probabilities).keys() == {"text"}


class TestTextBoxes:
    size = np.array([[200, 400]])

    def boxes(self, probabilities: Any, **options: Any) -> Values:
        pytest.importorskip("cv2")
        pytest.importorskip("pyclipper")
        return run(TextBoxes(**options), probabilities=probabilities, original_size=self.size)

    def test_regions_become_boxes_in_the_order_of_reading(self) -> None:
        probabilities = np.zeros((1, 1, 100, 100), np.float32)
        probabilities[0, 0, 12:20, 60:90] = 0.9
        probabilities[0, 0, 10:18, 10:40] = 0.8
        probabilities[0, 0, 60:70, 10:50] = 0.7
        probabilities[0, 0, 60:70, 80:82] = 0.9  # narrower than 3 pixels
        probabilities[0, 0, 80:90, 20:60] = 0.4  # less certain than a box must be
        found = self.boxes(probabilities, dilated=False)
        assert found["count"].tolist() == [3]
        assert found["score"][0].tolist() == pytest.approx([0.8, 0.9, 0.7])
        # 7 x 29 pixels are expanded by 7 * 29 * 1.6 / 72 = 4.5, of which 1 is 4 in the width and 2 in the height.
        assert found["polygon"][0, 0].tolist() == pytest.approx(
            np.array([[10 * 4 - 18, 10 * 2 - 9], [39 * 4 + 18, 11], [174, 17 * 2 + 9], [22, 43]]), abs=2
        )
        assert found["box"][0, 0].tolist() == [*found["polygon"][0, 0].min(0), *found["polygon"][0, 0].max(0)]
        assert found["label"].tolist() == [[b"text"] * 3]

    def test_a_picture_without_texts_has_none(self) -> None:
        found = self.boxes(np.zeros((1, 1, 32, 32), np.float32))
        assert (found["count"].tolist(), found["polygon"].shape) == ([0], (1, 0, 4, 2))

    def test_boxes_stay_within_the_picture(self) -> None:
        polygon = self.boxes(np.ones((1, 1, 32, 64), np.float32))["polygon"]
        assert polygon.tolist() == [[[[0, 0], [399, 0], [399, 199], [0, 199]]]]

    def test_probabilities_of_several_classes_are_refused(self) -> None:
        with pytest.raises(InvalidArgument, match=r"needs 'probabilities' of the shape \[batch, 1, height,"):
            self.boxes(np.ones((1, 2, 32, 64), np.float32))

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cv2", None)
        with pytest.raises(Unsupported, match=r"opencv-python-headless.*pip install 'ingot-serve\[ocr\]'"):
            TextBoxes().open(lambda name: b"")


def test_characters_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("a\nß\n", encoding="utf-8")
    (tmp_path / "rec.toml").write_text('task = "image-to-text"\ncharacters = "keys.txt"\npixels = "x"\n')
    described = read_steps(tmp_path / "rec.toml")
    [ctc] = described.steps.after
    assert isinstance(ctc, Ctc)
    assert ctc.tokens == ("", "a", "ß", " ")
    assert described.inputs == ("x:float32[batch,3,48,width=320..3200]",)
    (tmp_path / "rec.toml").write_text('task = "image-to-text"\ncharacters = "other.txt"\n')
    with pytest.raises(InvalidArgument, match=r"other.txt cannot be read"):
        read_steps(tmp_path / "rec.toml")


def test_the_graphs_inputs_follow_from_the_options() -> None:
    assert text_detection(most=960).inputs == ("pixel_values:float32[batch,3,height=32..960:32,width=32..960:32]",)
    assert image_to_text("ab", height=32, width=100, longest=800).inputs == (
        "pixel_values:float32[batch,3,32,width=100..800]",
    )
