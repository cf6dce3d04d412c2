"""Progress of transfers, and what an interruption leaves."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from ingot.cli.archives import transfers
from ingot.cli.serving.serve import configure_logging
from ingot.model_store import Archive, Store, Transfer
from tests import onnx_models
from tests.model_store.samples import archive
from tests.support import RunIngot, refused, succeeded


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Text that is drawn on a terminal."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(transfers, "stderr", lambda: console)
    return text


def test_the_bar_has_the_units_of_all_that_is_printed(screen: io.StringIO) -> None:
    with transfers.transferring("Copying") as transfer:
        transfer.expect(3 << 20)
        transfer.skip(1 << 20)
        transfer.advance(1 << 20)
    assert "1 MiB of 2 MiB" in screen.getvalue()


def test_a_transfer_without_bytes_draws_no_bar(screen: io.StringIO) -> None:
    with transfers.transferring("Copying") as transfer:
        transfer.expect(1 << 20)
        transfer.skip(1 << 20)
    assert "Copying" not in screen.getvalue()


def test_a_large_transfer_is_reported_as_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(transfers, "note", lines.append)
    monkeypatch.setattr(transfers, "stderr", lambda: Console(file=io.StringIO()))
    with transfers.transferring("Copying") as transfer:
        transfer.expect(1200 << 20)
        transfer.skip(200 << 20)
        for _ in range(1000):
            transfer.advance(1 << 20)
    assert len(lines) == 10
    assert (lines[0], lines[-1]) == ("Copying: 100 MiB of 1000 MiB", "Copying: 1000 MiB of 1000 MiB")
    with transfers.transferring("Copying") as transfer:
        transfer.expect(1 << 20)
        transfer.advance(1 << 20)
    assert len(lines) == 10


@pytest.mark.parametrize("command", ["export", "push", "save"])
def test_commands_report_their_bytes(
    run_ingot: RunIngot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    onnx_models.affine(tmp_path)
    monkeypatch.setattr(transfers, "_LARGE", 1)
    steps = {
        "export": ("export", "affine.onnx", "-o", "affine.ingot"),
        "push": ("copy", "affine.ingot", "affine:1"),
        "save": ("copy", "affine:1", "saved.ingot"),
    }
    for name in steps:
        result = run_ingot(*steps[name])
        if name == command:
            break
    title = {"export": "Writing affine.ingot", "push": "Copying", "save": "Writing saved.ingot"}[command]
    assert re.search(rf"^{title}: [\d.]+ \w*B of [\d.]+ \w*B$", result.stderr, re.MULTILINE), result.stderr


def test_an_interrupted_save_says_that_nothing_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "store").push(archive(), "tiny:1")
    told: list[str] = []

    def interrupt(self: Archive, path: Path, transfer: Transfer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Archive, "save", interrupt)
    monkeypatch.setattr(transfers, "note", told.append)
    with pytest.raises(KeyboardInterrupt):
        transfers.copy("tiny:1", str(tmp_path / "tiny.ingot"), store=tmp_path / "store")
    assert told == [f"nothing was written to {tmp_path / 'tiny.ingot'}"]


@pytest.mark.matrix
def test_a_copy_into_a_folder_is_named_after_the_model(run_ingot: RunIngot, tmp_path: Path) -> None:
    archive().save(tmp_path / "tiny.ingot")
    succeeded(run_ingot("copy", "tiny.ingot", "team/tiny:1"))
    (tmp_path / "sub").mkdir()
    assert succeeded(run_ingot("copy", "team/tiny:1", "./sub/")).startswith("sub/tiny.ingot: ")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["tiny.ingot"]
    assert "there is no folder other" in refused(run_ingot("copy", "team/tiny:1", "./other/"))
    assert not (tmp_path / "other").exists()
    assert "it is also the file of the archive" in refused(run_ingot("copy", "sub/tiny.ingot", "./sub/"))


@pytest.mark.matrix
def test_a_copy_that_moves_an_alias_names_its_earlier_target(run_ingot: RunIngot, tmp_path: Path) -> None:
    archive().save(tmp_path / "tiny.ingot")
    onnx_models.affine(tmp_path)
    succeeded(run_ingot("export", "affine.onnx", "-o", "affine.ingot"))
    first = run_ingot("copy", "tiny.ingot", "tiny:prod")
    digest = succeeded(first).split()[-1]
    assert "tiny:prod is new\n" in first.stderr
    assert "tiny:prod is unchanged\n" in run_ingot("copy", "tiny.ingot", "tiny:prod").stderr
    assert f"tiny:prod was {digest}\n" in run_ingot("copy", "affine.ingot", "tiny:prod").stderr
    assert "tiny:1" not in run_ingot("copy", "tiny.ingot", "tiny:1").stderr


def test_addresses_of_registries_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    for name in ("httpx", "httpcore"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    configure_logging("debug")
    assert not any(logging.getLogger(name).isEnabledFor(logging.INFO) for name in ("httpx", "httpcore"))
