"""Folders whose task needs a package that is not installed: the archive accepts tensors alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.model_store import Archive
from tests.export.tasks import detectors, test_pictures
from tests.steps import speech
from tests.support import RunIngot, refused, succeeded

Save = Callable[[Path], Path]


@pytest.mark.matrix
def test_a_package_without_which_the_inputs_are_not_known(
    run_ingot: RunIngot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = detectors.detr(tmp_path / "net")
    monkeypatch.setitem(sys.modules, "PIL", None)
    message = refused(run_ingot("export", folder, "--out", tmp_path / "net.ingot"))
    assert "needs the package 'pillow', which is not installed: pip install 'ingot-serve[images]'" in message
    assert "the sizes of the inputs are not known: or declare them with --input" in message


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("save", "package"),
    [
        (speech.classifier, "soundfile"),
        (speech.recognizer, "soundfile"),
        (speech.spectrogram_transformer, "soxr"),
        (test_pictures.save, "PIL"),
    ],
)
def test_a_package_that_is_missing(
    save: Save, package: str, run_ingot: RunIngot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "net")
    monkeypatch.setitem(sys.modules, package, None)
    result = run_ingot("export", folder, "--out", tmp_path / "net.ingot")
    succeeded(result)
    assert "note: the archive accepts tensors alone" in result.stderr
    assert "pip install 'ingot-serve[" in result.stderr
    assert Archive.open(tmp_path / "net.ingot").variant().serving.steps is None
