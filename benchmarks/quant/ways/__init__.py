"""The ways to make a model small and fast that are compared.

A way's module has two functions: ``prepare(case, folder, way, budget)`` makes a model in a folder, and ``load(case,
folder, way, threads)`` returns a function that runs it. Modules of peers run in environments without Ingot, so they
import nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], list[Array]]

BATCHES = (1, 8, 32)
CALIBRATION_ROWS = 300
"""What peers calibrate with: NNCF's default, and "some hundreds" is what the others' manuals ask for."""


@dataclass(frozen=True)
class Way:
    """Attributes:
    module: the file in this folder.
    environment: the file ``requirements-NAME.txt`` that it needs; empty for the benchmark's own.
    files: which of the files that it makes are counted as its size.
    """

    name: str
    title: str
    module: str
    environment: str = ""
    files: str = "*"

    def load_module(self) -> Any:
        return import_module(f"benchmarks.quant.ways.{self.module}")


BASELINE = "ort"
INGOT = "ingot"
INGOT_ORT = "ingot-ort"
"""The search without OpenVINO, which is an extra."""
WAYS = {
    way.name: way
    for way in (
        Way(BASELINE, "ONNX Runtime fp32", "ort"),
        Way(INGOT, "Ingot auto", "ingot_auto", files="model/sha256/*"),
        Way(INGOT_ORT, "Ingot auto, ONNX Runtime alone", "ingot_auto", files="model/sha256/*"),
        Way("ort-static", "ONNX Runtime static, defaults", "ort"),
        Way("ort-static-u8s8", "ONNX Runtime static, u8s8 by channel", "ort"),
        Way("ort-dynamic", "ONNX Runtime dynamic, defaults", "ort"),
        Way("torchao", "torchao PT2E + AOTInductor", "torchao", "torchao", files="model-32.pt2"),
        Way("openvino", "OpenVINO, defaults (bf16 where the CPU has it)", "openvino", "openvino"),
        Way("nncf", "OpenVINO + NNCF", "openvino", "openvino"),
    )
}


@dataclass(frozen=True)
class CaseFolder:
    """What :func:`benchmarks.quant.case.prepare` has made."""

    path: Path

    @property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "case.json").read_text())
        return found

    @property
    def model(self) -> Path:
        return self.path / "model.onnx"

    def inputs(self, part: str) -> dict[str, Array]:
        """Return the inputs of ``calibration`` or ``held_out``, without labels."""
        with np.load(self.path / f"{part}.npz") as arrays:
            return {name: arrays[name] for name in self.content["inputs"]}

    def calibration(self, rows: int) -> list[dict[str, Array]]:
        """Return the calibration inputs in batches."""
        inputs = self.inputs("calibration")
        count = min(CALIBRATION_ROWS, *(len(array) for array in inputs.values()))
        starts = range(0, count, rows)
        return [{name: array[at : min(at + rows, count)] for name, array in inputs.items()} for at in starts]
