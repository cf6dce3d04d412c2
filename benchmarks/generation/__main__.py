"""Tokens per second of a decoder of GPT-2's size: ``python -m benchmarks.generation``.

A GPT-2 of random weights, 124 million, answers the same requests of mixed lengths in four ways, in turn and each alone:
``generate()`` of transformers, one request at a time and in batches of as many as there are clients;
``generate_batch()`` of transformers, which batches continuously; and the archive of the model behind
``/v1/completions``, by clients that each send the next request when the one before is answered. All use the same number
of threads. Some ways have to be named: ``ingot-int8``, the same with weights of 8 bits that ``ingot quantize`` made;
``openvino`` and ``openvino-int8``, OpenVINO GenAI, whose continuous batching gets all requests at once, in its own
environment.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.generation import openvino, served
from benchmarks.generation.load import Rate, asked
from benchmarks.generation.original import WAYS, Original, save

_KINDS: tuple[Callable[[Rate], float], ...] = (lambda rate: rate.clock, lambda rate: rate.cpu)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation")
    parser.add_argument("--ways", default=",".join((*WAYS, "ingot")), help="separated by commas")
    parser.add_argument("--clients", default="16", help="numbers of clients, separated by commas")
    parser.add_argument("--requests", type=int, default=32, help="of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--build", type=Path, default=Path("build/generation"))
    options = parser.parse_args()
    folder, archive = made(options.build.absolute())
    work = asked(options.requests)
    print(f"{len(work)} requests, {sum(each.tokens for each in work)} tokens of answers")
    for clients in map(int, options.clients.split(",")):
        found: dict[str, list[Rate]] = defaultdict(list)
        runs: dict[str, list[served.Run]] = defaultdict(list)
        for _ in range(options.rounds):
            for way in options.ways.split(","):
                name, _, weights = way.partition("-")
                if name == "ingot":
                    variant = quantized(archive, options.threads) if weights else archive
                    runs[way].append(served.run(variant, work, clients, options.threads))
                    found[way].append(runs[way][-1].rate)
                elif name == "openvino":
                    found[way].append(openvino.rate(folder, work, clients, options.threads, weights or "fp32"))
                else:
                    found[way].append(Original(folder, options.threads).rate(way, work, clients))
                print(
                    f"{way}: {found[way][-1].clock:.1f} tokens/s, {found[way][-1].cpu:.1f} per second of CPU time",
                    file=sys.stderr,
                    flush=True,
                )
        print(f"\n{clients} clients, median of {options.rounds} rounds\n")
        print(table(found))
        for way, each in runs.items():
            print(served.described(way, each))


def made(build: Path) -> tuple[Path, Path]:
    """Return the model's folder and its archive, which the first run makes."""
    folder, archive = build / "gpt2", build / "gpt2.ingot"
    build.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        save(folder)
    if not archive.exists():
        subprocess.run([sys.executable, "-m", "ingot", "export", str(folder), "-o", str(archive)], check=True)
    return folder, archive


def quantized(archive: Path, threads: int) -> str:
    """Return the reference of the variant with weights of 8 bits, which the first run makes."""
    path = archive.with_name("gpt2-int8.ingot")
    if not path.exists():
        recipe = ["--recipe", "weight-int8", "--force", "--threads", str(threads)]
        command = [sys.executable, "-m", "ingot", "quantize", str(archive), *recipe, "-o", str(path)]
        subprocess.run(command, check=True)
    return f"{path}#int8"


def table(found: Mapping[str, Sequence[Rate]]) -> str:
    """Return the rates as a table, with this server's over each."""
    clock, cpu = (
        {way: statistics.median(pick(rate) for rate in each) for way, each in found.items()} for pick in _KINDS
    )
    rows = ["| way | tokens/s | ingot over it | tokens/s of CPU time | ingot over it |", "|---|---|---|---|---|"]
    for way in found:
        cells = [f"{rates[way]:.1f} | {_ratio(rates, way)}" for rates in (clock, cpu)]
        rows.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _ratio(rates: Mapping[str, float], way: str) -> str:
    return f"{rates['ingot'] / rates[way]:.2f}" if "ingot" in rates and rates[way] else "-"


if __name__ == "__main__":
    main()
