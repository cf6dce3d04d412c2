"""How the page draws the answers of each task, in a real browser: boxes, masks, marked texts, and texts of sounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

import ingot
from ingot import RunningServer
from ingot.steps import speech_recognition
from tests.browsers import Opened, on_a_phone
from tests.server import test_sound_steps as sounds
from tests.server.test_page_steps import ask, choose
from tests.steps import answering

SPELLED = """
from collections.abc import Iterator


class Spelled:
    def predict_one(self, text: str) -> Iterator[str]:
        for word in text.split():
            if word == "fail":
                raise ValueError("a bad word")
            yield " ".join(word)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    makers = (
        answering.detector,
        answering.segmenter,
        answering.ranger,
        answering.finder,
        answering.reader,
        answering.filler,
    )
    for make in makers:
        make(folder).save(folder / f"{make.__name__}.ingot")
    bursts = speech_recognition(
        ["A", "-"], rate=sounds.RATE, blank="-", attention_mask="mask", convolutions=((sounds.FRAME, sounds.FRAME, 0),)
    )
    sounds.make("bursts", bursts, folder, sounds.sound(0.5, 0, 0.5))
    (folder / "spelled.py").write_text(SPELLED)
    code = f"{folder / 'spelled.py'}:Spelled"
    with ingot.serve(code, *map(str, folder.glob("*.ingot")), http_port=0, grpc_port=0) as running:
        yield running


@pytest.fixture
def opened(browser: Any, server: RunningServer) -> Iterator[Opened]:
    with on_a_phone(browser, server.http_url) as found:
        found.page.get_by_label("and all models with the same inputs").uncheck()
        yield found
        assert found.faults == []
        assert found.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A picture of 200 x 100 pixels whose left half is red and whose right half is blue; it is stored on its side."""
    found = Image.new("RGB", (200, 100), "blue")
    found.paste("red", (0, 0, 100, 100))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned right
    found.rotate(90, expand=True).save(tmp_path / "halves.png", exif=exif)
    return tmp_path / "halves.png"


def test_boxes_are_drawn_on_the_upright_picture(opened: Opened, picture: Path) -> None:
    page = choose(opened, "detector", "object-detection")
    page.get_by_label("image", exact=True).set_input_files(picture)
    answer = ask(page)
    canvas = answer.locator("canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"cat 0\.9\d+, dog 0\.\d+"))
    assert size(canvas) == [200, 100]
    expect(answer.locator(".legend span")).to_contain_text(["cat 0, 0, 100, 100", "0.9", "dog 50, 25, 150, 75", "0."])
    assert colour(canvas, 60, 50) == [255, 0, 0]  # within the boxes, the picture
    assert colour(canvas, 180, 50) == [0, 0, 255]
    assert colour(canvas, 100, 90) not in ([255, 0, 0], [0, 0, 255])  # the right edge of the cat
    page.get_by_label("threshold").fill("0.9")
    expect(ask(page).locator(".legend span")).to_have_count(2)
    page.get_by_label("threshold").fill("0.99")
    expect(ask(page)).to_contain_text("Nothing found.")


def test_masks_are_laid_over_the_picture(opened: Opened, picture: Path) -> None:
    page = choose(opened, "segmenter", "image-segmentation")
    page.get_by_label("image", exact=True).set_input_files(picture)
    answer = ask(page)
    expect(answer.locator(".legend span")).to_have_text(["red", "", "rest", ""])
    canvas = answer.locator("canvas")
    red, blue, green = colour(canvas, 20, 50)
    assert red > 200
    assert (blue, green) != (0, 0)  # half of the mask's own colour
    assert colour(canvas, 180, 50) != [0, 0, 255]


def test_depths_are_drawn_with_their_range(opened: Opened, picture: Path) -> None:
    page = choose(opened, "ranger", "depth-estimation")
    page.get_by_label("image", exact=True).set_input_files(picture)
    answer = ask(page)
    expect(answer).to_contain_text(re.compile(r"from -0\.\d+ \(black\) to 1\.\d+ \(white\)"))
    assert answer.locator("img.picture").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [200, 100]


def test_entities_are_marked_in_the_text(opened: Opened) -> None:
    page = choose(opened, "finder", "token-classification")
    page.get_by_label("text", exact=True).fill("😀 a fine film and a café film")
    answer = ask(page)
    expect(answer.locator("mark")).to_have_text(["film WORK", "film WORK"])
    expect(answer.locator(".marked")).to_have_text("😀 a fine film WORK and a café film WORK")
    page.get_by_label("aggregation_strategy").select_option("none")
    expect(ask(page).locator("mark")).to_have_text(["film B-WORK", "film B-WORK"])


def test_the_answer_to_a_question_is_marked(opened: Opened) -> None:
    page = choose(opened, "reader", "question-answering")
    page.get_by_label("question").fill("what was never dull?")
    page.get_by_label("context").fill("😀 a fine film, the story was good")
    answer = ask(page)
    expect(answer.locator(".big")).to_have_text("film, the story")
    expect(answer.locator("mark")).to_have_text("film, the story")
    page.get_by_label("top_k").fill("0")
    page.get_by_role("button", name="Ask the model").click()
    expect(page.get_by_role("alert")).to_contain_text("input 'top_k' is 0")
    opened.faults.clear()  # the browser's line about the status


def test_missing_words_are_filled(opened: Opened) -> None:
    page = choose(opened, "filler", "fill-mask")
    page.get_by_label("text", exact=True).fill("a fine [MASK] and a [MASK]")
    answer = ask(page)
    expect(answer.locator(".scores")).to_have_count(2)
    expect(answer.locator(".scores").first.locator("span").first).to_have_text("film")
    expect(answer.locator(".transcript").first).to_contain_text("a fine film and a [MASK]")


def test_the_words_of_sounds_are_written(opened: Opened, tmp_path: Path) -> None:
    page = choose(opened, "bursts", "automatic-speech-recognition")
    for name, levels in (("two", (0.5, 0, 0.5)), ("one", (0, 0.5))):
        (tmp_path / f"{name}.wav").write_bytes(sounds.sound(*levels))
    page.get_by_label("audio", exact=True).set_input_files([tmp_path / "two.wav", tmp_path / "one.wav"])
    expect(page.locator(".drop").first).to_contain_text("two.wav, 5 KiB")
    answer = ask(page)
    expect(answer.locator(".transcript")).to_have_text(["AA", "A"])
    expect(answer.locator(".tokens")).to_have_text(["0.300 s of sound", "0.200 s of sound"])


def size(canvas: Locator) -> Any:
    return canvas.evaluate("each => [each.width, each.height]")


def colour(canvas: Locator, x: int, y: int) -> Any:
    return canvas.evaluate(
        "(each, [x, y]) => [...each.getContext('2d').getImageData(x, y, 1, 1).data.slice(0, 3)]", [x, y]
    )


@pytest.mark.matrix
def test_answers_in_parts_come_one_by_one(opened: Opened) -> None:
    page = opened.page
    page.get_by_role("button", name="spelled:1").press("Enter")
    page.get_by_label("text", exact=True).fill("to be fail")
    answer = ask(page)
    expect(answer.locator(".written div")).to_have_text(['{"output":"t o"}', '{"output":"b e"}'])
    expect(answer.get_by_role("alert")).to_contain_text("a bad word")
