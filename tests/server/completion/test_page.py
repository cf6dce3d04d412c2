"""The page's form for a prompt, in a real browser: the text appears as it is written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from ingot import RunningServer
from tests.browsers import Opened
from tests.server.completion import written

PROMPT = "it's here"


@pytest.fixture
def opened(browser: Any, server: RunningServer) -> Iterator[Opened]:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(30_000)
    yield Opened(page, server.http_url)
    page.close()


def test_a_prompt_is_continued(opened: Opened) -> None:
    page = opened.page
    page.get_by_role("button", name=f"{written.NAME}:1").press("Enter")
    page.get_by_label("prompt").fill(PROMPT)
    page.get_by_label("most tokens").fill("9")
    page.get_by_role("button", name="Ask the model").click()
    answer = page.locator(".answer").filter(has_text=f"{written.NAME}:1")
    expect(answer.locator(".written")).to_have_text(written.text(PROMPT, 9))
    expect(answer.locator("small")).to_contain_text("the first piece after")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.faults == []
    page.get_by_label("most tokens").fill("1000")
    page.get_by_role("button", name="Ask the model").click()
    expect(answer.get_by_role("alert")).to_contain_text("together they may have 128")


def test_the_copied_command_asks_the_same(opened: Opened) -> None:
    page = opened.page
    page.get_by_role("button", name=f"{written.NAME}:1").press("Enter")
    page.get_by_label("prompt").fill(PROMPT)
    page.get_by_label("most tokens").fill("9")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.get_by_role("button", name="copy as curl").click()
    page.wait_for_function("window.copied")
    command = f"{page.evaluate('window.copied')} --noproxy '*'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    events = [json.loads(line.removeprefix("data: ")) for line in done.stdout.splitlines() if line]
    assert "".join(event["text"] for event in events) == written.text(PROMPT, 9)
