"""Load the packed model as the server does, prove that it equals the original, and measure it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from ingot.bounds import bounds_of
from ingot.bounds.indices import indices_of
from ingot.bounds.samples import mixing_of
from ingot.errors import ExportError, InvalidArgument
from ingot.export.explain.places import frames_in, innermost
from ingot.export.lower.packed import Packed
from ingot.export.proof import extremes, indices, misdeclared, padded
from ingot.export.proof.independence import unbatchable
from ingot.export.proof.parity import tolerance
from ingot.export.source.subject import check_batch_dim
from ingot.export.stages.context import Context
from ingot.model_store import BoundsEvidence, CallBytes, Evidence, Golden
from ingot.model_store.format.evidence import UNBATCHED
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.machine import devices
from ingot.runtime.profiling import call_memory, profile
from ingot.tensors import Signature, check_inputs
from ingot.tensors.padding import Padding, declared

# FLOPs of the largest call that is timed.
_MAX_TIMED_FLOPS = 1e11
# The longest condition in a note, in characters.
_LONGEST_CONDITION = 60
# How ONNX Runtime's messages name a node; those of nodes without a name have the operator only.
_NODE = re.compile(r"node (?:with name )?[('](\w+)[')]", re.IGNORECASE)
_KIND = re.compile(r"implementation for (\w+)\(")
_ELSEWHERE = "; rewrite that part, such as in another datatype, or run it in PyTorch by --partition"


@dataclass(frozen=True)
class Proved:
    """The results of the proof: signature with batch dimension, paddings proved neutral, evidence and goldens."""

    signature: Signature
    paddings: Mapping[str, Padding]
    evidence: Evidence
    goldens: tuple[Golden, ...]
    golden_tolerance: float


def prove_packed(context: Context, packed: Packed, signature: Signature) -> Proved:
    """Load a packed model, prove that it equals the original, and measure it.

    Raises:
        ExportError: it does not load.
        ParityError: it differs, or a declared padding changes its outputs.
        InvalidArgument: the batch dimension or a padding does not fit the signature.
    """
    journal, examples = context.journal, context.examples
    signature, notes = _with_batch(context, packed, signature)
    journal.note(*packed.notes, *notes)
    journal.conditions = context.conditions
    journal.note(*_conditional(context.conditions, context.search_limit))
    paddings = declared(context.options.paddings, signature)
    with contextlib.closing(load_packed(context, packed)) as engine:
        with journal.stage("pack", "Proving that the graph equals the model") as stage:
            stage.parity, goldens = context.prove(engine, signature)
            signature = _with_indices(context, packed, signature)
            graph = context.blobs.path(packed.graph) if packed.format == "onnx" else None
            padding = padded.prove(engine, signature, paddings, examples, graph)
            journal.note(*padding.remarks)
        journal.note(*extremes.remarks(context.reference, engine, examples, tolerance(signature, examples.computed)))
        with journal.stage("measure", "Measuring"):
            batches = [rows for rows in profile.BATCHES if _affordable(context, signature, rows)]
            latency = profile.measure(engine, signature, goldens[0].inputs, batches, budget=0.1, least=1)
    worst = max((item.tolerance for item in stage.parity), default=tolerance(signature, examples.computed))
    bounds = _measured_bounds(context, packed, signature, goldens[0]) if packed.format == "onnx" else None
    evidence = Evidence(
        machine=devices.describe(),
        parity=stage.parity,
        latency=latency,
        memory=context.memory,
        bounds=bounds,
        deviations=context.deviations,
        tried_paddings=padding.tried,
    )
    # Another processor rounds differently: goldens may differ by 10 times what this one showed.
    return Proved(signature, padding.paddings, evidence, goldens, min(10 * worst, 1))


def _measured_bounds(context: Context, packed: Packed, signature: Signature, golden: Golden) -> BoundsEvidence | None:
    """Measure the memory of a call, and note a bound that exceeds it by too much."""
    path = context.blobs.path(packed.graph)
    bounds = bounds_of(path, signature)
    if not bounds.bounded:
        return None
    sizes = check_inputs(signature, golden.inputs)
    try:
        measured = call_memory.measured(path, golden.inputs)
    except InvalidArgument:  # its custom operators are in a library
        return None
    evidence = BoundsEvidence(calls=(CallBytes(sizes=sizes, peak=bounds.peak(sizes), measured=measured),))
    if evidence.loosest is not None:
        context.journal.note(f"{evidence.loosest}, so servers limit neither requests nor batches by it")
    return evidence


def _conditional(conditions: Sequence[str], limit: str) -> Iterator[str]:
    """Yield a remark in one line if there are conditions; the report lists them."""
    if conditions:
        noun = "condition" if len(conditions) == 1 else "conditions"
        short = [condition for condition in conditions if len(condition) <= _LONGEST_CONDITION][:1]
        more = len(conditions) - len(short)
        listed = [*short, *([f"{more}{' more' if short else ''} in the report"] if more else [])]
        yield (
            f"{len(conditions)} {noun} on sizes held at all sizes that were tried, which are not all declared "
            f"ones{limit}: {' and '.join(listed)}. Narrower ranges in --input may make a proof possible"
        )


def _with_batch(context: Context, packed: Packed, signature: Signature) -> tuple[Signature, tuple[str, ...]]:
    """Return the signature with its batch dimension, or without one, and notes on why.

    The graph decides whether samples affect each other; runs of the original only confirm it.
    """
    batch = context.options.batch_dim or ("batch" if "batch" in signature.symbols else signature.batch)
    if batch is None:
        return signature, (f"{UNBATCHED}no input has a dimension named 'batch'{_advice(signature)}",)
    check_batch_dim(batch, signature.inputs)
    if (step := signature.range(batch).step) > 1:
        return replace(signature, batch=None), (f"{UNBATCHED}'{batch}' changes in steps of {step}",)
    reason = unbatchable(context.reference, signature, batch, context.examples)
    if reason is not None:
        return replace(signature, batch=None), (f"{UNBATCHED}{reason}",)
    graph = _onnx_graph(context, packed)
    reason = (
        _mixing(graph, signature, batch, context.stacks)
        if graph is not None
        else "its graph has no ONNX form, in which samples could be followed"
    )
    if reason is None:
        return replace(signature, batch=batch), ()
    if context.options.independent:
        note = f"served in batches on the word of its author, as the graph does not prove that it may be: {reason}"
        return replace(signature, batch=batch), (note,)
    remedy = "if samples never influence each other, export it with --independent"
    return replace(signature, batch=None), (f"{UNBATCHED}{reason}; {remedy}",)


def _with_indices(context: Context, packed: Packed, signature: Signature) -> Signature:
    """Return the signature with the ranges of inputs that are indices, and note the inputs whose range is not known."""
    graph = _onnx_graph(context, packed)
    if graph is None:
        return signature
    found = indices_of(graph, lenient=True)
    ranges = indices.proved(context.reference, context.examples, found.ranges)
    for spec in signature.inputs:
        derived = found.ranges.get(spec.name)
        node = found.unknown.get(spec.name) if derived is None else derived.source
        if node and spec.values is None and spec.name not in ranges:
            context.journal.note(
                f"indices depend on the values of '{spec.name}' ({node}), and a GPU does not refuse an index out of "
                f"range, nor a CPU a negative one: declare which values are valid, such as --input '{spec}=0..100'"
            )
    inputs = (replace(spec, values=spec.values or ranges.get(spec.name)) for spec in signature.inputs)
    return replace(signature, inputs=tuple(inputs))


def _onnx_graph(context: Context, packed: Packed) -> Path | None:
    """Return the model as an ONNX graph; None if it has no such form."""
    if packed.format == "onnx":
        return context.blobs.path(packed.graph)
    return None if context.followed is None else context.followed[0].path(context.followed[1])


def _mixing(graph: Path, signature: Signature, batch: str, stacks: Mapping[str, str]) -> str | None:
    """Return why samples of a graph may influence each other, with the line of the user's code; None if they do not."""
    mixing = mixing_of(graph, signature, batch)
    if mixing is None:
        return None
    place = innermost(frames_in(stacks.get(mixing.node, "")))
    node, colon, text = mixing.reason.partition(": ")
    return mixing.reason if place is None else f"{node}, from {place.short}{colon}{text}"


def _advice(signature: Signature) -> str:
    """Return advice to declare dynamic first dimensions as the batch dimension; empty if none is dynamic."""
    named = (spec for spec in signature.inputs if spec.shape and isinstance(spec.shape[0], str))
    firsts = [spec for spec in named if spec.shape.count(spec.shape[0]) == 1]  # a square mask counts positions
    options = " ".join(f"--input '{replace(spec, shape=('batch', *spec.shape[1:]))}'" for spec in firsts)
    return f"; if the first dimension of an input counts independent rows, name it 'batch': {options}" if firsts else ""


def load_packed(context: Context, packed: Packed) -> Engine:
    """Return an engine of a packed model, as a server opens it.

    Raises:
        ExportError: it does not load.
    """
    path = context.blobs.path(packed.graph)
    device = "cpu" if packed.format == "onnx" else context.options.device
    try:
        return load_engine(
            EngineSpec(path, format=packed.format, device=device, allow_code=True)
        )  # this export made it
    except InvalidArgument as error:
        reason = str(error).replace(f" {path.name}", "")
        advice = misdeclared.as_int64(context.examples) if "tensor(int32)" in reason else ""
        line = _line_of(path, reason, context.stacks) if packed.format == "onnx" else ""
        raise ExportError(f"the graph was exported, but does not load: {reason}{line}{advice or _ELSEWHERE}") from error


def _line_of(path: Path, reason: str, stacks: Mapping[str, str]) -> str:
    """Return the line of the user's code of the node that an engine's message names, in brackets; empty without one."""
    name, kind = _NODE.search(reason), _KIND.search(reason)
    nodes = onnx.load(path, load_external_data=False).graph.node
    named = [node for node in nodes if name is not None and node.name == name[1]]
    alike = [node for node in nodes if kind is not None and node.op_type == kind[1]]
    outputs = (output for node in (named or alike) for output in node.output)
    places = (innermost(frames_in(stacks.get(output, ""))) for output in outputs)
    place = next((place for place in places if place is not None), None)
    return f" ({place.short})" if place is not None else ""


def _affordable(context: Context, signature: Signature, rows: int) -> bool:
    """Return whether a call with this many rows is timed; one with a single row always is."""
    examples, batch = context.examples, signature.batch
    return rows == 1 or batch is None or examples.affordable({**examples.default_sizes, batch: rows}, _MAX_TIMED_FLOPS)
