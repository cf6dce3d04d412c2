"""Quantize an archive's model: find smaller and faster variants by measuring, and record the loss of accuracy.

Start reading at ``pipeline.quantize``: it tries the recipe of the configuration (config.py), or searches among the
plans of search/families.py if there is none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingot.errors import missing_package

if TYPE_CHECKING:
    from ingot.quant.config import BFloat16 as BFloat16
    from ingot.quant.config import DynamicInt8 as DynamicInt8
    from ingot.quant.config import Float16 as Float16
    from ingot.quant.config import QuantConfig as QuantConfig
    from ingot.quant.config import StaticInt8 as StaticInt8
    from ingot.quant.config import WeightInt4 as WeightInt4
    from ingot.quant.config import WeightInt8 as WeightInt8
    from ingot.quant.measure.comparison import compare as compare
    from ingot.quant.pipeline import Quantized as Quantized
    from ingot.quant.pipeline import quantize as quantize
    from ingot.quant.pipeline import run as run

_PLACES = {
    "BFloat16": "ingot.quant.config",
    "DynamicInt8": "ingot.quant.config",
    "Float16": "ingot.quant.config",
    "QuantConfig": "ingot.quant.config",
    "Quantized": "ingot.quant.pipeline",
    "StaticInt8": "ingot.quant.config",
    "WeightInt4": "ingot.quant.config",
    "WeightInt8": "ingot.quant.config",
    "compare": "ingot.quant.measure.comparison",
    "quantize": "ingot.quant.pipeline",
    "run": "ingot.quant.pipeline",
}
_NEEDED = ("onnx", "onnx_ir", "sympy")
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


def __getattr__(name: str) -> Any:
    """Import modules on first use: reports and comparisons must work without the ONNX tools."""
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        return getattr(import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        raise missing_package(str(error.name), "quantizing models", "export") from error
