"""Ingot: export, then automatic quantization; run by the engine that the server runs."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.quant import case as cases
from benchmarks.quant.ways import CaseFolder, Run
from ingot.export import export_model
from ingot.model_store import Archive
from ingot.quant import quantize
from ingot.runtime import load_engine

ARCHIVE = "model.ingot"


def prepare(case: CaseFolder, folder: Path, way: str, budget: str) -> None:
    found = next(item for item in cases.CASES if item.name == case.content["name"])
    example = {name: torch.from_numpy(array[:2]) for name, array in case.calibration(2)[0].items()}
    module = found.module(case.path / "weights.pth")
    archive = export_model(module, example, inputs=found.inputs, output_names=["output"], name=found.name)
    ingot_auto(found, archive, case.path / "calibration.npz", budget).save(folder / ARCHIVE)


def ingot_auto(case: cases.Case, archive: Archive, data: Path, budget: str) -> Archive:
    """Return the archive with the variant that Ingot chooses for the case's metric and what may be lost."""
    # HOOK for the automatic search: metric `accuracy:labels=y` with a largest drop of cases.DROP, or the agreement of
    # outputs with 1 - cases.COSINE; `budget` is the time that the search may take.
    return quantize(archive, data)


def load(case: CaseFolder, folder: Path, way: str, threads: int) -> Run:
    variant = Archive.open(folder / ARCHIVE).variants[0]
    engine = load_engine(variant.path(), format=variant.serving.format, device="cpu", threads=threads, allow_code=True)
    return lambda inputs: list(engine.run(inputs).values())
