"""Compare two sets of options of the server: ``python -m benchmarks.serving.options isolate=all isolate=none``.

The table shows the figures of the first divided by those of the second.
"""

from __future__ import annotations

import argparse

from benchmarks.serving.contestants import Ingot
from benchmarks.serving.loads import WrongAnswer
from benchmarks.serving.models import SPECS
from benchmarks.serving.pairs import compare, options


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.options")
    text = "options without their dashes, separated by blanks; '' for none"
    parser.add_argument("one", nargs="?", default="isolate=all", help=text)
    parser.add_argument("other", nargs="?", default="isolate=none")
    parsed = options(parser, tuple(SPECS))
    compare(Ingot("one", options=_dashed(parsed.one)), Ingot("other", options=_dashed(parsed.other)), parsed)


def _dashed(given: str) -> tuple[str, ...]:
    return tuple(f"--{option}" for option in given.split())


if __name__ == "__main__":
    try:
        main()
    except WrongAnswer as error:
        raise SystemExit(str(error)) from error
