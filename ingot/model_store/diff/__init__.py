"""What changed between two archives. See docs/registry.md, "Comparing versions"."""

from ingot.model_store.diff.archives import diff
from ingot.model_store.diff.records import Diff, VariantDiff

__all__ = ["Diff", "VariantDiff", "diff"]
