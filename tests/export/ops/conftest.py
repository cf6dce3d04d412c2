from __future__ import annotations

import pytest

from ingot.export.rewrite.ops import definition


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that a test defines, and their rules, are gone after it."""
    monkeypatch.setattr(definition, "_DEFINED", dict(definition._DEFINED))
