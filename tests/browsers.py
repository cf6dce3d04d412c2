"""Pages in a real browser; the browser itself is the fixture ``browser`` of conftest.py."""

from __future__ import annotations

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
