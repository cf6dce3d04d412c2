"""All cases of the coverage run, and the look-up of one by its name."""

from __future__ import annotations

from benchmarks.coverage import hf, own
from benchmarks.coverage.case import Case

CASES: tuple[Case, ...] = (*hf.CASES, *own.CASES)


def find(name: str) -> Case:
    """Return the case of a name.

    Raises:
        KeyError: there is none.
    """
    return {case.name: case for case in CASES}[name]
