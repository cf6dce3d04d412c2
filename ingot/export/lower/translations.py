"""The ONNX forms of what the capture and the rewrite rules put into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot.export.capture import recurrent
from ingot.export.rules.fx import onnx_forms

TRANSLATIONS: dict[Any, Callable[..., Any]] = {**recurrent.TRANSLATIONS, **onnx_forms.TRANSLATIONS}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
