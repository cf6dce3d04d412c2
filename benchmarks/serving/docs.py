"""Writes the figures of the last run into docs/concepts/benchmarks.md: ``python -m benchmarks.serving.docs``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.serving.report import section

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "benchmarks.md"


def updated(page: str, lines: list[str], name: str = "serving") -> str:
    """Return a page with new lines between the marks of a section.

    Raises:
        SystemExit: the marks are not there.
    """
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(f"the page has no lines {marks[0]} and {marks[1]} to write between")
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])


def main() -> None:
    """Write the section."""
    found = json.loads((Path(__file__).parent / "results" / "serving.json").read_text())
    PAGE.write_text(updated(PAGE.read_text(), section(found)))


if __name__ == "__main__":
    main()
