"""From a PyTorch module (or an ONNX file) to an archive, with proof. Needs torch: ``pip install 'ingot[export]'``."""

from ingot.errors import missing_package

try:
    from ingot.export.pipeline import export_model
    from ingot.export.source import load_source
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("torch", "onnx", "onnx_ir", "onnxscript", "sympy"):
        raise
    raise missing_package(error.name, "exporting models", "export") from error

__all__ = ["export_model", "load_source"]
