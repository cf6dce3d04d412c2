"""All benchmarks of the store, one after the other: ``python -m benchmarks.model_store``. Takes twelve minutes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.model_store.page import RESULTS

PARTS = ("load", "transfer", "swaps")


def main() -> None:
    """Run each part, and keep its page with the results."""
    for part in PARTS:
        subprocess.run([sys.executable, "-m", f"benchmarks.model_store.{part}", "--out", str(RESULTS)], check=True)


if __name__ == "__main__":
    main()
