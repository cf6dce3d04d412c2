"""Push and pull of a large archive: ``python -m benchmarks.model_store.transfer [--megabytes N] [--rounds N]``.

Compared, as commands and in turn: ``ingot``, ``skopeo`` and ``cp``, with Debian's docker-registry on this machine. Each
push finds an empty registry, each pull an empty folder, and what was written before is on the disk already.
"""

from __future__ import annotations

import argparse
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
from statistics import median

from ingot.model_store import Archive, BlobFolder, Store, add_variant, manifest
from ingot.runtime import devices
from tests.model_store.registry.servers import docker_registry
from tests.model_store.samples import GOLDEN, serving

RESULTS = Path(__file__).parent / "results"
TENSORS, TUNED = 80, 4
"""Of so many equal tensors, a fine-tuned version has so many anew."""
WAYS = {
    "cp": "`cp` of the archive file",
    "skopeo push": "skopeo, layout to registry",
    "ingot push": "`ingot push`, store to registry",
    "skopeo pull": "skopeo, registry to layout",
    "ingot pull": "`ingot pull`, registry to store",
}
NAME = "bench/tiny"


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
    """Run a command, with what was written before on the disk, and return how long it took."""
    os.sync()
    began = time.perf_counter()
    environment = {**os.environ, "INGOT_HOME": str(home)}
    subprocess.run([str(part) for part in command], check=True, capture_output=True, env=environment)
    return time.perf_counter() - began


def measure(folder: Path, megabytes: int, rounds: int, program: str) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each way, and how much the registry grew by the fine-tuned version, as a share of it."""
    home = folder / "home"
    first, tuned = archives(BlobFolder(folder / "made"), megabytes * 1_000_000)
    for number, archive in enumerate((first, tuned), 1):
        Store(home).push(archive, f"tiny:{number}")
    first.save(folder / "tiny.ingot")
    shutil.rmtree(folder / "made")
    subprocess.run(_skopeo(f"oci-archive:{folder}/tiny.ingot:tiny", f"oci:{folder}/layout:1"), check=True)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    share = 0.0
    for _ in range(rounds + 1):  # the first fills caches
        _push_and_pull(folder, home, program, times)
        with _Registry(folder / "registry", program) as (port, data):
            seconds(_ingot("push", "tiny:1", f"oci://127.0.0.1:{port}/{NAME}:1"), home)
            before = size_of(data)
            seconds(_ingot("push", "tiny:2", f"oci://127.0.0.1:{port}/{NAME}:2"), home)
            share = (size_of(data) - before) / tuned.size
    return {way: values[1:] for way, values in times.items()}, share


def _push_and_pull(folder: Path, home: Path, program: str, times: dict[str, list[float]]) -> None:
    def run(way: str, command: Sequence[str | Path], into: Path, root: Path = home) -> None:
        times[way].append(seconds(command, root))
        shutil.rmtree(into) if into.is_dir() else into.unlink(missing_ok=True)

    nothing = folder / "nothing"
    with _Registry(folder / "registry", program) as (port, _):
        target = f"docker://127.0.0.1:{port}/{NAME}:1"
        run("skopeo push", _skopeo(f"oci:{folder}/layout:1", target, "--dest-tls-verify=false"), nothing)
    with _Registry(folder / "registry", program) as (port, _):
        target = f"127.0.0.1:{port}/{NAME}:1"
        run("ingot push", _ingot("push", "tiny:1", f"oci://{target}"), nothing)
        pulled = folder / "pulled"
        run("skopeo pull", _skopeo(f"docker://{target}", f"oci:{pulled}:1", "--src-tls-verify=false"), pulled)
        run("ingot pull", _ingot("pull", f"oci://{target}"), pulled, pulled)
    run("cp", ["cp", folder / "tiny.ingot", folder / "copy"], folder / "copy")


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


def _ingot(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ingot", *arguments]


def _skopeo(source: str, target: str, *options: str) -> list[str]:
    return ["skopeo", "copy", "--quiet", "--all", "--preserve-digests", *options, source, target]


def markdown(times: dict[str, list[float]], share: float, megabytes: int, machine: str) -> str:
    """Return the run as a page. Times are ratios: seconds of one machine tell nothing on another."""
    lines = [
        "# Push and pull",
        "",
        "Generated by `python -m benchmarks.model_store.transfer`; do not edit.",
        "",
        machine,
        f"An archive of {megabytes} MB in {TENSORS} tensors; docker-registry on the same machine. Medians over rounds",
        "in which all ways are run in turn, as commands: their start is in them. Ingot checks each digest, as skopeo",
        "does, and waits until what it pulled is on the disk, which neither skopeo nor `cp` does.",
        "",
        "| way | ratio to cp | ratio to skopeo |",
        "| --- | --- | --- |",
    ]
    for way, title in WAYS.items():
        base = median(times[way.replace("ingot", "skopeo")])
        to_skopeo = "" if way == "cp" else f"{median(times[way]) / base:.2f}"
        lines.append(f"| {title} | {median(times[way]) / median(times['cp']):.1f} | {to_skopeo} |")
    shared = 1 - TUNED / TENSORS
    lines += ["", f"A fine-tuned version that shares {shared:.0%} of its tensors moves {share:.1%} of its bytes.", ""]
    return "\n".join(lines)


def about() -> str:
    tool = subprocess.run(["skopeo", "--version"], check=True, capture_output=True, text=True).stdout.split()[2]
    return f"machine {devices.describe()}; python {platform.python_version()}; httpx {version('httpx')}; skopeo {tool}."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_store.transfer", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300, help="size of the archive")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way, in turn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the page")
    options = parser.parse_args()
    program = shutil.which("docker-registry")
    if program is None or shutil.which("skopeo") is None:
        raise SystemExit("this needs docker-registry and skopeo: make tools")
    with tempfile.TemporaryDirectory() as folder:
        times, share = measure(Path(folder), options.megabytes, options.rounds, program)
    page = markdown(times, share, options.megabytes, about())
    print(page)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "transfer.md").write_text(page)


if __name__ == "__main__":
    main()
