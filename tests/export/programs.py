"""Captured programs and archives of them, for the tests of lowerings and of the engines that run them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ingot.export.arguments import from_names
from ingot.export.capture import exported
from ingot.export.lower.packed import Packed
from ingot.export.program import Eager, Program
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import prove
from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, add_variant
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.tensors import parse_spec


class Case(NamedTuple):
    """A model, its captured program, and inputs for both."""

    eager: Eager
    program: Program
    examples: Examples


class Lowered(NamedTuple):
    """A model, and the blobs that it was lowered to."""

    case: Case
    packed: Packed
    blobs: BlobFolder

    def engine(self, device: str = "cpu", threads: int | None = 1) -> Engine:
        path = self.blobs.path(self.packed.graph)
        return load_engine(EngineSpec(path, format=self.packed.format, device=device, threads=threads, allow_code=True))

    def errors(self) -> dict[str, float]:
        """Return the largest error of each output over all sizes; fail beyond the tolerance."""
        engine = self.engine()
        try:
            evidence, _ = prove(self.case.eager, engine, self.case.program.signature, self.case.examples)
        finally:
            engine.close()
        return {item.tensor: item.error for item in evidence}


class Returning(nn.Module):
    """Returns its weights, its input and one value twice, as they are and as views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 3))
        self.constant = torch.ones(3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * 2
        rows = self.weight[: x.shape[0]]
        known = {"weight": self.weight, "view": self.weight[1:], "rows": rows, "constant": self.constant}
        return {**known, "same": x, "flat": x.view(-1), "y": y, "again": y, "flat_y": y.view(-1), "part": y[:, :2]}


def shared(engine: Engine) -> set[str]:
    """Return the outputs of :class:`Returning` that share memory with something else."""
    found = set()
    for spec in engine.signature.outputs:
        x = np.ones((2, 3), np.float32)
        answer = engine.run({"x": x})
        expected = {name: array.copy() for name, array in answer.items()}
        answer[spec.name][...] = 7
        later = engine.run({"x": np.ones((2, 3), np.float32)})
        others = [np.array_equal(answer[name], expected[name]) for name in answer if name != spec.name]
        if not (all(others) and (x == 1).all() and all(np.array_equal(later[name], expected[name]) for name in later)):
            found.add(spec.name)
    return found


def capture(module: nn.Module, *inputs: str) -> Case:
    """Capture a module whose inputs are described as for ``ingot export``; ``batch`` is the batch."""
    parsed = [parse_spec(text) for text in inputs]
    specs = tuple(spec for spec, _ in parsed)
    ranges = {symbol: bounds for _, stated in parsed for symbol, bounds in stated.items()}
    eager = Eager(module.eval(), from_names(module, [spec.name for spec in specs], {}))
    examples = Examples(specs, ranges)
    example = examples.make(examples.default_sizes)
    traced = exported.trace(eager.flat(), specs, ranges, eager.tensors(example))
    return Case(eager, exported.program(traced, specs, ranges, tuple(eager.run(example))), examples)


def archive(lowered: Lowered, batch: str | None = "batch") -> Archive:
    """Return an archive of one variant, with one golden case."""
    case, packed, blobs = lowered
    inputs = case.examples.make(case.examples.default_sizes)
    signature = case.program.signature
    serving = Serving(
        name="model",
        variant="fp32",
        format=packed.format,
        precision="fp32",
        signature=type(signature)(signature.inputs, signature.outputs, batch, signature.ranges),
        requires=packed.requires,
        golden_tolerance=1e-3,
        provenance=Provenance(source="tests", created="2026-01-02T03:04:05Z"),
    )
    golden = Golden(inputs, case.eager.run(inputs))
    return Archive.create(blobs, [add_variant(blobs, serving, packed.graph, packed.weights, [golden])])
