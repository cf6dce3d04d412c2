"""One way in its own process: ``python -m benchmarks.quant.worker WAY CASE_FOLDER FOLDER [--prepare BUDGET]``.

With ``--prepare`` it makes the model. Otherwise it loads the model and runs commands, one JSON object per line:
``time`` (rows, calls) is answered with seconds, ``predict`` (rows per call, a file to write) with nothing. It ends with
its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quant.ways import WAYS, CaseFolder, Run

THREADS = 2


def main() -> None:
    name, case, folder = sys.argv[1], CaseFolder(Path(sys.argv[2])), Path(sys.argv[3])
    module = WAYS[name].load_module()
    if "--prepare" in sys.argv:
        module.prepare(case, folder, name, sys.argv[-1])
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of libraries apart from the answers
    run = module.load(case, folder, name, THREADS)
    inputs = case.inputs("held_out")
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_obey(run, inputs, json.loads(line))), file=answers, flush=True)


def _obey(run: Run, inputs: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    rows = command["rows"]
    if command["do"] == "predict":
        count = len(next(iter(inputs.values())))
        parts = [run({name: array[at : at + rows] for name, array in inputs.items()}) for at in range(0, count, rows)]
        np.save(command["to"], np.concatenate([part[0] for part in parts]))
        return {}
    batch = {name: array[:rows] for name, array in inputs.items()}
    run(batch)  # wakes threads and caches; not counted
    seconds = []
    for _ in range(command["calls"]):
        start = time.perf_counter()
        run(batch)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


if __name__ == "__main__":
    main()
