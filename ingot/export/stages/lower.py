"""From a captured program to ONNX, or to the files of another target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import onnx_ir as ir

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.explain import places
from ingot.export.lower import aoti, deviations, optimizer, partition
from ingot.export.lower import onnx as lower_onnx
from ingot.export.lower import program as lower_program
from ingot.export.lower.forms.translations import TRANSLATIONS
from ingot.export.lower.packed import Packed
from ingot.export.program import Program
from ingot.export.report import Attempt
from ingot.export.source.subject import Subject
from ingot.export.stages.context import Context, Options
from ingot.export.stages.rewrite import prove_onnx, rewrite_program
from ingot.model_store import BlobFolder
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import onnx_graph

TARGETS: dict[str, Callable[[Program, BlobFolder, Options], Packed]] = {
    "aoti": lambda program, blobs, options: aoti.pack(program, blobs, device=options.device),
    "pt2": lambda program, blobs, options: lower_program.pack(program, blobs),
    "partitioned": lambda program, blobs, options: partition.pack(
        program, blobs, opset=options.opset, translations=TRANSLATIONS
    ),
}
"""Targets other than ONNX. The graph of an ONNX model is rewritten before it is packed; these are packed directly."""


def lower_to_onnx(context: Context, program: Program, subject: Subject, *, rewritten: bool) -> tuple[ir.Model, Program]:
    """Translate a program to ONNX, and return the model with the program that it was made from.

    A program that no rule changed (``rewritten`` is false) is tidied and tried again if it cannot be translated.

    Raises:
        ExportError: an operator has no ONNX form.
    """
    journal, opset = context.journal, context.options.opset
    context.deviations = deviations.of(program.exported)
    with journal.stage("lower", "Translating to ONNX"):
        try:
            return lower_onnx.lower(program, opset, TRANSLATIONS, remark=journal.note), program
        except ExportError as error:
            tidied = program if rewritten else rewrite_program(context, program, subject, tidy=True)
            if tidied is program:
                raise _with_earlier(error, journal.attempts) from error.__cause__
            try:
                return lower_onnx.lower(tidied, opset, TRANSLATIONS, remark=journal.note), tidied
            except ExportError as last:
                raise _with_earlier(last, journal.attempts) from last.__cause__


def _with_earlier(error: ExportError, attempts: Sequence[Attempt]) -> ExportError:
    """Return an error that also says why the first route, whose graph may not have the operator, was not taken."""
    if len(attempts) < 2:
        return error
    first, last = attempts[0], attempts[-1]
    return ExportError(f"{error} (the graph is that of route '{last.route}': '{first.route}' failed: {first.failure})")


def lower_gradually(context: Context, program: Program) -> ir.Model | None:
    """Translate a program to ONNX again, with a proof after each step of onnxscript's optimizer.

    Returns:
        The model without the steps whose results do not load or differ, or None if no step is at fault.
    """
    journal, prove = context.journal, partial(prove_onnx, context, program.signature)
    with journal.stage("lower step by step", "Translating to ONNX again, with a proof of each optimization") as stage:
        model = lower_onnx.lower(program, context.options.opset, TRANSLATIONS, optimize=False)
        onnx_graph.externalize(model, context.blobs)
        if isinstance(foreign.outcome(lambda: prove(model)), Exception):
            return None
        model, rejected = optimizer.optimize_gradually(model, prove)
        stage.detail = ", ".join(rejected)
    journal.note(lower_onnx.left_out(rejected))
    return model if rejected else None


def follow(context: Context, program: Program) -> tuple[BlobFolder, Descriptor] | None:
    """Translate a program of another target to ONNX, to follow its samples there; None if ONNX cannot express it."""

    def write() -> tuple[BlobFolder, Descriptor]:
        model, blobs = lower_onnx.lower(program, context.options.opset, TRANSLATIONS), BlobFolder.scratch()
        context.stacks = places.onnx_stacks(model)
        return blobs, onnx_graph.pack(model, blobs)[0]

    return foreign.attempt(write)


def lower_to_target(context: Context, program: Program) -> Packed:
    """Translate a program to one of :data:`TARGETS`, and put its files into the archive.

    Raises:
        ExportError: the target cannot express it.
    """
    options, journal = context.options, context.journal
    with journal.stage("lower", f"Translating to {options.target}"):
        packed = TARGETS[options.target](program, context.blobs, options)
    # The report also lists the operators that ONNX lacks, which cannot be found for every program.
    missing = foreign.attempt(lambda: lower_onnx.outside(program, options.opset, TRANSLATIONS))
    if missing is not None:
        journal.outside_opset = missing
    return packed
