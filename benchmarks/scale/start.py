"""Start to first answer of a model in a registry: ``python -m benchmarks.scale.start [--megabytes N] [--rounds N]``.

A new replica, ``ingot serve oci://...`` with an empty store, is compared in turn with ``cp`` of the archive file, with
a second replica that shares its store, and with a model of some kB, which shows the start of a server. Debian's
docker-registry runs on this machine, files are in the page cache, and each first answer is compared with numpy's. A
replica is settled when its packed weights serve, with the derived cache built by itself, or brought along from another
store, as a registry could bring it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

import ingot
from benchmarks.model_store.common import Layers
from benchmarks.model_store.page import about, finish, ratios, spread, table
from benchmarks.model_store.processes import _RESULT
from benchmarks.serving.processes import served
from ingot.model_store import BlobFolder
from tests.model_store.registry.servers import docker_registry

DEADLINE = 300.0
TITLES = {
    "cp": "`cp` of the archive file",
    "cp sync": "`cp`, then `sync` of the copy",
    "tiny": "new replica of a model of some kB",
    "new": "new replica, empty store",
    "brought": "new replica, empty store but for a derived cache that was brought along",
    "shared": "second replica, same store",
}

Times = dict[str, list[float]]


class Bench:
    """A model in a registry, and as a file."""

    def __init__(self, layers: Layers, folder: Path, registry: str):
        self.layers, self.folder, self.registry = layers, folder, registry
        self.tiny = Layers(0, 64, "tiny")
        self.answers = {}
        for model in (layers, self.tiny):
            model.archive(BlobFolder(folder / model.name)).save(folder / f"{model.name}.ingot")
            push = [sys.executable, "-m", "ingot", "copy", str(folder / f"{model.name}.ingot"), self.source(model)]
            subprocess.run(push, check=True, capture_output=True)
            self.answers[model.name] = model.answer(model.inputs(1))
        self.file = folder / f"{layers.name}.ingot"
        self.first: Times = {}
        self.settled: Times = {}

    def source(self, model: Layers) -> str:
        return f"{self.registry}/bench/{model.name}:1"

    def round(self) -> None:
        self._copy()
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            one, two = Path(place) / "one", Path(place) / "two"
            self._start("tiny", Path(place) / "tiny", None, self.tiny)
            self._start("new", one, "built")
            self._start("shared", one, "hit")
            two.mkdir()
            shutil.copytree(one / "derived", two / "derived")
            self._start("brought", two, "hit")

    @property
    def derived_share(self) -> float:
        """The bytes of the derived cache, divided by those of the archive."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            self._start("", Path(place), "built")
            return sum(each.stat().st_size for each in Path(place).glob("derived/**/*") if each.is_file()) / self.size

    @property
    def size(self) -> int:
        return self.file.stat().st_size

    def _copy(self) -> None:
        copy = self.folder / "copy"
        os.sync()
        began = time.perf_counter()
        subprocess.run(["cp", self.file, copy], check=True)
        self._note(self.first, "cp", began)
        subprocess.run(["sync", copy], check=True)
        self._note(self.first, "cp sync", began)
        copy.unlink()

    def _start(self, kind: str, store: Path, result: str | None, model: Layers | None = None) -> None:
        """Start a server, time its first answer and until its packed weights serve, and check both answers."""
        model = model or self.layers
        os.sync()
        began = time.perf_counter()
        arguments = [self.source(model), "--store", str(store), "--management", "off"]
        with served(arguments) as (addresses, _), ingot.Client(addresses["http"]) as client:
            self._check(client, model)
            self._note(self.first, kind, began)
            if result is None:
                return
            while not (found := _RESULT.findall(client.metrics())):
                if time.perf_counter() - began > DEADLINE:
                    raise SystemExit("the server did not settle")
                time.sleep(0.02)
            self._note(self.settled, kind, began)
            if found != [result]:
                raise SystemExit(f"the derived cache had {found} where {result} was to be measured")
            self._check(client, model)

    def _check(self, client: ingot.Client, model: Layers) -> None:
        answer, expected = client.infer(model.name, {"x": model.inputs(1)})["y"], self.answers[model.name]
        if not np.allclose(answer, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max())):
            raise SystemExit("an answer differs from numpy's")

    def _note(self, times: Times, kind: str, began: float) -> None:
        if kind:
            times.setdefault(kind, []).append(time.perf_counter() - began)


def page(bench: Bench, share: float, options: argparse.Namespace) -> str:
    cp, new = bench.first["cp"], bench.first["new"]
    kinds = [kind for kind in TITLES if kind in bench.first]
    rows = [
        [
            TITLES[kind],
            spread(ratios(bench.first[kind], cp)),
            spread(ratios(bench.first[kind], bench.first["cp sync"])),
            spread(ratios(bench.first[kind], new)),
            spread(ratios(bench.settled[kind], new)) if kind in bench.settled else "",
        ]
        for kind in kinds
    ]
    head = ["", "to `cp`", "to `cp` and `sync`", "to a new replica", "until settled, to a new replica's first answer"]
    return "\n".join(
        [
            "# Start to first answer",
            "",
            f"A model of {bench.size / 1e6:.0f} MB in {bench.layers.count} layers, in a registry on the same machine. "
            "Times of a round, divided by those of the same round; the median, with the least and the most.",
            "",
            *table(head, rows),
            "",
            f"The derived cache has {share:.2f} times the bytes of the archive.",
            "",
            about(options, onnxruntime=version("onnxruntime"), python=platform.python_version()),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    program = shutil.which("docker-registry")
    if program is None:
        raise SystemExit("docker-registry is not installed")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "registry").mkdir()
        port = stack.enter_context(docker_registry(program, folder / "registry"))
        bench = Bench(Layers(options.megabytes), folder, f"oci://127.0.0.1:{port}")
        share = bench.derived_share
        for _ in range(options.rounds):
            bench.round()
        finish(page(bench, share, options), "start.md", options.out)


if __name__ == "__main__":
    main()
