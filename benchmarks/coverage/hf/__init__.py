"""Architectures of ``transformers``; needs that package, which Ingot does not."""

from __future__ import annotations

from benchmarks.coverage.hf import mixed, text, vision

CASES = (*text.CASES, *vision.CASES, *mixed.CASES)
