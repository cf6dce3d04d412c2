"""Smaller and faster variants of an archive's model, with the evidence of what they cost."""

from ingot.errors import missing_package

try:
    from ingot.quant.config import StaticInt8
    from ingot.quant.pipeline import quantize
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("onnx", "onnx_ir", "sympy"):
        raise
    raise missing_package(error.name, "quantizing models", "export") from error

__all__ = ["StaticInt8", "quantize"]
