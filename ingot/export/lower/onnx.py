"""Lowering to ONNX."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ingot.errors import ExportError
from ingot.export.program import Program, quiet


def lower(program: Program, opset: int | None = None) -> ir.Model:
    """Translate a captured program by PyTorch's dynamo ONNX exporter.

    Raises:
        ExportError: an operator has no ONNX form.
    """
    signature = program.signature
    try:
        with quiet():
            result = torch.onnx.export(
                program.exported,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many kinds
        raise ExportError(f"the model has no ONNX form: {_cause(error)}") from error
    if result is None:
        raise ExportError("the ONNX exporter gave no model")
    model = result.model
    made = model.opset_imports.get("")
    if opset is not None and made != opset:
        raise ExportError(f"the model cannot be expressed in opset {opset}; the exporter gives opset {made}")
    for spec, value in zip(
        (*signature.inputs, *signature.outputs), (*model.graph.inputs, *model.graph.outputs), strict=True
    ):
        value.shape = ir.Shape(spec.shape)
    return model


def _cause(error: Exception) -> str:
    """Return the innermost cause in one line; the exporter wraps it several times."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__
