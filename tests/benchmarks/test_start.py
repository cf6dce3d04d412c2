"""The benchmark of starts, at a small size: it finds what it measures, and checks each answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.scale import start
from tests.support import RequireTool


@pytest.mark.matrix
def test_every_kind_of_start_is_measured(require_tool: RequireTool, tmp_path: Path) -> None:
    require_tool("docker-registry")
    start.main(["--megabytes", "20", "--rounds", "1", "--out", str(tmp_path)])
    text = (tmp_path / "start.md").read_text()
    for title in start.TITLES.values():
        assert re.search(rf"^\| {re.escape(title)} \| \d", text, re.MULTILINE), text
