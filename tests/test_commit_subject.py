"""The commit-msg hook: imperative subjects of 12 to 72 characters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.commit_subject import faults
from tests.support import ROOT


@pytest.mark.parametrize(
    "subject",
    [
        "Refuse archives with two files of one name",
        "Pass the limit to the parser",
        "Embed the schema",
        "Bring up the engine before its queue",
        "Focus the report on what changed",
        "Rate-limit errors of one kind in the log",
        "Merge branch 'x'",
        'Revert "Add a queue"',
    ],
)
def test_imperatives_are_accepted(subject: str) -> None:
    assert faults(subject) == []
    assert faults(f"{subject}\n\nBecause it is so.\n") == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("", "0 characters"),
        ("Fix it", "6 characters"),
        ("Refuse " + 66 * "x", "73 characters"),
        ("add a queue to the model", "capital"),
        ("wip on the scheduler", "capital"),
        ("fixup! Add a queue", "capital"),
        ("WIP on the scheduler", "imperative"),
        ("Added a queue to the model", "imperative"),
        ("Adds a queue to the model", "imperative"),
        ("Adding a queue to the model", "imperative"),
        ("Tests of the scheduler", "imperative"),
        ("Scheduler: refuse late requests", "imperative"),
        ("The queue is bounded", "imperative"),
        ("Add a queue to the model.", "full stop"),
        ("Add a queue to the model\nand a test", "not empty"),
    ],
)
def test_other_subjects_are_rejected(subject: str, fault: str) -> None:
    assert re.search(fault, "; ".join(faults(subject)))


def test_the_hook_prints_the_faults_of_the_message_in_a_file(tmp_path: Path) -> None:
    for message, status in (("Add a queue to the model\n", 0), ("added a queue.\n", 1)):
        (tmp_path / "message").write_text(message)
        command = [sys.executable, "scripts/commit_subject.py", str(tmp_path / "message")]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == status
        assert ("commit subject 'added a queue.': it ends with a full stop" in result.stderr) == bool(status)
