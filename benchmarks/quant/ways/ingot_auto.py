"""Ingot: export, then automatic quantization.

Where ONNX Runtime is the chosen engine, the model runs with its default settings, as the other ways' models do; Ingot's
server sets it not to spin, which costs very small models some of their speed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.quant import case as cases
from benchmarks.quant import judge
from benchmarks.quant.ways import INGOT_ORT, CaseFolder, Run, ort
from benchmarks.quant.worker import THREADS
from ingot.cli.output import seconds
from ingot.export import export_model
from ingot.model_store import Archive, BlobFolder
from ingot.quant import QuantConfig, run
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.loader import precision_of

ARCHIVE = "model.ingot"


def prepare(case: CaseFolder, folder: Path, way: str, budget: str) -> None:
    found = next(item for item in cases.CASES if item.name == case.content["name"])
    example = {name: torch.from_numpy(array[:2]) for name, array in case.calibration(2)[0].items()}
    module = found.module(case.path / "weights.pth")
    archive = export_model(module, example, inputs=found.inputs, output_names=["output"], name=found.name)
    labelled = found.metric == "accuracy"
    config = QuantConfig(
        metric="accuracy:labels=y" if labelled else None,
        max_drop=judge.DROP if labelled else 1 - judge.COSINE,
        threads=THREADS,
        engines=("onnxruntime",) if way == INGOT_ORT else None,
        budget=seconds("--budget", budget),
    )
    result = run(archive, case.path / "calibration.npz", config=config)
    # The chosen variant alone, so that its size is what is counted.
    blobs = BlobFolder(folder / "model")
    chosen = result.archive.copy_to(BlobFolder.scratch()).variants[0]
    for descriptor in (*chosen.manifest.layers, chosen.manifest.config, chosen.descriptor):
        if descriptor.media_type.endswith("weight.v1.raw"):
            blobs.copy(chosen.blobs, descriptor)
    result.archive.save(folder / ARCHIVE)
    (folder / "report.txt").write_bytes(chosen.document("quantization.txt") or b"unchanged")


def load(case: CaseFolder, folder: Path, way: str, threads: int) -> Run:
    variant = Archive.open(folder / ARCHIVE).unpacked().variants[0]
    if variant.serving.requires["engine"] == "onnxruntime":
        return ort.load_file(variant.path(), threads)
    precision = precision_of(variant)
    engine = load_engine(
        EngineSpec(variant.path(), device="cpu", threads=threads, engine="openvino", precision=precision)
    )
    return lambda inputs: list(engine.run(inputs).values())
