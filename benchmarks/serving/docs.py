"""Writes the figures of the last run into docs/benchmarks.md: ``python -m benchmarks.serving.docs``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.serving.report import section

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- serving: begin -->", "<!-- serving: end -->"


def updated(page: str, lines: list[str]) -> str:
    """Return a page with new lines between its marks.

    Raises:
        SystemExit: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no lines {BEGIN} and {END} to write between")
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"])


def main() -> None:
    """Write the section."""
    found = json.loads((Path(__file__).parent / "results" / "serving.json").read_text())
    PAGE.write_text(updated(PAGE.read_text(), section(found)))


if __name__ == "__main__":
    main()
