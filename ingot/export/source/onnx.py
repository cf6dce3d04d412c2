"""An ONNX file as the source of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ingot.errors import InvalidArgument
from ingot.export import arguments
from ingot.export.proof.examples import Examples
from ingot.export.torch_arrays import from_torch
from ingot.model_store import onnx_graph
from ingot.runtime import load_engine
from ingot.runtime.engine import Engine
from ingot.tensors import Array, Range, Signature, TensorSpec


@dataclass(frozen=True)
class OnnxSource:
    """A file's model, the engine that runs the file as it is, inputs to ask both, and remarks on these."""

    model: ir.Model
    engine: Engine
    signature: Signature
    examples: Examples
    notes: tuple[str, ...] = ()


def read(path: Path, example_inputs: Any, inputs: Sequence[TensorSpec], ranges: Mapping[str, Range]) -> OnnxSource:
    """Read a file, its dynamic dimensions called as ``inputs`` says.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is no ONNX model, or the description or the examples do not fit it.
    """
    model = onnx_graph.load(path)
    engine = load_engine(path, device="cpu")
    signature = replace(_renamed(engine.signature, inputs), ranges=dict(ranges))
    names = [spec.name for spec in signature.inputs]
    example_inputs, notes = arguments.inputs_among(example_inputs, names)
    given = None if example_inputs is None else _named(example_inputs, names)
    return OnnxSource(model, engine, signature, Examples(signature.inputs, ranges, given), notes)


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


def _named(example_inputs: Any, names: Sequence[str]) -> dict[str, Array]:
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
