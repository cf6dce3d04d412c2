"""Static int8 by ONNX Runtime's quantizer."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from ingot.errors import InvalidArgument, QuantizationError
from ingot.quant.calibrate import Calibration
from ingot.quant.config import StaticInt8
from ingot.tensors import Array

_METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}


def apply(config: StaticInt8, graph: Path, data: Calibration) -> ir.Model:
    """Return the quantized model.

    Args:
        config: the recipe.
        graph: the floating-point ONNX file; its external data lies beside it.
        data: what ranges are learnt from.

    Raises:
        InvalidArgument: the model is quantized already, or a kept node does not exist.
        QuantizationError: the quantizer fails on the model, or finds nothing in it to quantize.
    """
    nodes = onnx.load(graph, load_external_data=False).graph.node
    if any(node.op_type in ("QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul") for node in nodes):
        raise InvalidArgument("the model is quantized already; quantize the floating-point variant instead")
    names = {node.name for node in nodes}
    unknown = [name for name in config.keep if name not in names]
    if unknown:
        raise InvalidArgument(
            f"there is no node '{unknown[0]}' to keep; some nodes are: {', '.join(sorted(names)[:8])}"
        )
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder, _quiet():
        out = Path(folder) / "quantized.onnx"
        _quantize(
            graph,
            out,
            _Reader(data, config.calibration),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=config.per_channel,
            calibrate_method=_METHODS[config.calibration],
            nodes_to_exclude=list(config.keep),
            use_external_data_format=True,
        )
        model = ir.load(out)
        ir.external_data.load_to_model(model)  # the temporary folder goes
    if not quantized_ops(model):
        raise QuantizationError(
            "nothing in this model can be quantized to int8: it has no convolution or matrix product"
        )
    return model


def _quantize(*arguments: object, **options: object) -> None:
    try:
        quantize_static(*arguments, **options)
    except Exception as error:  # the quantizer raises many kinds on graphs that it does not understand
        raise QuantizationError(f"ONNX Runtime cannot quantize this model: {type(error).__name__}: {error}") from error


def quantized_ops(model: ir.Model) -> int:
    """Count the nodes that take all their data inputs through DequantizeLinear, and so run in integers once fused."""
    count = 0
    for node in model.graph:
        producers = [value.producer() for value in node.inputs[:2] if value is not None]
        if node.op_type in ("Conv", "MatMul", "Gemm") and producers:
            count += all(made is not None and made.op_type == "DequantizeLinear" for made in producers)
    return count


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds a Calibration to ONNX Runtime."""

    def __init__(self, data: Calibration, method: str):
        # The histograms of entropy and percentile need batches of one size; no sample is left out for it.
        equal = next(rows for rows in range(32, 0, -1) if data.rows % rows == 0)
        self._batches: Iterator[dict[str, Array]] = data.batches(32 if method == "minmax" else equal)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the quantizer's advice to pre-process (our exporter has inferred the shapes already) and what it prints."""
    logging.disable(logging.WARNING)
    onnxruntime.set_default_logger_severity(3)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        onnxruntime.set_default_logger_severity(2)
        logging.disable(logging.NOTSET)
