"""Compare models in engine processes with models in the server's: ``python -m benchmarks.serving.isolation``.

The table shows the figures of ``--isolate all`` divided by those of ``--isolate none``.
"""

from __future__ import annotations

import argparse

from benchmarks.serving.contestants import Ingot
from benchmarks.serving.loads import WrongAnswer
from benchmarks.serving.models import SPECS
from benchmarks.serving.pairs import compare, options


def main() -> None:
    """Measure, and print the ratios."""
    parsed = options(argparse.ArgumentParser(prog="python -m benchmarks.serving.isolation"), tuple(SPECS))
    everything, nothing = (Ingot(kind, options=("--isolate", kind)) for kind in ("all", "none"))
    compare(everything, nothing, parsed)


if __name__ == "__main__":
    try:
        main()
    except WrongAnswer as error:
        raise SystemExit(str(error)) from error
