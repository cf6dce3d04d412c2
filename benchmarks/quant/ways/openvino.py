"""OpenVINO, by itself and with NNCF's post-training quantization."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quant.ways import CaseFolder, Run


def _openvino() -> Any:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it reports its use unasked
    return import_module("openvino")


def prepare(case: CaseFolder, folder: Path, way: str, budget: str) -> None:
    openvino = _openvino()
    model = openvino.Core().read_model(case.model)
    if way == "nncf":
        nncf: Any = import_module("nncf")
        kind = {"model_type": nncf.ModelType.TRANSFORMER} if case.content["transformer"] else {}
        model = nncf.quantize(model, nncf.Dataset(case.calibration(1)), **kind)
    openvino.save_model(model, folder / "model.xml")


def load(case: CaseFolder, folder: Path, way: str, threads: int) -> Run:
    openvino = _openvino()
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(folder / "model.xml", "CPU", settings).create_infer_request()

    def run(inputs: Any) -> list[Any]:
        return [np.array(value) for value in request.infer(dict(inputs)).values()]

    return run
