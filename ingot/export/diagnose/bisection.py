"""Bisection of an export: the operation at which the user's module and its ONNX graph begin to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ingot.errors import ExportError
from ingot.export.capture import routes
from ingot.export.diagnose.divergence import Divergence, find_divergence
from ingot.export.lower import onnx as lower_onnx
from ingot.export.lower.forms.translations import TRANSLATIONS
from ingot.export.pipeline import evaluating
from ingot.export.program import Program
from ingot.export.proof.parity import tolerance
from ingot.export.report import Progress
from ingot.export.source.subject import describe, prepare
from ingot.tensors import TensorSpec


def bisect_model(
    model: nn.Module,
    example_inputs: object = None,
    *,
    inputs: str | Sequence[str | TensorSpec] = (),
    constants: Mapping[str, Any] | None = None,
    output_names: Sequence[str] = (),
    opset: int | None = None,
    capture: str = "auto",
    lift_state: bool = False,
    progress: Progress = lambda step: None,
) -> tuple[Divergence | None, int]:
    """Return the first operation that diverges from the original, or None, and the number of sizes compared.

    The graph is captured and lowered without rewrite rules, and is not proved. The arguments are those of
    :func:`ingot.export.export_model`.

    Raises:
        ExportError: the model cannot be captured or lowered, or its graph has no operations to compare.
    """
    with evaluating(model) as (model, snapshot):
        progress("Running the model on example inputs")
        description = describe(model, example_inputs, inputs, constants)
        subject = prepare(model, description, output_names, snapshot=snapshot, lift_state=lift_state)
        task = routes.Task(subject.eager, subject.inputs, subject.ranges, subject.example, subject.output_names, opset)
        captured, _ = routes.capture(task, capture, lambda captured: None, progress)
        if not isinstance(captured, Program):
            raise ExportError("TorchScript is converted to ONNX in one step, which has no operations to compare")
        progress("Converting to ONNX")
        lowered = lower_onnx.lower(captured, opset, translations=TRANSLATIONS)
        count = 0
        for seed, sizes in enumerate(subject.examples.cases()):
            progress(f"Comparing every operation at {', '.join(f'{name}={size}' for name, size in sizes.items())}")
            case = subject.examples.make(sizes, seed)
            count += 1
            found = find_divergence(captured, subject.eager, lowered, case, tolerance(captured.signature))
            if found is not None:
                return found, count
    return None, count
