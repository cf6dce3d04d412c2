"""Smaller and faster variants of an archive's model: found by measuring, with the evidence of what they cost."""

from ingot.errors import missing_package

try:
    from ingot.quant.compare import compare
    from ingot.quant.config import (
        BFloat16,
        DynamicInt8,
        Float16,
        QuantConfig,
        StaticInt8,
        WeightInt4,
        WeightInt8,
    )
    from ingot.quant.pipeline import Quantized, quantize, run
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("onnx", "onnx_ir", "sympy"):
        raise
    raise missing_package(error.name, "quantizing models", "export") from error

__all__ = [
    "BFloat16",
    "DynamicInt8",
    "Float16",
    "QuantConfig",
    "Quantized",
    "StaticInt8",
    "WeightInt4",
    "WeightInt8",
    "compare",
    "quantize",
    "run",
]
