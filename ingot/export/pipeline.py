"""The export pipeline: a model and options in, an archive out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import nn

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument, ParityError
from ingot.export.capture.routes import Captured, Legacy
from ingot.export.estimate import cost
from ingot.export.lower.packed import Packed, precision_of
from ingot.export.proof import edges
from ingot.export.proof.parity import Remembered
from ingot.export.proof.states import Watched
from ingot.export.report import Journal, Progress
from ingot.export.rewrite import rules
from ingot.export.rewrite.passes.manager import FxPass, OnnxPass
from ingot.export.snapshot import Snapshot, untouched
from ingot.export.source import defaults
from ingot.export.source import onnx as onnx_source
from ingot.export.source.subject import Subject, check_batch_dim, describe, parse_inputs, prepare
from ingot.export.source.tensor_plan import plan_of
from ingot.export.stages.capture import capture_module
from ingot.export.stages.context import Context, Options
from ingot.export.stages.lower import TARGETS, follow, lower_gradually, lower_to_onnx, lower_to_target
from ingot.export.stages.pack import pack_archive, pack_onnx
from ingot.export.stages.prove import prove_packed
from ingot.export.stages.rewrite import rewrite_onnx, rewrite_program
from ingot.export.stages.steps import prove_steps
from ingot.model_store import Archive, ServingDefaults
from ingot.model_store.references import name_from, stored_name
from ingot.steps import Described
from ingot.tensors import Signature, TensorSpec, padding

Capture = Literal["auto", "export", "strict", "inferred", "deferred", "oblivious", "crossed", "fx", "script", "trace"]
Target = Literal["onnx", "aoti", "pt2"]
Device = Literal["cpu", "cuda"]


def export_model(
    model: nn.Module | str | Path,
    example_inputs: object = None,
    *,
    inputs: str | Sequence[str | TensorSpec] = (),
    constants: Mapping[str, Any] | None = None,
    output_names: Sequence[str] = (),
    name: str | None = None,
    batch_dim: str | None = None,
    independent: bool = False,
    opset: int | None = None,
    capture: Capture = "auto",
    rewrite: str | FxPass | OnnxPass | Sequence[str | FxPass | OnnxPass] = "default",
    lift_state: bool = False,
    target: Target = "onnx",
    partition: bool = False,
    device: Device = "cpu",
    pad: str | Sequence[str] = (),
    tensor_parallel: Mapping[str, str] | str | None = None,
    serving: ServingDefaults | None = None,
    steps: Described | None = None,
    source: str = "",
    progress: Progress = lambda step: None,
) -> Archive:
    """Capture a model as a graph, prove that the graph equals the model, and pack it.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
        >>> archive = ingot.export_model(net, inputs="x:float32[batch,4]", output_names=["scores"], name="net")
        >>> archive.save("net.ingot")

    Args:
        model: a module, which is exported in evaluation mode on its own device, and whose parts get their modes back;
            or the path of an ``.onnx`` file, for which ``output_names`` and ``opset`` are refused.
        example_inputs: a tensor, a sequence of arguments in the order of ``forward``, or a mapping of its keywords.
            Nested dicts, lists and tuples are flattened to dotted names; values other than tensors are constants.
            Without ``inputs``, the first dimension of every tensor is the batch and all others are fixed. With
            neither, a model of transformers, a LightningModule with an ``example_input_array`` and a saved program
            describe their own inputs.
        inputs: the inputs, such as ``"image:float32[batch,3,224,224]"``; see :func:`ingot.tensors.parse_spec`. Without
            ``example_inputs``, examples are generated from these.
        constants: keywords of ``forward`` that are fixed in the graph.
        output_names: names for the outputs, in order.
        name: the archive's, stored in lower case; by default the module's class, or the file's stem.
        batch_dim: the named dimension along which requests are batched; by default ``batch``.
        independent: your word that samples of a batch do not influence each other, where the graph does not prove it.
            Samples are still compared, and the archive notes it.
        opset: the ONNX operator set; by default the exporter's.
        capture: the route, one of :data:`ingot.export.capture.routes.ROUTES`; ``auto`` tries them in turn.
        rewrite: the rewrite rules, by name or as passes; see :func:`ingot.export.rewrite.rules.select`.
        lift_state: turn the buffers and inputs that the model changes into inputs and outputs of the graph.
        target: ``onnx``, ``aoti`` (an AOTInductor package) or ``pt2`` (an exported program).
        partition: run what ONNX cannot express in PyTorch, and the rest in ONNX Runtime.
        device: the device of an AOTInductor package: ``cpu`` or ``cuda``.
        pad: dimensions that the server may pad because the model ignores the padding, such as ``"seq"`` of a model
            with an attention mask; see :func:`ingot.tensors.padding.parse`.
        tensor_parallel: how layers may be divided over processes, for target ``pt2``: ``colwise`` or ``rowwise`` by the
            names of modules, or ``auto`` for the model's own plan; see :func:`ingot.export.source.tensor_plan.plan_of`.
        serving: names of classes, states and the like (:class:`ingot.model_store.ServingDefaults`), with which a server
            serves the model unless its settings say otherwise.
        steps: the steps before and after the graph, such as those of :func:`ingot.steps.text_classification`.
        source: where the model came from, for the archive's provenance.
        progress: called with the name of each step as it begins.

    Returns:
        An archive with one variant, in a temporary folder that lasts as long as the archive is referenced:
        :meth:`Archive.save` it or push it to a store.

    Raises:
        ExportError: the model does not run on the examples, or cannot be captured or lowered.
        ParityError: the graph computes other numbers than the model.
        InvalidArgument: an option is wrong.
    """
    if isinstance(model, type):
        raise InvalidArgument(f"{model.__name__} is a class; pass a module, such as {model.__name__}()")
    if steps is not None and not inputs and example_inputs is None:
        inputs = steps.inputs
    specs, ranges = parse_inputs(inputs)
    if batch_dim is not None and specs:
        check_batch_dim(batch_dim, specs)
    name = stored_name(
        name or name_from(model.__class__.__name__ if isinstance(model, nn.Module) else Path(model).stem)
    )
    fx_rules, onnx_rules = rules.select([rewrite] if isinstance(rewrite, str | FxPass | OnnxPass) else rewrite)
    options = Options(
        name=name,
        source=source or name,
        batch_dim=batch_dim,
        independent=independent,
        opset=opset,
        capture=capture,
        fx_rules=fx_rules,
        onnx_rules=onnx_rules,
        target=_target(target, partition),
        device=device,
        paddings=dict(map(padding.parse, [pad] if isinstance(pad, str) else pad)),
        serving=serving,
        steps=steps,
    )
    journal = Journal(progress)
    if tensor_parallel is not None:
        if not isinstance(model, nn.Module) or options.target != "pt2":
            raise InvalidArgument("only a module that is exported to pt2 has a tensor-parallel plan; give --to pt2")
        options = replace(options, tensor_parallel=plan_of(model, tensor_parallel, journal.note))
    if not isinstance(model, nn.Module):
        if output_names or opset or constants or lift_state or capture != "auto" or options.target != "onnx":
            raise InvalidArgument(
                "an .onnx file is exported unchanged: constants, output names, opset, capture route, state lifting and "
                "target are for modules; leave them out"
            )
        with journal.stage("read", "Reading the ONNX model"):
            file = onnx_source.read(Path(model), example_inputs, specs, ranges)
        journal.note(*file.notes)
        context = Context(options=options, journal=journal, reference=file.file, examples=file.examples)
        return _finish_onnx(context, file.model, file.signature)
    with evaluating(model) as (model, snapshot):
        with journal.stage("probe", "Running the model on example inputs"):
            description = describe(model, example_inputs, inputs, constants)
            journal.note(*description.notes)
            subject = prepare(model, description, output_names, snapshot=snapshot, lift_state=lift_state)
            watched = Watched(subject.eager, subject.example)  # what the search changes is new, too
            examples, notes = edges.chosen(subject.eager, subject.examples)
            journal.note(*notes)
            subject = replace(subject, examples=examples)
        examples = subject.examples.signed() if capture == "trace" else subject.examples
        context = Context(
            options=options,
            journal=journal,
            reference=Remembered(watched),
            examples=examples,
            eager=subject.eager,
            watched=watched,
        )
        try:
            archive = _export_module(context, subject)
        except ParityError as error:
            raise _with_remedy(error) from error.__cause__
        watched.check(thorough=True)
        return archive


def _with_remedy(error: ParityError) -> ParityError:
    """Return an error on a graph that differs; without a remedy in it, with the command that finds the operation."""
    text = str(error)
    differs = text.startswith("the exported graph does not") and text.endswith(")")
    fails = text.startswith("the exported graph fails") and "; " not in text
    return ParityError(f"{text}; --bisect names the operation") if differs or fails else error


def _export_module(context: Context, subject: Subject) -> Archive:
    """Export by the first route whose graph is proved equal as captured and as packed.

    The translation retraces a graph and may drop what has no effect under the graph's own conditions on sizes, such as
    a slice. Another route may have a graph without these conditions.
    """
    journal, first = context.journal, None
    while True:
        before = journal.mark()
        try:
            captured = capture_module(context, subject)
        except ExportError as error:
            raise first or error from error.__cause__
        try:
            return _packed(context, subject, captured)
        except ParityError as error:
            first = first or error
            if not context.narrow or context.options.capture != "auto":
                raise
            journal.rewind(before, f"the packed graph differs: {error}")


def _packed(context: Context, subject: Subject, captured: Captured) -> Archive:
    to_onnx = context.options.target == "onnx"
    if isinstance(captured, Legacy):
        if not to_onnx:
            raise InvalidArgument(f"a TorchScript model can become ONNX only, not '{context.options.target}'")
        return _finish_onnx(context, captured.model, captured.signature)
    program = rewrite_program(context, captured, subject, tidy=not to_onnx)
    batch = context.options.batch_dim or "batch"
    context.memory = foreign.attempt(lambda: cost.plan_memory(program, subject, batch))
    if to_onnx:
        model, program = lower_to_onnx(context, program, subject, rewritten=program is not captured)
        try:
            with context.journal.tentative():
                return _finish_onnx(context, model, program.signature)
        except ExportError:
            again = lower_gradually(context, program)
            if again is None:
                raise
        return _finish_onnx(context, again, program.signature)
    context.followed = follow(context, program)
    packed = lower_to_target(context, program)
    return _finish(context, packed, precision_of(program), program.signature)


def _finish_onnx(context: Context, model: ir.Model, signature: Signature) -> Archive:
    model = rewrite_onnx(context, model, signature)
    packed, precision = pack_onnx(context, model, signature)
    return _finish(context, packed, precision, signature)


def _finish(context: Context, packed: Packed, precision: str, signature: Signature) -> Archive:
    proved = prove_steps(context, packed, prove_packed(context, packed, signature))
    return pack_archive(context, packed, precision, proved)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[tuple[nn.Module, Snapshot]]:
    """Yield a module in the form that is exported, and a snapshot of it; at the end the module is as it was before.

    Of a TorchScript module it is a copy, because its attributes cannot all be restored.
    """
    if isinstance(model, torch.jit.ScriptModule):
        model = copy.deepcopy(model)
    defaults.settle(model)
    with untouched(model) as snapshot:
        with contextlib.suppress(NotImplementedError):  # an exported program has no modes
            model.eval()
        with defaults.exportable(model), defaults.checking_targets():
            yield model, Snapshot(model, snapshot)


def _target(target: str, partition: bool) -> str:
    if target not in ("onnx", *TARGETS) or target == "partitioned":
        raise InvalidArgument(f"unknown target '{target}'; use onnx, aoti or pt2")
    if partition and target != "onnx":
        raise InvalidArgument(f"target '{target}' cannot be partitioned; leave out --partition")
    return "partitioned" if partition else target
