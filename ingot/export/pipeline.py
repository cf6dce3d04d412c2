"""The export pipeline: capture, lower, pack, prove."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from ingot.errors import InvalidArgument
from ingot.export.capture import exported
from ingot.export.examples import Examples, infer_specs
from ingot.export.lower import onnx as lower_onnx
from ingot.export.parity import prove, rows_touch, tolerance
from ingot.export.program import Eager, Runner, from_torch, parameters
from ingot.model_store import Archive, BlobFolder, Evidence, Provenance, Serving, add_variant, onnx_graph
from ingot.model_store.references import name_from, valid_name
from ingot.runtime import devices, load_engine, profile
from ingot.tensors import Array, DType, Range, Signature, TensorSpec, parse_spec, symbols

ExampleInputs = torch.Tensor | Array | Sequence[Any] | Mapping[str, Any]
Progress = Callable[[str], None]
"""Called with what begins now, for a progress display."""


@dataclass(frozen=True)
class _Lowered:
    """An ONNX model, what it must equal, and inputs to ask both."""

    model: ir.Model
    reference: Runner
    signature: Signature
    examples: Examples
    log: tuple[str, ...]


def export_model(
    model: nn.Module | str | Path,
    example_inputs: ExampleInputs | None = None,
    *,
    inputs: str | Sequence[str | TensorSpec] = (),
    output_names: Sequence[str] = (),
    name: str | None = None,
    batch_dim: str | None = None,
    opset: int | None = None,
    source: str = "",
    progress: Progress = lambda step: None,
) -> Archive:
    """Capture a model as an ONNX graph, prove that it equals the original, and pack it.

    Args:
        model: a module, exported as it is in evaluation mode, or the path of an ``.onnx`` file.
        example_inputs: a tensor, a sequence of them in the order of ``forward``, or a mapping by name. Without
            ``inputs``, their first dimension is the batch and all others are fixed.
        inputs: the inputs, such as ``"image:float32[batch,3,224,224]"``; see :func:`ingot.tensors.parse_spec`. Without
            ``example_inputs``, examples are generated from these.
        output_names: names for the outputs, in order.
        name: the archive's; by default the module's class, or the file's stem.
        batch_dim: which named dimension requests may be joined along; by default ``batch``.
        opset: the ONNX operator set; by default the exporter's.
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
    inputs = [inputs] if isinstance(inputs, str) else inputs
    name = valid_name(name or name_from(model.__class__.__name__ if isinstance(model, nn.Module) else Path(model).stem))
    specs, ranges = _parse(inputs)
    if batch_dim is not None and specs:
        _check_batch_dim(batch_dim, specs)
    with _evaluating(model):
        if isinstance(model, nn.Module):
            lowered = _from_module(model, example_inputs, specs, ranges, output_names, opset, progress)
        else:
            if output_names or opset:
                raise InvalidArgument(
                    "an .onnx file keeps its own output names and operator set; leave those options out"
                )
            lowered = _from_onnx(Path(model), example_inputs, specs, ranges, progress)
        signature, notes = _with_batch(lowered, batch_dim)
        return _pack(lowered, signature, name, source or name, (*lowered.log, *notes), progress)


@contextlib.contextmanager
def _evaluating(model: nn.Module | str | Path) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back into the mode it was in."""
    modes = [(part, part.training) for part in model.modules()] if isinstance(model, nn.Module) else []
    try:
        if isinstance(model, nn.Module):
            model.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training


def _parse(inputs: Sequence[str | TensorSpec]) -> tuple[tuple[TensorSpec, ...], dict[str, Range]]:
    specs: list[TensorSpec] = []
    ranges: dict[str, Range] = {}
    for item in inputs:
        spec, stated = parse_spec(item) if isinstance(item, str) else (item, {})
        for symbol, bounds in stated.items():
            if ranges.setdefault(symbol, bounds) != bounds:
                raise InvalidArgument(f"dimension '{symbol}' has two ranges: {ranges[symbol]} and {bounds}")
        if spec.name in {other.name for other in specs}:
            raise InvalidArgument(f"input '{spec.name}' is described twice")
        specs.append(spec)
    return tuple(specs), ranges


def _from_module(
    module: nn.Module,
    example_inputs: ExampleInputs | None,
    specs: tuple[TensorSpec, ...],
    ranges: Mapping[str, Range],
    output_names: Sequence[str],
    opset: int | None,
    progress: Progress,
) -> _Lowered:
    given = None
    if example_inputs is not None:
        given = _named(example_inputs, [spec.name for spec in specs] or list(parameters(module)))
        specs = specs or infer_specs(list(given), given, "batch")
    if not specs:
        raise InvalidArgument(
            "nothing says what the model takes; give inputs (--input), such as image:float32[batch,3,224,224], "
            "or example inputs (--example)"
        )
    examples = Examples(specs, ranges, given)
    eager = Eager(module, [spec.name for spec in specs], output_names)
    example = examples.make(examples.default_sizes)
    progress("Running the model on example inputs")
    eager.run(example)
    progress("Capturing the graph")
    program = exported.capture(eager, specs, ranges, example, output_names)
    _check_names(program.signature)
    progress("Translating to ONNX")
    return _Lowered(lower_onnx.lower(program, opset), eager, program.signature, examples, program.log)


def _check_names(signature: Signature) -> None:
    taken = {spec.name for spec in signature.inputs} & {spec.name for spec in signature.outputs}
    if taken:
        raise InvalidArgument(f"'{min(taken)}' names an input and an output; give the outputs other names")


def _from_onnx(
    path: Path,
    example_inputs: ExampleInputs | None,
    specs: tuple[TensorSpec, ...],
    ranges: Mapping[str, Range],
    progress: Progress,
) -> _Lowered:
    progress("Reading the ONNX model")
    model = onnx_graph.load(path)
    engine = load_engine(path, device="cpu")
    signature = _renamed(engine.signature, specs)
    signature = replace(signature, ranges=dict(ranges))
    given = None if example_inputs is None else _named(example_inputs, [spec.name for spec in signature.inputs])
    return _Lowered(model, engine, signature, Examples(signature.inputs, ranges, given), ())


def _renamed(signature: Signature, specs: Sequence[TensorSpec]) -> Signature:
    """Return a file's signature with the user's names for its dynamic dimensions."""
    by_name = {spec.name: spec for spec in specs}
    names: dict[str, int | str] = {}
    for spec in signature.inputs:
        wanted = by_name.pop(spec.name, None)
        if wanted is None:
            continue
        fits = len(wanted.shape) == len(spec.shape) and wanted.dtype is spec.dtype
        if not fits or any(
            isinstance(have, int) and want != have for want, have in zip(wanted.shape, spec.shape, strict=True)
        ):
            raise InvalidArgument(f"the file's input is {spec}, which {wanted} does not fit")
        for want, have in zip(wanted.shape, spec.shape, strict=True):
            if isinstance(have, str) and names.setdefault(have, want) != want:
                raise InvalidArgument(f"the file's dimension '{have}' is called both '{names[have]}' and '{want}'")
    if by_name:
        known = ", ".join(str(spec) for spec in signature.inputs)
        raise InvalidArgument(f"the file has no input '{next(iter(by_name))}'; it has: {known}")

    def rename(spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=tuple(names.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape))

    batch = names.get(signature.batch, signature.batch) if signature.batch else None
    return Signature(
        tuple(map(rename, signature.inputs)),
        tuple(map(rename, signature.outputs)),
        batch if isinstance(batch, str) else None,
    )


def _named(example_inputs: ExampleInputs, names: Sequence[str]) -> dict[str, Array]:
    """Return example inputs as arrays by name."""
    if isinstance(example_inputs, Mapping):
        items = dict(example_inputs)
    else:
        single = isinstance(example_inputs, torch.Tensor | np.ndarray)
        values = [example_inputs] if single else list(example_inputs)
        if len(values) > len(names):
            raise InvalidArgument(f"{len(values)} example inputs were given, but the model takes {', '.join(names)}")
        items = dict(zip(names, values, strict=False))
    return {key: from_torch(value) if torch.is_tensor(value) else np.asarray(value) for key, value in items.items()}


def _with_batch(lowered: _Lowered, batch_dim: str | None) -> tuple[Signature, tuple[str, ...]]:
    """Decide whether requests may be joined, by the declared dimension and by a proof that rows do not touch."""
    signature = lowered.signature
    batch = batch_dim or ("batch" if "batch" in signature.symbols else signature.batch)
    if batch is None:
        return signature, ("served without batching: no input has a dimension named 'batch'",)
    _check_batch_dim(batch, signature.inputs)
    reason = rows_touch(lowered.reference, signature, batch, lowered.examples)
    if reason is not None:
        return replace(signature, batch=None), (f"served without batching: {reason}",)
    return replace(signature, batch=batch), ()


def _check_batch_dim(batch: str, inputs: Sequence[TensorSpec]) -> None:
    known = symbols(inputs)
    if batch not in known:
        raise InvalidArgument(f"no input has a dimension '{batch}'; the dynamic ones are: {', '.join(known) or 'none'}")


def _pack(
    lowered: _Lowered, signature: Signature, name: str, source: str, log: tuple[str, ...], progress: Progress
) -> Archive:
    blobs = BlobFolder.scratch()
    precision = _precision(lowered.model, signature)
    graph, weights = onnx_graph.pack(lowered.model, blobs)
    with contextlib.closing(load_engine(blobs.path(graph), device="cpu")) as engine:
        progress("Proving that the graph equals the model")
        parity, goldens = prove(lowered.reference, engine, signature, lowered.examples)
        progress("Measuring")
        latency = profile.measure(engine, signature, goldens[0].inputs, budget=0.1)
    serving = Serving(
        name=name,
        variant=precision,
        format="onnx",
        precision=precision,
        signature=signature,
        requires={"engine": "onnxruntime", "opset": str(lowered.model.opset_imports.get("", 0))},
        golden_tolerance=10 * tolerance(signature),
        provenance=Provenance.of(source, ("ingot", "torch", "onnx-ir", "onnxscript"), log),
        evidence=Evidence(machine=devices.describe(), parity=parity, latency=latency),
    )
    return Archive.create(blobs, [add_variant(blobs, serving, graph, weights, goldens)])


def _precision(model: ir.Model, signature: Signature) -> str:
    """Return the type that holds most of the weights' bytes, as variants are called: ``fp32``, ``bf16``, ``int8``."""
    totals: dict[str, int] = {}
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.dtype is not None and value.dtype.is_floating_point():
            label = DType.from_onnx(int(value.dtype)).value.lower()
            totals[label] = totals.get(label, 0) + value.const_value.nbytes
    if totals:
        return max(totals, key=lambda label: totals[label])
    floats = [spec.dtype for spec in signature.inputs if spec.dtype.is_float]
    return floats[0].value.lower() if floats else "fp32"
