"""Compare the scheduler with other policies: ``python -m benchmarks.scheduler_sim``. It runs no engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.scheduler_sim import contest, measure, profiles, report
from ingot.deploy.capacity import traces


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_sim", description=__doc__)
    parser.add_argument("--models", default="", help="names of profiles, apart by commas; all by default")
    parser.add_argument("--trace", type=Path, help="replay this recorded trace instead of made-up traffic")
    parser.add_argument("--scale", type=float, default=1.0, help="how long runs are, as a share of the usual")
    parser.add_argument("--measure", action="append", metavar="NAME=FILE", help="time an ONNX model for its profile")
    parser.add_argument("--out", type=Path, help="where the report goes; printed only, if not given")
    options = parser.parse_args()
    if options.measure:
        measure.measure(options.measure)
        return
    names = options.models.split(",") if options.models else [item.name for item in profiles.PROFILES]
    rows: list[contest.Row] = []
    for profile in profiles.load():
        if profile.name not in names:
            continue
        if options.trace:
            rows += contest.replay(profile, traces.read(options.trace))
        else:
            rows += contest.contest(profile, scale=options.scale)
    about = f"python -m benchmarks.scheduler_sim --models {','.join(names)} --scale {options.scale:g}"
    print(report.page(rows, about))
    if options.out:
        report.keep(rows, about, options.out)


if __name__ == "__main__":
    main()
