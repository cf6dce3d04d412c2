"""The demo, from a store that already has its model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ingot.cli.demo import demo, demo_models
from ingot.demo import Data, Digits
from ingot.errors import InvalidArchive
from ingot.model_store import Archive, Store
from tests.made import MadeOnce
from tests.support import run_in_process, succeeded


@pytest.mark.parametrize(
    ("int8", "fp32", "shown"),
    [
        ([2.0, 3.0, 4.0], [2.0, 3.0, 4.0], "no difference [1.00, 1.00]"),
        ([2.0, 3.0, 4.4], [2.1, 2.9, 4.0], "no difference [0.95, 1.10]"),
        ([1.0, 3.0, 4.4], [2.0, 2.0, 2.2], "unclear [0.50, 2.00]"),
        ([6.8] * 7 + [1.0], [3.4] * 8, "2.00 [0.29, 2.00]"),
        ([6.8] * 6 + [1.0, 1.0], [3.4] * 8, "unclear [0.29, 2.00]"),
        ([4.0, 5.0, 9.0], [2.0, 2.0, 3.0], "2.50 [2.00, 3.00]"),
        ([1.0, 1.0, 1.0], [2.0, 4.0, 5.0], "0.25 [0.20, 0.50]"),
    ],
)
def test_a_difference_is_shown_if_all_rounds_agree(int8: list[float], fp32: list[float], shown: str) -> None:
    assert demo.difference([one / other for one, other in zip(int8, fp32, strict=True)]) == shown


@pytest.fixture
def home(
    digits: tuple[Digits, Data, Data],
    digits_archive: Path,
    made_once: MadeOnce,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A store with the models of an earlier run; the demo measures for two rounds only."""
    store = Store(tmp_path / "home")
    store.push(Archive.open(digits_archive), "digits:1")
    archive = store.get("digits:1")
    monkeypatch.setitem(demo_models._SOURCES, "digits", archive.variant().serving.provenance.source)
    monkeypatch.setattr(demo, "_ROUNDS", 2)
    checkpoint = demo_models._checkpoint(store, archive)
    checkpoint.parent.mkdir()
    torch.save(digits[0].state_dict(), checkpoint)
    makers = {
        "digit-pictures": lambda path: demo_models._pictures(checkpoint, print).save(path),
        "docstrings": lambda path: demo_models._docstrings(print).save(path),
    }
    for name, make in makers.items():
        store.push(Archive.open(made_once(f"{name}.ingot", make)), f"{name}:1")
    return store.root


_ONCE = ["demo", "--once", "--http-port", "0", "--grpc-port", "0"]


def test_it_reports_both_variants_and_their_difference(home: Path, tmp_path: Path) -> None:
    result = run_in_process(_ONCE, tmp_path, home)
    shown = succeeded(result)
    assert "digits:1 on 450 held-out images (PyTorch: 9" in shown
    assert result.stderr.index("Serving at http://127.0.0.1:") < result.stderr.index("Measuring, round 1 of 2")
    for row in ("digit-pictures: 9", "docstrings: "):
        (line,) = [line for line in shown.splitlines() if line.startswith(row)]
        assert "held-out" in line
    for row in ("latency, HTTP (p50)", "latency, gRPC (p50)", "images/s, 32 clients"):
        (line,) = [line for line in shown.splitlines() if row in line]
        assert "[" in line


@pytest.mark.matrix
def test_the_report_as_json_has_the_ratio_of_each_round(home: Path, tmp_path: Path) -> None:
    report = json.loads(succeeded(run_in_process([*_ONCE, "--json"], tmp_path, home)))
    assert report["int8"]["equal_to_torch"] > 440
    assert report["int8"]["size"] < report["fp32"]["size"]
    assert report["digit-pictures"]["accuracy"] == report["torch"]["accuracy"]  # the same network, on files
    assert report["docstrings"]["accuracy"] > 0.7
    assert report["docstrings"]["items"] > 500
    for ratios in report["int8_to_fp32"].values():
        assert len(ratios) == 2
        assert median(ratios) > 0


def test_models_that_another_version_made_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(demo_models, "note", notes.append)

    def get(reference: str) -> Any:
        if reference.endswith(":1"):
            raise InvalidArchive("serving.json is not valid at 'steps'")
        source = demo_models._SOURCES[reference.split(":", maxsplit=1)[0]]
        archive = Mock(spec=Archive)
        archive.variant.return_value.serving.provenance.source = source
        return archive

    store = Mock(spec=Store, get=get)
    store.tags.return_value = ["1", "2"]
    assert demo_models.others(store, Path()) == {"digit-pictures": "digit-pictures:2", "docstrings": "docstrings:2"}
    assert notes[-1] == "Passing over docstrings:1: serving.json is not valid at 'steps'"
