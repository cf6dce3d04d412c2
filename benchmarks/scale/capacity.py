"""Compare the capacity that ``ingot deploy capacity --measure`` predicts with that of a live server.

``python -m benchmarks.scale.capacity`` predicts, for each model, the highest rate that holds an objective on one core,
and finds it with ``ingot bench --slo`` from another core. Predictions and live runs alternate; each ratio is of one
round. Two more ratios show what the time outside the engine matters: with the constant of the protocol instead of the
measured one, and without any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import ingot
from benchmarks.serving import models
from benchmarks.serving.docs import updated
from benchmarks.serving.pairs import build_folder
from ingot import demo
from ingot.bench.measurement import Objective
from ingot.deploy.capacity.calibration import Site, measure, pinned, serving
from ingot.deploy.capacity.plan import Plan, Request
from ingot.deploy.capacity.recorded import OVERHEADS
from ingot.deploy.capacity.server import Server, Traffic
from ingot.deploy.capacity.simulation import Overhead
from ingot.errors import IngotError
from ingot.model_store import Store
from ingot.runtime.machine import devices

GOAL = 0.15
_PAGE = Path(__file__).parents[2] / "docs" / "guides" / "deploy" / "capacity.md"
# The objective, and the seconds of each rate that is tried: enough requests for the quantile.
_MODELS = {"digits": ("p99=20ms", 5), "wide": ("p99=50ms", 5), "minilm": ("p95=250ms", 15)}


@dataclass(frozen=True)
class Round:
    """Requests per second: live, 0 if none held the objective, and as predicted by the overhead that was assumed."""

    live: float
    predicted: Mapping[str, float]

    def ratio(self, kind: str) -> float:
        """Return predicted over live."""
        return self.predicted[kind] / self.live


def main() -> None:
    """Measure, and write a table of ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.capacity", description=__doc__)
    parser.add_argument("--models", default=",".join(_MODELS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slo", default="", help="of all models, instead of one for each")
    parser.add_argument("--print", action="store_true", help="write nothing to docs/guides/deploy/capacity.md")
    options = parser.parse_args()
    build = build_folder()
    lines = [f"{devices.describe()}; {options.rounds} rounds:", ""]
    lines.append("| model | objective | predicted / live, median (lowest to highest) | constant | none | within 15 % |")
    lines.append("|---|---|---|---|---|---|")
    for name in options.models.split(","):
        objective, seconds = options.slo or _MODELS[name][0], _MODELS[name][1]
        rounds = [measured(name, objective, seconds, build) for _ in range(options.rounds)]
        lines.append(f"| {name} | {objective} | {_cells([each for each in rounds if each.live], options.rounds)} |")
    print("\n".join(lines))
    if not options.print:
        _PAGE.write_text(updated(_PAGE.read_text(), lines, "capacity"))


def _cells(rounds: Sequence[Round], count: int) -> str:
    if not rounds:
        return f"no rate held it live in {count} rounds | | | "
    found, *others = ([each.ratio(kind) for each in rounds] for kind in ("measured", "constant", "none"))
    kept = sum(abs(ratio - 1) <= GOAL for ratio in found)
    cells = [f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})", *(f"{median(x):.2f}" for x in others)]
    return " | ".join([*cells, f"{kept} of {count}"])


def measured(name: str, objective: str, seconds: int, build: Path) -> Round:
    """Predict and measure once."""
    store = digits_store(build) if name == "digits" else models.model(name, build).store
    site, reference = Site(cores=1, store=store), f"{name}:1"
    server = measure(reference, Store(store).find(reference)[0].unpacked().variant(), site)
    overheads = {"measured": server.overhead, "constant": OVERHEADS["binary"], "none": Overhead()}
    predicted = {kind: _predicted(replace(server, overhead=each), objective) for kind, each in overheads.items()}
    found = Round(_live(reference, objective, seconds, site), predicted)
    rates = ", ".join(f"{kind} {rate:,.0f}/s" for kind, rate in predicted.items())
    print(f"{name}: live {found.live:,.0f}/s; predicted: {rates}; {server}", file=sys.stderr, flush=True)
    return found


def _predicted(server: Server, objective: str) -> float:
    try:
        return Plan(Request(rate=1.0, objective=Objective.parse(objective)), server, Traffic()).capacity
    except IngotError:
        return 0.0  # the objective cannot be held


def _live(reference: str, objective: str, seconds: int, site: Site) -> float:
    """Return the highest rate that holds an objective."""
    own, others = site.split()
    with serving(reference, site, own) as (_, url), pinned(others):
        command = ["bench", url, "model", "--slo", objective, "--seconds", str(seconds), "--json"]
        done = subprocess.run([sys.executable, "-m", "ingot", *command], capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout:
        raise SystemExit(f"ingot bench failed: {done.stderr}")
    return float(json.loads(done.stdout)["highest_rate"] or 0.0)


def digits_store(build: Path) -> Path:
    """Return a store with the model of ``ingot demo`` as ``digits:1``; train it if it does not exist."""
    store = build / "digits-store"
    if "1" not in Store(store).tags("digits"):
        training, _ = demo.load()
        model = demo.train(training)
        archive = ingot.export_model(model, inputs=[demo.INPUT], output_names=["logits"], name="digits")
        Store(store).push(archive, "digits:1")
    return store


if __name__ == "__main__":
    main()
