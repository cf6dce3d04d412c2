"""ONNX Runtime: the model as it is, and quantized by its own tools as their manual shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.quant.ways import Array, CaseFolder, Run


def prepare(case: CaseFolder, folder: Path, way: str, budget: str) -> None:
    """Write ``model.onnx`` by the way of this name; nothing is searched, so the budget is unused."""
    if way == "ort":
        (folder / "model.onnx").write_bytes(case.model.read_bytes())
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    clean = folder / "clean.tmp"
    try:
        quant_pre_process(str(case.model), str(clean))
    except Exception:  # noqa: BLE001 - on some graphs symbolic shapes raise any error; the manual says to skip them
        quant_pre_process(str(case.model), str(clean), skip_symbolic_shape=True)
    target = str(folder / "model.onnx")
    if way == "ort-dynamic":
        quantize_dynamic(str(clean), target)
    elif way == "ort-static":
        quantize_static(str(clean), target, _Reader(case))
    else:  # ort-static-u8s8
        quantize_static(str(clean), target, _Reader(case), activation_type=QuantType.QUInt8, per_channel=True)
    clean.unlink()


def load(case: CaseFolder, folder: Path, way: str, threads: int) -> Run:
    return load_file(folder / "model.onnx", threads)


def load_file(path: Path, threads: int) -> Run:
    """Return a function that runs a model in ONNX Runtime, with defaults except for the number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    session: Any = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))


class _Reader:
    """Batches of 32 calibration rows, with the method of ONNX Runtime's ``CalibrationDataReader``."""

    def __init__(self, case: CaseFolder):
        self._batches: Iterator[dict[str, Array]] = iter(case.calibration(32))

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)
