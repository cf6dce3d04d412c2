"""TorchScript, for legacy models: to ONNX by PyTorch's older exporter, which keeps loops and branches.

PyTorch's converter of TorchScript to FX is not used: it crashes the process on some scripted layers (torch 2.13, LSTM).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ingot.export.program import quiet
from ingot.export.torch_internals import without_onnx_log
from ingot.tensors import Signature


def lower(
    module: torch.jit.ScriptModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    signature: Signature,
    opset: int | None,
) -> ir.Model:
    """Convert a TorchScript module called with ``args`` and ``kwargs``, whose tensors have ``names`` in order."""
    specs = (*signature.inputs, *signature.outputs)
    axes = {spec.name: {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in specs}
    buffer = io.BytesIO()
    with quiet(), without_onnx_log(), torch.no_grad():
        torch.onnx.export(
            module,
            args,
            buffer,  # type: ignore[arg-type]  # the older exporter accepts file objects
            kwargs=kwargs or None,
            dynamo=False,
            input_names=list(names),
            output_names=[spec.name for spec in signature.outputs],
            dynamic_axes=axes,
            opset_version=opset,
        )
    model = ir.serde.deserialize_model(onnx.load_from_string(buffer.getvalue()))
    by_name = {spec.name: spec for spec in specs}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(by_name[value.name or ""].shape)
    return model
