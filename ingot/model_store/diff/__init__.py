"""Comparison of two archives. Start in archives.py, which compares variants; view.py draws the result.

See docs/guides/deploy/registry.md, "Comparing versions".
"""

from ingot.model_store.diff.archives import diff
from ingot.model_store.diff.records import Diff, VariantDiff

__all__ = ["Diff", "VariantDiff", "diff"]
