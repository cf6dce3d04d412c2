from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from ingot.errors import FULL_DISK, InvalidArgument, StorageFull
from ingot.model_store import Agreement, BatchLatency
from ingot.quant.measure.trial import Trial
from ingot.quant.metric import Comparison, Score
from ingot.quant.report.records import Audit
from ingot.quant.schemes.plan import Plan
from ingot.quant.search.journal import Journal

SEARCH = {"journal": 1, "model": "sha256:a", "batches": [1, 8]}
FIRST = Trial(
    plan=Plan("first", {"a": "static"}),
    size=123,
    latency=(BatchLatency(rows=1, seconds=0.5), BatchLatency(rows=8, seconds=1.5)),
    baseline=(BatchLatency(rows=1, seconds=1), BatchLatency(rows=8, seconds=3)),
    audit=Audit(quantized={"QGemm": 2}, floats=("Conv a",)),
    comparison=Comparison(Score(1, 1, 1), Score(0.9, 0.8, 0.95), Score(0.1, 0.05, 0.2)),
    outputs=(Agreement(tensor="y", cosine=0.9, error=0.1, top1=0.5, sqnr=30),),
)
SECOND = Trial(plan=Plan("second", {"a": "dynamic"}), failure="ONNX Runtime cannot load it")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".out.ingot.search"


def test_added_attempts_are_read_back(path: Path) -> None:
    journal = Journal(path, SEARCH)
    assert journal.resumed == 0
    for trial in (FIRST, SECOND):
        journal.add(trial)
    again = Journal(path, SEARCH)
    assert again.resumed == 2
    assert again.get(FIRST.plan) == FIRST
    assert again.get(SECOND.plan) == SECOND
    assert again.get(Plan("third", {"b": "static"})) is None


def test_a_plan_is_known_by_what_it_makes(path: Path) -> None:
    Journal(path, SEARCH).add(FIRST)
    other = Plan("another name", {"a": "static"})
    found = Journal(path, SEARCH).get(other)
    assert found is not None
    assert found.plan.name == "another name"
    assert found.speed == FIRST.speed == pytest.approx(2)


def test_another_search_starts_over(path: Path) -> None:
    Journal(path, SEARCH).add(FIRST)
    other = Journal(path, {**SEARCH, "model": "sha256:b"})
    assert other.resumed == 0
    assert other.get(FIRST.plan) is None
    assert Journal(path, SEARCH).resumed == 0


@pytest.mark.parametrize("cut", [1, 2, 10, 100])
def test_a_line_that_was_cut_off_is_tried_again_and_spoils_nothing(path: Path, cut: int) -> None:
    journal = Journal(path, SEARCH)
    journal.add(FIRST)
    journal.add(SECOND)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal = Journal(path, SEARCH)
    assert journal.get(FIRST.plan) == FIRST
    if cut > 1:
        assert journal.get(SECOND.plan) is None
        journal.add(SECOND)
    again = Journal(path, SEARCH)
    assert again.get(FIRST.plan) == FIRST
    assert again.get(SECOND.plan) == SECOND


@pytest.mark.parametrize(
    "line",
    ["", "17", "null", "[]", '{"key": 1', '{"name": "x"}', "\udcff", '"key"', "[" * 100_000, '{"key": "\\ud800"}'],
    ids=lambda line: line[:9],
)
def test_damaged_lines_are_left_out(path: Path, line: str) -> None:
    Journal(path, SEARCH).add(FIRST)
    with path.open("ab") as stream:
        stream.write(line.encode(errors="surrogateescape") + b"\n")
    journal = Journal(path, SEARCH)
    journal.add(SECOND)
    assert Journal(path, SEARCH).get(FIRST.plan) == FIRST
    assert Journal(path, SEARCH).get(SECOND.plan) == SECOND


@pytest.mark.parametrize(
    "change",
    [
        {"latency": 3},
        {"latency": [{"rows": 1, "seconds": 0}, {"rows": 8, "seconds": 1.5}]},
        {"latency": [{"rows": 1, "seconds": -1}, {"rows": 8, "seconds": 1.5}]},
        {"latency": [{"rows": 1, "seconds": 1e-320}, {"rows": 8, "seconds": 1.5}]},
        {"latency": [{"rows": 1, "seconds": math.nan}, {"rows": 8, "seconds": 1.5}]},
        {"latency": [{"rows": 2, "seconds": 0.5}, {"rows": 8, "seconds": 1.5}]},
        {"latency": [{"rows": 1, "seconds": 0.5}, {"rows": 1, "seconds": 1.5}]},
        {"latency": []},
        {"baseline": []},
        {"latency": [], "baseline": []},
        {"comparison": "x"},
        {"comparison": None},
        {"comparison": {"before": 1}},
        {"comparison": {"before": {"value": 1, "low": 1, "high": 1}}},
        {"comparison": {name: {"value": math.nan, "low": 1, "high": 1} for name in ("before", "after", "drop")}},
        {"comparison": {name: {"value": "1", "low": 1, "high": 1} for name in ("before", "after", "drop")}},
        {"audit": None},
        {"audit": {"quantized": {"QGemm": -1}, "floats": []}},
        {"outputs": [{"tensor": "y", "cosine": math.inf, "error": 0}]},
        {"size": "123"},
        {"size": 1 << 70},
        {"failure": 3},
        {"failure": "it failed, and was measured"},
    ],
    ids=str,
)
def test_a_malformed_result_is_ignored(path: Path, change: dict[str, object]) -> None:
    Journal(path, SEARCH).add(FIRST)
    head, line = path.read_text().splitlines()
    path.write_text(f"{head}\n{json.dumps({**json.loads(line), **change})}\n")
    assert Journal(path, SEARCH).get(FIRST.plan) is None


@pytest.mark.parametrize("content", [b"PK\x03\x04\xff\xfe data", b"a,b\n1,2\n", b"{}\n", b"[1]\n", b"[" * 100_000])
def test_a_file_of_another_kind_is_not_overwritten(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="is not a journal of a search"):
        Journal(path, SEARCH)
    assert path.read_bytes() == content


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "link to nothing", "device"])
def test_no_regular_file(path: Path, kind: str) -> None:
    other = path.with_name("other")
    if kind == "link":
        other.write_text(json.dumps(SEARCH) + "\n")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to(other)
    with pytest.raises(InvalidArgument, match=f"the journal {path} is not a regular file"):
        Journal(path, SEARCH)
    assert other.exists() == (kind == "link")
    if kind == "link":
        assert other.read_text() == json.dumps(SEARCH) + "\n"


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_unwritable_journal(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    journal = Journal(path, SEARCH)

    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("ingot.quant.search.journal.os.open", refuse)
    kind = StorageFull if code in FULL_DISK else InvalidArgument
    for act in (lambda: journal.add(FIRST), lambda: Journal(path, SEARCH)):
        with pytest.raises(kind, match=f"the journal {path} cannot be written: "):
            act()


def test_a_journal_that_is_too_large(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(65 << 20)
    with pytest.raises(InvalidArgument, match="larger than 64 MiB"):
        Journal(path, SEARCH)


def test_it_is_removed_at_the_end(path: Path) -> None:
    journal = Journal(path, SEARCH)
    assert path.exists()
    journal.remove()
    journal.remove()
    assert not path.exists()


def test_without_a_file_nothing_is_kept() -> None:
    journal = Journal(None, SEARCH)
    journal.add(FIRST)
    assert journal.get(FIRST.plan) is None
    assert journal.resumed == 0
    journal.remove()
