"""Peak memory of quantizing a large model, as a multiple of its weights: ``python -m benchmarks.quant.memory``.

The model is exported first; each recipe then runs in its own process, while a thread samples its resident memory,
including mapped weights. The figure is the memory that quantizing adds to a process that has imported
PyTorch and the ONNX tools.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WIDTH = 4096  # that of benchmarks.export_memory.Layers
RECIPES = ("weight-int4", "weight-int8", "dynamic-int8", "static-int8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quant.memory", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.2, help="size of the weights in GiB")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _quantize(options.child, options.recipes)  # a child has one recipe
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "large.ingot"
        _export(options.gib, archive)
        for recipe in options.recipes.split(","):
            command = [sys.executable, "-m", __spec__.name, "--child", str(archive), "--recipes", recipe]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)


def _export(gib: float, out: Path) -> None:
    from benchmarks.export_memory import Layers
    from ingot.export import export_model

    model = Layers(max(1, round(gib * 16))).eval()  # 16 layers are 1 GiB
    export_model(model, inputs=f"x:float32[batch,{WIDTH}]", name="large").save(out)


def _quantize(archive: Path, recipe: str) -> None:
    from benchmarks.export_memory import Watch, resident
    from ingot.model_store import Archive
    from ingot.quant import QuantConfig, quantize
    from ingot.quant.config import RECIPES as KINDS

    samples = np.random.default_rng(0).standard_normal((64, WIDTH)).astype(np.float32)
    weights = Archive.open(archive).variant().size
    start = resident()
    watch = Watch()
    watch.start()
    config = QuantConfig(recipe=KINDS[recipe](), force=True, batches=(1,))
    result = quantize(archive, {"x": samples}, config=config, progress=watch.begin)
    watch.end()
    stage = max(watch.peaks, key=lambda name: watch.peaks[name])
    peak = (watch.peaks[stage] - start) / weights
    share = next(item for item in result.variants if item.serving.recipe is not None).size / weights
    print(f"{recipe}: peak {peak:.2f}x the weights ({weights / 2**20:.0f} MiB), in stage: {stage}; result {share:.2f}x")


if __name__ == "__main__":
    main()
