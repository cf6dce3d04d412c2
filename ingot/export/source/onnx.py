"""An ONNX file as the source of an export."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ingot.errors import ExportError, InvalidArgument, NotFound, ParityError
from ingot.export import arguments
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import Remembered, unrepeated
from ingot.export.source import onnx_sizes
from ingot.model_store.format import onnx_graph
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.ort import ort_zipmap
from ingot.runtime.engines.pytorch.torch_arrays import from_torch
from ingot.tensors import Array, Range, Signature, TensorSpec, dim_name


@dataclass(frozen=True)
class OnnxSource:
    """A file's model, a runner of the unchanged file, example inputs for both, and notes on these."""

    model: ir.Model
    file: Runner
    signature: Signature
    examples: Examples
    notes: tuple[str, ...] = ()


def read(path: Path, example_inputs: object, inputs: Sequence[TensorSpec], ranges: Mapping[str, Range]) -> OnnxSource:
    """Read a file, with the names of its dynamic dimensions from ``inputs``.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not an ONNX model, or the description or the examples do not fit it.
        ExportError: it does not run on the examples.
        ParityError: its outputs differ for the same input.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    engine = load_engine(EngineSpec(path, device="cpu"))
    cut = ort_zipmap.cut(path)
    model = onnx_graph.load(path) if cut is None else ir.serde.deserialize_model(onnx.load_model_from_string(cut.graph))
    signature = _renamed(engine.signature, inputs)
    if len(signature.inputs) == 1:
        signature = replace(signature, inputs=tuple(map(_with_batch, signature.inputs)))
    names = [spec.name for spec in signature.inputs]
    example_inputs, notes = arguments.inputs_among(example_inputs, names)
    given = None if example_inputs is None else _named(example_inputs, names)
    file = Remembered(onnx_sizes.File(engine, generated=given is None))
    examples = Examples(signature.inputs, ranges, given, onnx_sizes.index_limits(model))
    if given is None:
        examples, found = _fitted(file, examples)
        notes = (*notes, *found)
    if (output := unrepeated(file, examples)) is not None:
        raise ParityError(f"the model returns different '{output}' for the same input each time")
    bounds = {dim: sizes for dim, sizes in examples.ranges.items() if dim in ranges or sizes != Range()}
    signature = replace(signature, inputs=examples.inputs, ranges=bounds)
    signature = onnx_sizes.with_outputs(file, signature, examples)
    _complete(model, signature)
    return OnnxSource(model, file, signature, examples, (*notes, *(cut.notes if cut is not None else ())))


def _fitted(file: Runner, examples: Examples) -> tuple[Examples, tuple[str, ...]]:
    """Return examples that a file runs on, and notes on its sizes.

    First dimensions without a name become ``batch`` if the file does not run with different ones.
    """
    batched = examples.called(tuple(map(_with_batch, examples.inputs)))
    try:
        return onnx_sizes.fitted(file, examples)
    except ExportError:
        if batched.inputs == examples.inputs:
            raise
        with contextlib.suppress(ExportError):
            return onnx_sizes.fitted(file, batched)
        raise


def _with_batch(spec: TensorSpec) -> TensorSpec:
    """Name an unnamed first dimension ``batch``. Whether requests may share a batch along it is proved later."""
    named = not spec.shape or spec.shape[0] != dim_name(spec.name, 0) or "batch" in spec.shape
    return spec if named else replace(spec, shape=("batch", *spec.shape[1:]))


def _complete(model: ir.Model, signature: Signature) -> None:
    """Set the shapes of outputs of a graph that have none, so that engines report their rank."""
    for value, spec in zip(model.graph.outputs, signature.outputs, strict=True):
        if value.shape is None:
            value.shape = ir.Shape(spec.shape)


def _renamed(signature: Signature, specs: Sequence[TensorSpec]) -> Signature:
    """Return a file's signature with the user's names for its dynamic dimensions, and ranges of values."""
    by_name = {spec.name: spec for spec in specs}
    values = {spec.name: spec.values for spec in specs}
    names: dict[str, int | str] = {}
    for spec in signature.inputs:
        wanted = by_name.pop(spec.name, None)
        if wanted is None:
            continue
        fits = len(wanted.shape) == len(spec.shape) and wanted.dtype is spec.dtype
        if not fits or any(
            isinstance(have, int) and want != have for want, have in zip(wanted.shape, spec.shape, strict=True)
        ):
            raise InvalidArgument(f"the file's input is {spec}, which does not fit the declared {wanted}")
        for want, have in zip(wanted.shape, spec.shape, strict=True):
            if isinstance(have, str) and names.setdefault(have, want) != want:
                raise InvalidArgument(f"the file's dimension '{have}' is called both '{names[have]}' and '{want}'")
    if by_name:
        known = ", ".join(str(spec) for spec in signature.inputs)
        raise InvalidArgument(f"the file has no input '{next(iter(by_name))}'; it has: {known}")

    def rename(spec: TensorSpec) -> TensorSpec:
        shape = tuple(names.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape)
        return replace(spec, shape=shape)

    batch = names.get(signature.batch, signature.batch) if signature.batch else None
    return Signature(
        tuple(replace(rename(spec), values=values.get(spec.name)) for spec in signature.inputs),
        tuple(map(rename, signature.outputs)),
        batch if isinstance(batch, str) else None,
    )


def _named(example_inputs: Any, names: Sequence[str]) -> dict[str, Array]:
    """Return example inputs as arrays by name."""
    if isinstance(example_inputs, Mapping):
        items = dict(example_inputs)
    else:
        single = isinstance(example_inputs, torch.Tensor | np.ndarray)
        values = [example_inputs] if single else list(example_inputs)
        if len(values) > len(names):
            raise InvalidArgument(f"there are {len(values)} example inputs, but the model has {', '.join(names)}")
        items = dict(zip(names, values, strict=False))
    return {key: from_torch(value) if torch.is_tensor(value) else np.asarray(value) for key, value in items.items()}
