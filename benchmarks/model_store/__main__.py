"""All benchmarks of the store, one after the other: ``python -m benchmarks.model_store``. Some ten minutes."""

from __future__ import annotations

import subprocess
import sys

PARTS = ("load", "transfer", "swaps")


def main() -> None:
    for part in PARTS:
        subprocess.run([sys.executable, "-m", f"benchmarks.model_store.{part}"], check=True)


if __name__ == "__main__":
    main()
