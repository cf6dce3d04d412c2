"""The page's form for a prompt, in a real browser: the text appears as it is written."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from ingot import RunningServer
from tests.browsers import Opened, on_a_phone
from tests.server.completion import written
from tests.support import RunIngot, succeeded

PROMPT = "it's here"


@pytest.fixture
def opened(browser: Any, server: RunningServer) -> Iterator[Opened]:
    with on_a_phone(browser, server.http_url) as found:
        yield found


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


def test_its_charts_count_tokens(opened: Opened, http: httpx.Client) -> None:
    page = opened.page
    page.get_by_role("button", name=f"{written.NAME}:1").press("Enter")
    value = page.locator("[data-chart='Tokens per second'] .value")
    expect(page.locator("[data-chart='Slots in use'] .value")).to_have_text("0")
    while value.inner_text() in ("", "0"):
        http.post("/v1/completions", json={"model": written.NAME, "prompt": PROMPT, "max_tokens": 40})
    expect(page.locator("[data-chart='First token, and each further one, p50'] .value")).to_contain_text("s / ")


def test_the_terminal_counts_tokens(run_ingot: RunIngot, server: RunningServer) -> None:
    body = {"model": written.NAME, "prompt": PROMPT, "max_tokens": 40}
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
            while not over.is_set():
                client.post("/v1/completions", json=body)

    asking = threading.Thread(target=ask)
    asking.start()
    found = succeeded(run_ingot("server", "top", "--server", server.http_url, "--once"))
    over.set()
    asking.join(timeout=60)
    shown = r"tokens/s [1-9]\S*, first token \S+ [mu]?s, then \S+ \S+ each, slots in use \d"
    assert re.search(rf"(?m)^{written.NAME}:1  {shown}$", found), found


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
