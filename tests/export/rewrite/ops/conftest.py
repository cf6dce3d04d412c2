from __future__ import annotations

import pytest

from ingot.export.rewrite.ops import definition


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the operators that a test defines, and their rules, after it."""
    monkeypatch.setattr(definition, "_DEFINED", dict(definition._DEFINED))
