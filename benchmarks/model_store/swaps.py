"""Compare-and-swap of one alias by ten processes: ``python -m benchmarks.model_store.swaps [--seconds 5]``.

Beside it, in the same run and in turn, the limit: ten processes that do nothing but take the same lock, replace a file
of the same size with ``fsync``, as the store does to survive a power cut, and append a line to a log with ``fsync``.
Every swap is checked: the log must tell an unbroken chain, one winner each.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from ingot.errors import TagMoved
from ingot.model_store import Store
from ingot.model_store.files import atomic_file
from tests.model_store.samples import archive

WRITERS = 10
ROUNDS = 3


def swap(root: Path, seconds: float) -> tuple[int, int]:
    """Return how many swaps one writer won and lost."""
    store, won, lost = Store(root), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tags = store.tags("tiny")
        target = "1" if tags["prod"] == tags["2"] else "2"
        try:
            store.promote(f"tiny:{target}", "prod", expect=tags["prod"])
            won += 1
        except TagMoved:
            lost += 1
    return won, lost


def replace(root: Path, seconds: float) -> tuple[int, int]:
    """Return how often one writer replaced the file."""
    content, line, done = bytes(700), bytes(300), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with atomic_file(root / "file", durable=True) as stream:
                stream.write(content)
            with (root / "log").open("ab") as log:
                log.write(line)
                log.flush()
                os.fsync(log.fileno())
        done += 1
    return done, 0


def check(root: Path) -> int:
    """Return how many swaps the log tells; raises if its chain is broken."""
    moves = [move for move in Store(root).history("tiny") if move.tag == "prod"]
    for before, move in itertools.pairwise(moves):
        if move.old != before.new:
            raise SystemExit(f"a swap was lost: {before} is followed by {move}")
    return len(moves) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each round is")
    seconds = parser.parse_args().seconds
    rates: dict[str, list[float]] = {"swaps": [], "limit": []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(WRITERS) as pool:
        for number in range(ROUNDS):
            root, bare = Path(folder) / f"store{number}", Path(folder) / f"bare{number}"
            bare.mkdir()
            store = Store(root)
            for tag, graph in (("1", b"one"), ("2", b"two")):
                store.push(archive(graph), f"tiny:{tag}")
            store.promote("tiny:1", "prod")
            results = pool.starmap(swap, [(root, seconds)] * WRITERS)
            won, lost = (sum(column) for column in zip(*results, strict=True))
            if check(root) != won:
                raise SystemExit(f"{won} swaps were won, the log tells {check(root)}")
            rates["swaps"].append(won / seconds)
            shares.append(won / (won + lost))
            limit = pool.starmap(replace, [(bare, seconds)] * WRITERS)
            rates["limit"].append(sum(done for done, _ in limit) / seconds)
    ratio = median(mine / limit for mine, limit in zip(rates["swaps"], rates["limit"], strict=True))
    print(f"{WRITERS} writers: {median(rates['swaps']):.0f} swaps/s won, {ratio:.2f} of the bare lock, replace and log")
    print(f"{median(shares):.0%} of the attempts won; no swap lost in {ROUNDS} rounds of {seconds:g} s")


if __name__ == "__main__":
    main()
