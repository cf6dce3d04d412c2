"""The export pipeline, as it is called: a model and options in, an archive out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ingot import padding
from ingot.errors import InvalidArgument
from ingot.export.proof.parity import Remembered
from ingot.export.proof.probe import unchanged
from ingot.export.report import Journal, Progress
from ingot.export.rewrite import rules
from ingot.export.rewrite.passes.manager import FxPass, OnnxPass
from ingot.export.run import LOWERINGS, Options, Original, Run, check_batch_dim
from ingot.export.source import defaults
from ingot.export.source import onnx as onnx_source
from ingot.export.source.subject import describe, parse_inputs, prepare
from ingot.model_store import Archive
from ingot.model_store.references import name_from, stored_name
from ingot.tensors import Range, TensorSpec


def export_model(
    model: nn.Module | str | Path,
    example_inputs: Any = None,
    *,
    inputs: str | Sequence[str | TensorSpec] = (),
    constants: Mapping[str, Any] | None = None,
    output_names: Sequence[str] = (),
    name: str | None = None,
    batch_dim: str | None = None,
    opset: int | None = None,
    capture: str = "auto",
    rewrite: str | FxPass | OnnxPass | Sequence[str | FxPass | OnnxPass] = "default",
    lift_state: bool = False,
    target: str = "onnx",
    partition: bool = False,
    device: str = "cpu",
    pad: str | Sequence[str] = (),
    source: str = "",
    progress: Progress = lambda step: None,
) -> Archive:
    """Capture a model as an ONNX graph, prove that it equals the original, and pack it.

    Args:
        model: a module, exported as it is in evaluation mode, or the path of an ``.onnx`` file.
        example_inputs: a tensor, a sequence of arguments in the order of ``forward``, or a mapping of its keywords;
            dicts, lists and tuples inside are flattened to dotted names, and what is no tensor is a constant. Without
            ``inputs``, the first dimension of every tensor is the batch and all others are fixed. With neither, a
            model of transformers, a LightningModule with an ``example_input_array`` and a saved program tell theirs.
        inputs: the inputs, such as ``"image:float32[batch,3,224,224]"``; see :func:`ingot.tensors.parse_spec`. Without
            ``example_inputs``, examples are generated from these.
        constants: keywords of ``forward`` that are fixed in the graph.
        output_names: names for the outputs, in order.
        name: the archive's; by default the module's class, or the file's stem.
        batch_dim: which named dimension requests may be joined along; by default ``batch``.
        opset: the ONNX operator set; by default the exporter's.
        capture: the route, one of :data:`ingot.export.capture.ladder.ROUTES`; ``auto`` tries them in turn.
        rewrite: the rewrite rules, by name or as passes; see :func:`ingot.export.rewrite.rules.select`.
        lift_state: make the buffers and inputs that the model changes into inputs and outputs of the graph.
        target: what the model becomes: ``onnx``, ``aoti`` (an AOTInductor package) or ``pt2`` (an exported program).
        partition: run what ONNX cannot express in PyTorch, and the rest in ONNX Runtime.
        device: what an AOTInductor package is compiled for: ``cpu`` or ``cuda``.
        pad: dimensions along which the server may pad requests, since the model does not notice, such as ``"seq"`` of
            one with an attention mask; see :func:`ingot.padding.parse`.
        source: where the model came from, for the archive's provenance.
        progress: called with what begins now.

    Returns:
        An archive with one variant, in a temporary folder: :meth:`Archive.save` it or push it to a store.

    Raises:
        ExportError: the model does not run on the examples, or cannot be captured or lowered.
        ParityError: the graph gives other numbers than the model.
        InvalidArgument: an option is wrong.
    """
    if isinstance(model, type):
        raise InvalidArgument(f"{model.__name__} is a class; pass a module, such as {model.__name__}()")
    specs, ranges = parse_inputs(inputs)
    if batch_dim is not None and specs:
        check_batch_dim(batch_dim, specs)
    name = stored_name(
        name or name_from(model.__class__.__name__ if isinstance(model, nn.Module) else Path(model).stem)
    )
    fx_rules, onnx_rules = rules.select([rewrite] if isinstance(rewrite, str | FxPass | OnnxPass) else rewrite)
    options = Options(
        name,
        source or name,
        batch_dim,
        opset,
        capture,
        fx_rules,
        onnx_rules,
        _target(target, partition),
        device,
        dict(map(padding.parse, [pad] if isinstance(pad, str) else pad)),
    )
    journal = Journal(progress)
    if not isinstance(model, nn.Module):
        if output_names or opset or constants or lift_state or capture != "auto" or options.target != "onnx":
            raise InvalidArgument("an .onnx file is taken as it is: leave out what concerns the capture of a module")
        return _from_onnx(Path(model), example_inputs, specs, ranges, options, journal)
    with evaluating(model), unchanged(model):
        with journal.stage("probe", "Running the model on example inputs"):
            description = describe(model, example_inputs, inputs, constants)
            journal.note(*description.notes)
            subject = prepare(model, description, output_names, lift_state=lift_state)
        examples = subject.examples.signed() if capture == "trace" else subject.examples
        original = Original(Remembered(subject.eager), examples, subject.eager)
        return Run(original, options, journal).from_module(subject)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module into the form that is exported, and each of its parts back into the mode it was in."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        with contextlib.suppress(NotImplementedError):  # a program that was exported has no modes
            model.eval()
        with defaults.exportable(model):
            yield
    finally:
        for part, training in modes:
            part.training = training


def _from_onnx(
    path: Path,
    example_inputs: Any,
    specs: tuple[TensorSpec, ...],
    ranges: Mapping[str, Range],
    options: Options,
    journal: Journal,
) -> Archive:
    with journal.stage("read", "Reading the ONNX model"):
        source = onnx_source.read(path, example_inputs, specs, ranges)
    journal.note(*source.notes)
    original = Original(source.file, source.examples)
    return Run(original, options, journal).from_onnx(source.model, source.signature)


def _target(target: str, partition: bool) -> str:
    if target not in ("onnx", *LOWERINGS) or target == "partitioned":
        raise InvalidArgument(f"there is no target '{target}'; there are: onnx, aoti, pt2")
    if partition and target != "onnx":
        raise InvalidArgument(f"target '{target}' takes the whole model; leave out --partition")
    return "partitioned" if partition else target
