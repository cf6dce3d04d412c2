"""The time that Ingot takes to start, compared with its dependencies: ``python -m benchmarks.startup``.

Every command runs as a fresh process, all of them in turn, and the medians are reported with their ratio to a bare
interpreter, so that a noisy machine disturbs all alike.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from rich.console import Console
from rich.table import Table

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import ingot": ["-c", "import ingot"],
    "ingot --help": ["-m", "ingot", "--help"],
    "ingot.Client": ["-c", "import ingot; ingot.Client"],
    "import ingot.server.main (what serve imports)": ["-c", "import ingot.server.main"],
    "import fastapi, httptools, grpc": ["-c", "import fastapi, httptools, grpc"],
    "import onnxruntime": ["-c", "import onnxruntime"],
    "import torch": ["-c", "import torch"],
}
RUNS = 9


def seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(RUNS + 1):
        for name, arguments in COMMANDS.items():
            took = seconds(arguments)
            if run:  # the first fills the file cache
                times[name].append(took)
    base = median(times["python -c pass"])
    table = Table("command", "median", "ratio to a bare interpreter", title=f"Start-up, {RUNS} runs each, in turn")
    for name, measured in times.items():
        table.add_row(name, f"{median(measured) * 1e3:.0f} ms", f"{median(measured) / base:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
