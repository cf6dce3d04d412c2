"""From a PyTorch module (or an ONNX file) to an archive, with proof.

Start in pipeline.py, which runs the stages in stages/; program.py has the captured model that they pass on. Needs
torch: ``pip install 'ingot-serve[export]'``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingot.errors import missing_package

if TYPE_CHECKING:
    from ingot.export.decoder.pipeline import export_decoder as export_decoder
    from ingot.export.pipeline import export_model as export_model
    from ingot.export.rewrite.ops import op as op
    from ingot.export.source import load_source as load_source

_PLACES = {
    "export_decoder": "ingot.export.decoder.pipeline",
    "export_model": "ingot.export.pipeline",
    "load_source": "ingot.export.source",
    "op": "ingot.export.rewrite.ops",
}
_NEEDED = ("torch", "onnx", "onnx_ir", "onnxscript", "sympy")
__all__ = ["export_decoder", "export_model", "load_source", "op"]


def __getattr__(name: str) -> Any:
    """Import names that need PyTorch on first use: reports are read and shown without it."""
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        return getattr(import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        raise missing_package(str(error.name), "exporting models", "export") from error
