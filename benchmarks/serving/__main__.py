"""Compare serving with peers: ``python -m benchmarks.serving``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.serving import report
from benchmarks.serving.contestants import contestants
from benchmarks.serving.loads import missing_tools
from benchmarks.serving.models import SPECS, model
from benchmarks.serving.processes import LOAD_CORE, system_call_us
from benchmarks.serving.rounds import Plan, Run
from ingot.runtime.machine import devices

ROUNDS = 3
BUILD = Path("build/serving")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, and write the results with their page and plots."""
    options = _options()
    if tools := missing_tools():
        raise SystemExit(f"{', '.join(tools)} not found; run python -m benchmarks.serving.install")
    peers, absent = _peers(options)
    for name in options.models:
        model(name, options.build)
    about = {"machine": devices.describe(), "command": _command(options)}
    about["a system call"] = f"{system_call_us():.2f} us"
    about |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **report.versions(options.build, peers)}
    os.sched_setaffinity(0, {LOAD_CORE})
    if options.quick:
        plan = Plan(options.build, peers, options.models, 1, 0.5, 1.0)
    else:
        plan = Plan(options.build, peers, options.models, options.rounds)
    run = Run(plan)
    for number in range(plan.rounds):
        run.round(number)
    found = {"generated": "by python -m benchmarks.serving; do not edit", "about": about, "failures": run.failures}
    found["absent"] = {**absent, **{name: _reason(why) for name, why in run.absent.items()}}
    found["about"] = {key: value for key, value in about.items() if key not in run.absent}
    options.out.mkdir(parents=True, exist_ok=True)
    records = "[\n" + ",\n".join(json.dumps(record) for record in run.records) + "\n]"
    head = json.dumps(found, indent=1)[:-2]
    (options.out / "serving.json").write_text(f'{head},\n "records": {records}\n}}\n')
    report.write(options.out)
    print((options.out / "serving.md").read_text())
    if run.failures:
        raise SystemExit(f"{len(run.failures)} contestants failed; see the page")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    names = list(contestants())
    parser.add_argument("--peers", type=_names(names), default=names, help="comma-separated; Ingot always takes part")
    parser.add_argument("--models", type=_names([*SPECS]), default=[*SPECS], help="comma-separated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one short round: that it works, not what it finds")
    parser.add_argument("--build", type=Path, default=BUILD, help="models and environments")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.build = options.build.absolute()
    return options


def _command(options: argparse.Namespace) -> str:
    """Return the command without the folders of this machine."""
    given = [f"--{key} {','.join(value)}" for key, value in (("peers", options.peers), ("models", options.models))]
    whole = (options.peers == list(contestants()), options.models == list(SPECS))
    parts = [part for part, all_of_them in zip(given, whole, strict=True) if not all_of_them]
    parts += ["--quick"] if options.quick else [] if options.rounds == ROUNDS else [f"--rounds {options.rounds}"]
    return " ".join(["python -m benchmarks.serving", *parts])


def _reason(log: str) -> str:
    """Return the most informative line of a log: the last that names an error."""
    return next((line for line in reversed(log.splitlines()) if "Error: " in line), log.splitlines()[0])


def _peers(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the contestants that can run, and the others with the reason."""
    wanted = [name for name in contestants() if name in options.peers or name == "ingot"]
    missing = {name: contestants()[name].missing(options.build) for name in wanted}
    for name, why in missing.items():
        if why:
            print(f"{name} is left out: {why}", file=sys.stderr)
    return [name for name in wanted if not missing[name]], {name: why for name, why in missing.items() if why}


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        given = re.split(",(?! )", text)  # a name may contain a comma and a blank
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(known)}")
        return given

    return parse


if __name__ == "__main__":
    main()
