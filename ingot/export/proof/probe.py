"""Observations of a running model: its work, the rows of its embeddings, and the shapes of its outputs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ingot.errors import ExportError
from ingot.export.program import Eager, Runner
from ingot.export.proof.examples import Examples, Limit
from ingot.tensors import Array, DType, TensorSpec

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@contextlib.contextmanager
def counting(module: nn.Module) -> Iterator[list[float]]:
    """Yield a list that collects the FLOPs of each call of a layer with weights; other products are not counted."""
    counts: list[float] = []

    def count(layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        weight: Any = layer.weight
        transposed = isinstance(layer, _LAYERS[-3:])
        value = args[0] if transposed and args else output
        if torch.is_tensor(value) and weight.ndim > 1:
            counts.append(2.0 * weight.numel() * value.numel() / weight.shape[0])

    handles = [part.register_forward_hook(count) for part in module.modules() if isinstance(part, _LAYERS)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def index_limits(eager: Eager, inputs: Mapping[str, Array]) -> dict[str, Limit]:
    """Run a model once and return the number of rows of the embeddings that its integer inputs index."""
    tensors = eager.tensors(inputs)
    whole = {id(tensor): name for name, tensor in zip(eager.names, tensors, strict=True)}
    found: dict[str, int] = {}

    def watch(part: nn.Module, args: tuple[Any, ...]) -> None:
        name = whole.get(id(args[0])) if args else None
        if name is not None:
            rows = int(part.num_embeddings)  # type: ignore[arg-type]
            found[name] = min(rows, found.get(name, rows))

    layers = [part for part in eager.module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    if not layers:
        return {}
    handles = [part.register_forward_pre_hook(watch, prepend=True) for part in layers]
    try:
        args, kwargs = eager.arguments.bind(tensors)
        with eager.undone(), torch.no_grad():
            eager.module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: Limit(rows) for name, rows in found.items()}


def output_specs(runner: Runner, examples: Examples, budget: float = 60.0) -> tuple[TensorSpec, ...]:
    """Describe a model's outputs by running it at several sizes, for graphs without output shapes.

    A dimension that always has the size of a named dimension gets its name; one that varies otherwise gets a new name.
    After ``budget`` seconds no further case begins, except the first three. The cases are those of the proof of parity.
    """
    cases: list[Mapping[str, int]] = []
    runs: list[dict[str, Array]] = []
    end = time.monotonic() + budget
    for seed, sizes in enumerate(examples.cases()):
        if len(cases) >= 3 and time.monotonic() > end:
            break
        try:
            runs.append(runner.run(examples.make(sizes, seed)))
        except ExportError:
            if not runs or not examples.stretched:
                raise
            try:
                runs.append(runner.run(examples.make(sizes, seed, varied=False)))
            except ExportError:
                continue
        cases.append(sizes)
    specs = []
    for name, value in runs[0].items():
        shape: list[int | str] = []
        for axis in range(value.ndim):
            seen = [run[name].shape[axis] for run in runs]
            symbols = [symbol for symbol in cases[0] if seen == [sizes[symbol] for sizes in cases]]
            fixed = len(set(seen)) == 1 and (len(cases) > 1 or not cases[0])
            shape.append(symbols[0] if symbols else seen[0] if fixed else f"{name}_{axis}")
        specs.append(TensorSpec(name, DType.of(value), tuple(shape)))
    return tuple(specs)
