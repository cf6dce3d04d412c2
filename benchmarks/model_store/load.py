"""Load, memory and latency of a served model: ``python -m benchmarks.model_store.load [--megabytes N] [--out FOLDER]``.

Three ways are compared, in turn and in separate processes: ONNX Runtime on one protobuf file; an archive of the store,
loaded without the derived cache; the same with it. Files are in the page cache when they are loaded, or dropped from
it; the derived cache is filled, or does not exist yet. Every answer is compared with that of the protobuf file.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.model_store.common import BATCHES, Layers
from benchmarks.model_store.page import about, finish, ratios, spread, table
from benchmarks.model_store.processes import PROCESSES, Process, Worker, check, forget, memory, serving
from benchmarks.model_store.worker import WAYS
from ingot.model_store import BlobFolder, Store

MEMORY_ROUNDS = 3
PHASES = ("loaded", "first", "settled")
WARM, COLD = " warm", " cold"
FIRST = "first start"
TITLES = {
    "protobuf": "ONNX Runtime, one protobuf file",
    "plain": "archive, `--no-derived-cache`",
    "ingot": "archive",
    "early": "archive, until packed weights serve",
    "plain served": "`ingot serve --no-derived-cache`",
    "served": "`ingot serve`",
}


@dataclass
class Found:
    """Measurements, one value per round.

    ``loads``: by way and state of the files, seconds until the model is loaded, has answered once, and serves for good.
    ``calls``: by way and rows, seconds. ``one`` and ``shared``: by way, the memory of one process, divided by the size
    of the weights, and that of several, divided by that of one.
    """

    loads: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    calls: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    one: dict[str, list[float]] = field(default_factory=dict)
    shared: dict[str, list[float]] = field(default_factory=dict)


class Bench:
    """A model as a file and in a store, in ``folder``."""

    def __init__(self, layers: Layers, folder: Path):
        self.layers = layers
        self.folder = folder
        self.protobuf = layers.save(folder / "model.onnx")
        self.store = Store(folder / "store")
        self.store.push(layers.archive(BlobFolder(folder / "archive")), "layers:1")
        with contextlib.closing(Worker("protobuf", self.protobuf, layers.width)) as worker:
            self.expected = worker.answers[0]

    def start(self, way: str, result: str | None = None) -> Worker:
        """Start a process and check its answers; ``result`` is the expected state of the derived cache."""
        source = self.protobuf if way == "protobuf" else self.store.root
        worker = Worker(way, source, self.layers.width)
        return check(worker, self.expected, result or ("hit" if way == "ingot" else None))

    def empty_cache(self) -> None:
        shutil.rmtree(self.store.root / "derived", ignore_errors=True)

    def measure(self, rounds: int) -> Found:
        found = Found()
        for _ in range(rounds):
            self._load(found)
        self._call(found, 10 * rounds)
        for _ in range(min(rounds, MEMORY_ROUNDS)):
            self._share(found)
        return found

    def _load(self, found: Found) -> None:
        def load(kind: str, start: Callable[[], Worker]) -> None:
            worker = start()
            worker.close()
            found.loads.setdefault(kind, []).append(worker.seconds)

        self.empty_cache()
        load(FIRST, partial(self.start, "ingot", "built"))
        for way in WAYS:
            load(way + WARM, partial(self.start, way))
        for way in WAYS:
            forget(self.folder)
            load(way + COLD, partial(self.start, way))

    def _call(self, found: Found, rounds: int) -> None:
        """Time calls of all ways in turn, so that other load on the machine affects all of them."""
        with contextlib.ExitStack() as stack:
            workers = {way: stack.enter_context(contextlib.closing(self.start(way))) for way in (*WAYS, "early")}
            found.calls = {way: {rows: [] for rows in BATCHES} for way in workers}
            for _ in range(rounds):
                for rows in BATCHES:
                    for way, worker in workers.items():
                        found.calls[way][rows].append(worker.time(rows))

    def _share(self, found: Found) -> None:
        weights = self.layers.count * 4 * self.layers.width**2
        served = partial(serving, self.store.root, self.layers)
        starts: dict[str, Callable[[], Process]] = {
            **{way: partial(self.start, way) for way in WAYS},
            "plain served": partial(served, cached=False),
            "served": partial(served, cached=True),
        }
        for way, start in starts.items():
            one, several = memory(start)
            found.one.setdefault(way, []).append(one / weights)
            found.shared.setdefault(way, []).append(several / one)


def markdown(results: Mapping[Layers, Found], machine: str) -> str:
    """Return the run as a page. Times are shares of the protobuf's, as seconds depend on the machine."""
    lines = [
        "# Loading",
        "",
        "Generated by `python -m benchmarks.model_store.load`; do not edit.",
        "",
        machine,
        "Times are shares of those of ONNX Runtime with one protobuf file in the same state, in the same round: until",
        "the model is loaded (of an archive, with its goldens replayed), has answered once, and serves with packed",
        "weights; then those of a call. Shown are the median of all rounds, and the least and the most. Times exclude",
        "Python's imports. Threads never spin. Every answer was compared with the protobuf's, and every",
        "load with the expected state of the derived cache. In cold rows each process reads the files from the disk.",
        "Memory is the sum of PSS after all has settled: of one process, as a multiple of the weights, and of",
        f"{PROCESSES} processes that serve the model, as a multiple of one.",
    ]
    for layers, found in results.items():
        lines += ["", f"## A multilayer perceptron of {layers.megabytes} MB", "", *_page(found)]
    return "\n".join([*lines, ""])


def _page(found: Found) -> list[str]:
    lines = []
    head = ("", "loaded", "first answer", "packed")
    for title, state in (("files in memory, cache filled", WARM), ("files on the disk, cache filled", COLD)):
        rows = [(TITLES[way], *_load_row(found.loads, way + state, "protobuf" + state)) for way in WAYS]
        if state == WARM:
            rows.append(("archive, first start: the cache is made", *_load_row(found.loads, FIRST, "protobuf" + WARM)))
        lines += [f"### Load, {title}", "", *table(head, rows), ""]
    calls = found.calls
    rows = [
        (TITLES[way], *(spread(_quiet(ratios(calls[way][n], calls["protobuf"][n]))) for n in BATCHES)) for way in calls
    ]
    lines += ["### Calls, by batch size: median, and the middle half", ""]
    lines += [*table(("", *map(str, BATCHES)), rows), "", "### Memory", ""]
    rows = [(TITLES[way], spread(found.one[way]), spread(found.shared[way])) for way in found.one]
    return lines + table(("", "one, to weights", f"{PROCESSES}, to one"), rows)


def _load_row(loads: Mapping[str, Sequence[Mapping[str, float]]], kind: str, base: str) -> list[str]:
    return [
        spread(ratios([item[phase] for item in loads[kind]], [item[phase] for item in loads[base]])) for phase in PHASES
    ]


def _quiet(values: Sequence[float]) -> Sequence[float]:
    """Leave out the quarter with the least and that with the most: single calls are short, and disturbed by others."""
    cut = len(values) // 4
    return sorted(values)[cut : len(values) - cut]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_store.load", description=__doc__)
    parser.add_argument("--megabytes", default="300,1200", help="sizes of the model, with commas")
    parser.add_argument("--rounds", default="5,1", help="rounds of each size, with commas")
    parser.add_argument("--out", type=Path, help="folder to write the page to, too")
    options = parser.parse_args()
    results = {}
    sizes, rounds = ([int(item) for item in text.split(",")] for text in (options.megabytes, options.rounds))
    if len(sizes) != len(rounds):
        parser.error("--megabytes and --rounds must have as many numbers")
    for megabytes, number in zip(sizes, rounds, strict=True):
        layers = Layers(megabytes)
        with tempfile.TemporaryDirectory() as folder:
            results[layers] = Bench(layers, Path(folder)).measure(number)
    machine = about(options, python=platform.python_version(), onnxruntime=version("onnxruntime"))
    finish(markdown(results, machine), "load.md", options.out)


if __name__ == "__main__":
    main()
