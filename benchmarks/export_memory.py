"""Peak memory of an export, as a multiple of the weights: ``python -m benchmarks.export_memory [--gib 1]``.

The export runs in this process while a thread reads its resident memory. The figure is the memory that the export adds
to a process that has imported PyTorch, the model's weights included.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn

from ingot.export import export_model

WIDTH = 4096


class Layers(nn.Module):
    """Square layers of 64 MiB each."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def resident() -> int:
    """Return this process's resident memory in bytes."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


class Watch(threading.Thread):
    """Keeps the largest resident memory of each stage."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stage = "building the module"
        self.peaks: dict[str, int] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), resident())

    def begin(self, stage: str) -> None:
        self.stage = stage

    def end(self) -> None:
        self._done.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    wanted = parser.parse_args().gib
    start = resident()
    watch = Watch()
    watch.start()
    model = Layers(max(1, round(wanted * 16))).eval()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        archive = export_model(model, inputs=f"x:float32[batch,{WIDTH}]", progress=watch.begin)
        watch.begin("saving")
        archive.save(Path(folder) / "model.ingot")
    watch.end()
    for stage, peak in watch.peaks.items():
        print(f"{(peak - start) / weights:5.2f}x the weights  {stage}")
    print(f"{(max(watch.peaks.values()) - start) / weights:5.2f}x the weights at most, of {weights / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
