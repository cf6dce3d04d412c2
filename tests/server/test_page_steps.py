"""The page's form and answers for models with steps, in a real browser: texts and pictures in, drawn answers out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

import ingot
from ingot import RunningServer
from tests.browsers import Opened, on_a_phone
from tests.server import test_apis, test_image_steps, test_steps


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        "length": test_steps.make(folder),
        "table": test_apis.table(folder),
        "ranker": test_apis.ranker(folder),
        "colour": test_image_steps.make(folder),
    }
    for name, archive in made.items():
        archive.save(folder / f"{name}.ingot")
    with ingot.serve(*(str(folder / f"{name}.ingot") for name in made), http_port=0, grpc_port=0) as running:
        yield running


@pytest.fixture
def opened(browser: Any, server: RunningServer) -> Iterator[Opened]:
    with on_a_phone(browser, server.http_url) as found:
        yield found
        refusals = [each for each in found.faults if "400 (Bad Request)" in each]  # which the tests look at
        assert found.faults == refusals


def choose(opened: Opened, model: str, task: str) -> Page:
    opened.page.get_by_role("button", name=f"{model}:1").press("Enter")
    expect(opened.page.locator("#inputs")).to_contain_text(f"task: {task}")
    return opened.page


def ask(page: Page) -> Any:
    page.get_by_role("button", name="Ask the model").click()
    return page.locator(".answer")


def test_a_text_is_classified(opened: Opened) -> None:
    page = choose(opened, "length", "text-classification")
    page.get_by_label("text", exact=True).fill("a fine film")
    answer = ask(page)
    expect(answer).to_have_count(1)  # no other model has the same inputs
    expect(answer.locator(".big")).to_have_text("LONG")
    expect(page.locator("[data-chart='Padding, % of elements']")).to_have_count(1)
    share = 1 / (1 + np.exp(4.5 - 5))
    expect(answer.locator(".scores span")).to_have_text(["LONG", f"{share:.3f}", "SHORT", f"{1 - share:.3f}"])
    expect(answer.locator(".tokens")).to_have_text("5 of 16 tokens")
    expect(page.locator("#stages")).to_contain_text(re.compile("step: tokenize.*step: classify"))
    page.get_by_label("text", exact=True).fill("film " * 20)
    expect(ask(page).locator(".tokens")).to_have_text("16 of 16 tokens, 6 more were cut off")
    page.get_by_label("text", exact=True).fill("a" * 1001)
    expect(ask(page).get_by_role("alert")).to_have_text(re.compile("element 0 of input 'text' has 1001 characters"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_several_texts_have_an_answer_each(opened: Opened) -> None:
    page = choose(opened, "length", "text-classification")
    page.get_by_role("button", name="add another").click()
    page.get_by_label("text 1").fill("a fine film")
    page.get_by_label("text 2").fill("<b>good</b>")
    answer = ask(page)
    expect(answer.locator("h4")).to_have_text(["a fine film", "<b>good</b>"])
    expect(answer.locator(".big")).to_have_count(2)
    page.get_by_role("button", name="remove").first.click()
    expect(page.get_by_label("text", exact=True)).to_have_value("<b>good</b>")


def test_texts_are_compared(opened: Opened) -> None:
    page = choose(opened, "table", "sentence-similarity")
    words = ["good", "bad", "film"]
    for number, word in enumerate(words[:2], 1):
        page.get_by_label(f"text {number}").fill(word)
    vectors = [test_apis.mean(word) for word in words]
    expect(ask(page).locator(".big")).to_have_text(f"{test_apis.cosine(vectors[0], vectors[1]):.3f}")
    page.get_by_role("button", name="add another").click()
    page.get_by_label("text 3").fill("film")
    cosines = {(i, j): test_apis.cosine(vectors[i], vectors[j]) for i in range(3) for j in range(3) if i != j}
    expect(ask(page).locator("tbody td").nth(2)).to_have_text(f"{cosines[0, 2]:.3f}")
    nearest = max((1, 2), key=lambda other: cosines[0, other])
    expect(page.locator(".nearest tbody tr").first.locator("td.good")).to_have_text(f"{cosines[0, nearest]:.3f}")
    page.get_by_label("prompt_name").select_option("query")
    prompted = [test_apis.mean("a", "fine", word) for word in words]
    expect(ask(page).locator("tbody td").nth(2)).to_have_text(f"{test_apis.cosine(prompted[0], prompted[2]):.3f}")


def test_pairs_are_ranked(opened: Opened) -> None:
    page = choose(opened, "ranker", "text-ranking")
    page.get_by_role("button", name="add another").click()
    for number, document in enumerate(("good", "a very fine film"), 1):
        page.get_by_label(f"question {number}").fill("film")
        page.get_by_label(f"text_pair {number}").fill(document)
    expect(ask(page).locator(".scores span")).to_have_text(["a very fine film", "0.731", "good", "0.119"])


def test_a_picture_is_chosen_dropped_or_drawn(opened: Opened, tmp_path: Path) -> None:
    page = choose(opened, "colour", "image-classification")
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("image has no file. Choose one, or draw it.")
    for colour in ("red", "blue"):
        Image.new("RGB", (90, 60), colour).save(tmp_path / f"{colour}.png")
    page.get_by_label("image").set_input_files([tmp_path / "red.png", tmp_path / "blue.png"])  # an item for each
    expect(page.get_by_label("red.png")).to_be_visible()
    expect(ask(page).locator(".big")).to_have_text(["red", "blue"])
    page.get_by_role("button", name="remove").last.click()
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["not a picture"], "notes.txt"));
            const drop = new DragEvent("drop", {dataTransfer: data, cancelable: true});
            document.querySelector(".drop").dispatchEvent(drop);
        }"""
    )
    expect(page.locator(".drop")).to_contain_text("notes.txt, 1 KiB")
    expect(ask(page).get_by_role("alert")).to_have_text(re.compile("element 0 of input 'image' is not a JPEG, PNG"))
    page.get_by_role("button", name="draw it").click()
    canvas = page.get_by_label(re.compile("draw image"))
    canvas.focus()
    canvas.press(" ")
    expect(ask(page).locator(".scores span").nth(1)).to_have_text("0.333")  # grey has as much of each colour


@pytest.mark.matrix
def test_what_is_copied_runs(opened: Opened, tmp_path: Path) -> None:
    Image.new("RGB", (90, 60), "red").save(tmp_path / "a red 'one'.png")
    page = choose(opened, "colour", "image-classification")
    page.get_by_label("image").set_input_files(tmp_path / "a red 'one'.png")
    assert "red" in run_copied(page, "curl", tmp_path)
    assert "b'red'" in run_copied(page, "Python", tmp_path)
    page.get_by_role("button", name="draw it").click()
    assert "green" in run_copied(page, "curl", tmp_path)
    assert "b'green'" in run_copied(page, "Python", tmp_path)
    page = choose(opened, "table", "sentence-similarity")
    page.get_by_label("text 1").fill('a "fine"\nfilm, it\'s 100 %s \\')
    assert '"tokens"' in run_copied(page, "curl", tmp_path)
    assert "tokens" in run_copied(page, "Python", tmp_path)


def run_copied(page: Page, kind: str, folder: Path) -> str:
    page.get_by_role("button", name=f"copy as {kind}").click()
    code = page.locator("#copied code")
    expect(code).to_contain_text("curl -s" if kind == "curl" else "import ingot")
    command = ["bash", "-c"] if kind == "curl" else [sys.executable, "-c"]
    return subprocess.run([*command, code.inner_text()], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_tensors_of_the_graph_can_be_sent_too(opened: Opened) -> None:
    page = choose(opened, "colour", "image-classification")
    page.get_by_label("send the graph's tensors instead").check()
    expect(page.get_by_label("pixel_values as JSON")).to_be_attached()
    expect(ask(page).locator("[data-top]")).to_have_text("0")
