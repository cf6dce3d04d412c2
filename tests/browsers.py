"""Pages in a real browser; the browser itself is the fixture ``browser`` of conftest.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Page


class Opened:
    """A page with what went wrong in it: messages of the console, and requests to other machines."""

    def __init__(self, page: Page, url: str):
        self.page = page
        self.faults: list[str] = []
        page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith((url, "data:")) else self.faults.append(sent.url))
        page.goto(url)


@contextlib.contextmanager
def on_a_phone(browser: Any, url: str) -> Iterator[Opened]:
    """Open the page of a server on the screen of a phone."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(30_000)
    yield Opened(page, url)
    page.close()
