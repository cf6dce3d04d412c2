"""Export and judge some operators in this process; :mod:`benchmarks.operators.__main__` starts it.

``python -m benchmarks.operators.worker EXPORTER DTYPE SAMPLES SEED SECONDS OPERATOR...`` prints an outcome as each
operator ends. An operator that takes more CPU seconds than that ends the process.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.coverage import exporters
from benchmarks.coverage.judge import Broken
from benchmarks.coverage.verdict import Verdict
from benchmarks.operators.judging import Fault, case, faults
from benchmarks.operators.outcome import MARK, Outcome
from benchmarks.operators.samples import Sample, databases, samples

_PLACES = re.compile(rf"{re.escape(str(Path(__file__).parents[2]))}/|{re.escape(tempfile.gettempdir())}/tmp\w+/")


def without_places(message: str) -> str:
    """Return a message without the folders of this machine, which differ from run to run."""
    return _PLACES.sub("", message)


def outcome(name: str, dtype: torch.dtype, exporter: str, most: int, seed: int) -> Outcome:
    """Export the samples of an operator together, and each alone if they are refused together."""
    began = time.perf_counter()
    result = Outcome(name, str(dtype).removeprefix("torch."), exporter)
    found, left = samples(name, dtype, most, seed)
    for reason in left:
        result.add("unjudged", message=reason)
    if not found and not left:
        result.add("unjudged", message="the database has no sample of up to 65536 elements")
    groups = [found] if found else []
    while groups:
        group = groups.pop()
        groups += _judged(result, group, dtype)
    result.seconds = round(time.perf_counter() - began, 1)
    return result


def _judged(result: Outcome, group: list[Sample], dtype: torch.dtype) -> list[list[Sample]]:
    """Export and judge a group, or return its samples alone if it is refused as a whole."""
    name, exporter = result.operator, result.exporter
    verdict = Verdict(name, "operators", exporter)
    alone = [[sample] for sample in reversed(group)] if len(group) > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        start = exporters.export(case(name, group), verdict, Path(folder))
        if start is None:
            if not alone:
                status = "refused" if verdict.status == "explained" else "unexplained"
                result.add(status, message=f"({group[0].text}): {without_places(verdict.message)}")
            return alone
        try:
            differences = list(faults(name, group, dtype, start, verdict.notes))
        except Broken as error:
            if not alone:
                result.add("crashed", message=f"({group[0].text}): {without_places(str(error))}")
            return alone
    if alone and any(fault.stated for fault in differences):
        return alone  # the note may be about another sample
    for index in range(len(group)):
        _count(result, [fault for fault in differences if fault.sample == index])
    return []


def _count(result: Outcome, differences: Sequence[Fault]) -> None:
    """Count one sample."""
    wrong = [fault for fault in differences if not fault.reasons and not fault.stated]
    bounded = [fault for fault in differences if fault.stated]
    known = {reason for fault in differences for reason in fault.reasons}
    result.accepted += sorted(known - set(result.accepted))
    if wrong:
        result.add("wrong", message=wrong[0].text)
    elif bounded:
        result.add("bounded", message=f"{bounded[0].text}; {bounded[0].stated[0]}")
    else:
        result.add("right")


def main(exporter: str, dtype: str, most: str, seed: str, seconds: str, *names: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (exporters.MEMORY, exporters.MEMORY))
    torch.set_num_threads(1)
    databases()
    gc.collect()
    gc.freeze()  # otherwise each full collection visits the modules and the databases, a fifth of all time
    for name in names:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # ends the process, whatever it does
        result = outcome(name, getattr(torch, dtype), exporter, int(most), int(seed))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"\n{MARK}{json.dumps(asdict(result))}", flush=True)  # a library may have left an unfinished line


if __name__ == "__main__":
    main(*sys.argv[1:])
