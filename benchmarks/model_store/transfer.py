"""Push and pull of a large archive: ``python -m benchmarks.model_store.transfer [--megabytes N] [--rounds N]``.

Compares the commands ``ingot``, ``skopeo`` and ``cp`` in turn, with Debian's docker-registry on this machine. Each push
starts with an empty registry and each pull with an empty folder, after earlier writes have reached the disk. The
received bytes are compared with the sent ones. A second version is then sent through a proxy that counts bytes.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.model_store.page import about, finish, ratios, spread, table
from benchmarks.model_store.wire import Wire
from ingot.model_store import Archive, BlobFolder, Store, add_variant
from ingot.model_store.format import manifest
from tests.model_store.registry.servers import docker_registry
from tests.model_store.samples import GOLDEN, archive, serving

TENSORS, TUNED = 80, 4
"""Number of equal tensors, and of those that a fine-tuned version changes."""
DEADLINE = 300
"""Seconds of the longest command."""
WAYS = {
    "cp": ("`cp` of the archive file", None),
    "cp sync": ("`cp` of the archive file, then `sync` of the copy", None),
    "skopeo push": ("skopeo, layout to registry", "skopeo push"),
    "ingot push": ("`ingot copy`, store to registry", "skopeo push"),
    "skopeo pull": ("skopeo, registry to layout", "skopeo pull"),
    "ingot pull": ("`ingot copy`, registry to store", "skopeo pull"),
    "skopeo start": ("skopeo, of an archive of some kB: its start", "skopeo pull"),
    "ingot start": ("`ingot copy` of an archive of some kB: its start", "skopeo pull"),
}
"""The title of each way, and what of skopeo's it is compared with."""
CLIENTS = {"skopeo": "skopeo", "ingot": "`ingot copy`"}
NAME = "bench/tiny"

Times = dict[str, list[float]]
# Of each client, by round: bytes that it sent, and by which the registry grew, as shares of the second version.
Moved = dict[str, list[tuple[float, float]]]


def archives(blobs: BlobFolder, size: int) -> tuple[Archive, Archive]:
    """Return an archive of that many bytes, and one that shares all but a few of its tensors."""
    tensors = [blobs.put(os.urandom(size // TENSORS), manifest.WEIGHT) for _ in range(TENSORS)]
    tuned = [blobs.put(os.urandom(size // TENSORS), manifest.WEIGHT) for _ in range(TUNED)]
    graph = blobs.put(b"a graph", manifest.WEIGHT)
    made = [
        Archive.create(blobs, [add_variant(blobs, serving(), graph, weights, [GOLDEN])])
        for weights in (tensors, [*tuned, *tensors[TUNED:]])
    ]
    return made[0], made[1]


def seconds(command: Sequence[str | Path], home: Path) -> float:
    """Run a command after earlier writes have reached the disk; return its seconds."""
    os.sync()
    began = time.perf_counter()
    environment = {**os.environ, "INGOT_HOME": str(home)}
    subprocess.run([str(part) for part in command], check=True, capture_output=True, env=environment, timeout=DEADLINE)
    return time.perf_counter() - began


class Bench:
    """Two versions of an archive and a small one, in a store, as a file and as layouts, in ``folder``."""

    def __init__(self, folder: Path, megabytes: int, program: str):
        self._folder = folder
        self._program = program
        self._home = folder / "home"
        self._digests = {}
        first, tuned = archives(BlobFolder(folder / "made"), megabytes * 1_000_000)
        self._size = tuned.size
        for tag, made in (("1", first), ("2", tuned), ("small", archive())):
            Store(self._home).push(made, f"tiny:{tag}")
            self._digests[tag] = made.digest
            file = folder / f"{tag}.ingot"
            made.save(file)
            subprocess.run(_skopeo(f"oci-archive:{file}:tiny", self._layout(tag)), check=True, timeout=DEADLINE)
        shutil.rmtree(folder / "made")

    def measure(self, rounds: int) -> tuple[Times, Moved]:
        times: Times = {way: [] for way in WAYS}
        moved: Moved = {client: [] for client in CLIENTS}
        for _ in range(rounds + 1):  # the first fills caches
            self._copy(times)
            self._transfer(times)
            for client, found in moved.items():
                found.append(self._second(client))
        return {way: values[1:] for way, values in times.items()}, {key: values[1:] for key, values in moved.items()}

    def _copy(self, times: Times) -> None:
        source, copy = self._folder / "1.ingot", self._folder / "copy"
        for way, command in (("cp", 'cp "$0" "$1"'), ("cp sync", 'cp "$0" "$1" && sync "$1"')):
            times[way].append(seconds(["sh", "-c", command, source, copy], self._home))
            if not filecmp.cmp(source, copy, shallow=False):
                raise SystemExit(f"{command} copied something else")
            copy.unlink()

    def _transfer(self, times: Times) -> None:
        pulled = self._folder / "pulled"

        def pull(way: str, tag: str, command: Sequence[str | Path], digest: Callable[[], str]) -> None:
            times[way].append(seconds(command, pulled))
            _same(way, digest(), self._digests[tag])
            shutil.rmtree(pulled)

        with _Registry(self._folder / "registry", self._program) as (port, data):
            times["skopeo push"].append(self._push("skopeo", "1", port, data))
        with _Registry(self._folder / "registry", self._program) as (port, data):
            times["ingot push"].append(self._push("ingot", "1", port, data))
            self._push("ingot", "small", port, data)
            for kind, tag in (("pull", "1"), ("start", "small")):
                source = f"127.0.0.1:{port}/{NAME}:{tag}"
                command = _skopeo(f"docker://{source}", f"oci:{pulled}:1", "--src-tls-verify=false")
                pull(f"skopeo {kind}", tag, command, lambda: _digest_of_layout(pulled))
                command = _ingot("copy", f"oci://{source}", "tiny:1")
                pull(f"ingot {kind}", tag, command, lambda: Store(pulled).get("tiny:1").digest)

    def _second(self, client: str) -> tuple[float, float]:
        with _Registry(self._folder / "registry", self._program) as (port, data), Wire(port) as wire:
            self._push(client, "1", wire.port, data)
            before = size_of(data)
            with wire.counted() as sent:
                self._push(client, "2", wire.port, data)
            return sent[0] / self._size, (size_of(data) - before) / self._size

    def _push(self, client: str, tag: str, port: int, data: Path) -> float:
        target = f"127.0.0.1:{port}/{NAME}:{tag}"
        command = (
            _ingot("copy", f"tiny:{tag}", f"oci://{target}")
            if client == "ingot"
            else _skopeo(self._layout(tag), f"docker://{target}", "--dest-tls-verify=false")
        )
        took = seconds(command, self._home)
        link = data / "docker/registry/v2/repositories" / NAME / "_manifests/tags" / tag / "current/link"
        _same(f"{client} push", link.read_text(), self._digests[tag])
        return took

    def _layout(self, tag: str) -> str:
        return f"oci:{self._folder}/layout-{tag}:1"


class _Registry:
    """An empty registry: its port, and the folder of its data, which is removed in the end."""

    def __init__(self, folder: Path, program: str):
        self._folder = folder
        self._running = docker_registry(program, folder)

    def __enter__(self) -> tuple[int, Path]:
        self._folder.mkdir()
        return self._running.__enter__(), self._folder / "data"

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(None, None, None)
        shutil.rmtree(self._folder)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _same(way: str, found: str, expected: str) -> None:
    if found != expected:
        raise SystemExit(f"{way}: {found} arrived where {expected} was sent")


def _digest_of_layout(folder: Path) -> str:
    digest: str = json.loads((folder / "index.json").read_text())["manifests"][0]["digest"]
    return digest


def _ingot(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ingot", *arguments]


def _skopeo(source: str, target: str, *options: str) -> list[str]:
    return ["skopeo", "copy", "--quiet", "--all", "--preserve-digests", *options, source, target]


def markdown(times: Times, moved: Moved, megabytes: int, machine: str) -> str:
    """Return the run as a page. Times are ratios: seconds of one machine do not carry over to another."""
    rows = [
        (title, spread(ratios(times[way], times["cp"]), 1), spread(ratios(times[way], times[base])) if base else "")
        for way, (title, base) in WAYS.items()
    ]
    shares = [
        (CLIENTS[client], *(spread([100 * value for value in column]) for column in zip(*found, strict=True)))
        for client, found in moved.items()
    ]
    lines = [
        "# Push and pull",
        "",
        "Generated by `python -m benchmarks.model_store.transfer`; do not edit.",
        "",
        machine,
        f"An archive of {megabytes} MB in {TENSORS} tensors; docker-registry on the same machine. All ways are run in",
        "turn, as commands: times include the start of the process, which matters more for smaller archives. Shown",
        "are the median of the rounds' ratios, and the least and the most. Ingot checks each digest and waits until",
        "the pulled files are on the disk, as skopeo does and `cp` does not. In every round the received archive had",
        "the digest of the sent one. skopeo also keeps a cache of known blobs outside of the layout: a database that",
        "waits for the disk some 500 times (`fdatasync`) while these blobs are copied, which is part of its times.",
        "",
        *table(("way", "ratio to cp", "ratio to skopeo"), rows),
        "",
        f"A fine-tuned version that shares {1 - TUNED / TENSORS:.0%} of its tensors, pushed after the first one",
        "through a proxy that counts bytes. The registry stores equal blobs once, so its growth alone does not show",
        "how much was sent.",
        "",
        *table(("client", "sent, % of the version", "growth of the registry, %"), shares),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_store.transfer", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300, help="size of the archive")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way, in turn")
    parser.add_argument("--out", type=Path, help="folder to write the page to, too")
    options = parser.parse_args()
    program = shutil.which("docker-registry")
    if program is None or shutil.which("skopeo") is None:
        raise SystemExit("this needs docker-registry and skopeo: make tools")
    with tempfile.TemporaryDirectory() as folder:
        times, moved = Bench(Path(folder), options.megabytes, program).measure(options.rounds)
    tool = subprocess.run(["skopeo", "--version"], check=True, capture_output=True, text=True).stdout.split()[2]
    versions = {"python": platform.python_version(), "httpx": version("httpx"), "skopeo": tool}
    finish(markdown(times, moved, options.megabytes, about(options, **versions)), "transfer.md", options.out)


if __name__ == "__main__":
    main()
