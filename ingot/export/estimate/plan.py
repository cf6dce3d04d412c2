"""The estimate of a model: its weights, its cost at several batch sizes, and the routes and formats open to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.capture import exported, functions
from ingot.export.capture.routes import EXPORTS
from ingot.export.estimate import cost
from ingot.export.estimate.cost import Cost
from ingot.export.explain import explain
from ingot.export.lower import program as lower_program
from ingot.export.lower.forms.translations import TRANSLATIONS
from ingot.export.lower.onnx import outside
from ingot.export.program import Program
from ingot.export.snapshot import untouched
from ingot.export.source.subject import Subject, bind, describe
from ingot.export.torch_internals import FakeTensorMode
from ingot.report.text import table
from ingot.report.units import count, size
from ingot.tensors import Signature, TensorSpec

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Weights:
    """All parameters or all buffers of one datatype; shared tensors count once."""

    kind: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Support:
    """A capture route or a format; ``obstacle`` is why it is not possible, or empty."""

    name: str
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated requirements of a model.

    Attributes:
        built: how its tensors were made; see :func:`ingot.export.estimate.cost.build`.
        weights: parameters and buffers by datatype.
        sizes: bytes of all weights by precision of the floating-point ones, without the scales of quantized ones.
        costs: at several batch sizes; empty if the model does not run on fake tensors.
        routes: capture routes, up to the first that works.
        formats: what the model can become.
        notes: remarks for the user.
    """

    built: str
    weights: tuple[Weights, ...]
    sizes: Mapping[str, int]
    costs: tuple[Cost, ...]
    routes: tuple[Support, ...]
    formats: tuple[Support, ...]
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(item.elements for item in self.weights if item.kind == "parameters")


def plan(
    make: Callable[[], nn.Module],
    example_inputs: object = None,
    *,
    inputs: str | Sequence[str | TensorSpec] = (),
    constants: Mapping[str, Any] | None = None,
    batch_dim: str | None = None,
    opset: int | None = None,
) -> Estimate:
    """Estimate a model without its weights.

    Args:
        make: builds the module. It is called on fake tensors, and again on real ones if that fails. It may also return
            a module that exists already.
        example_inputs: an example of the inputs, as for :func:`ingot.export.export_model`.
        inputs: the model's inputs, as for an export. Dimensions other than the batch are measured at the highest size
            of their range, or at a small one where there is no bound.
        constants: keywords of ``forward`` that are fixed in the graph.
        batch_dim: the dimension that is measured at several sizes; by default ``batch``.
        opset: the ONNX operator set; by default the exporter's.

    Raises:
        InvalidArgument: the inputs are not described, or the description does not fit.
        ExportError: the model cannot be built, or is a graph already.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module, built = cost.build(make, mode)
    notes = []
    if built == "real":
        notes.append("the weights were allocated: the model cannot be built on fake tensors, or existed already")
    with untouched(module) if built == "real" else contextlib.nullcontext():
        module.eval()
        description = describe(module, example_inputs, inputs, constants)
        notes += description.notes
        subject = bind(module, description)

        def measure() -> tuple[Cost, ...]:
            return tuple(cost.measure(subject, sizes, mode) for sizes in cost.cases(subject, batch_dim or "batch"))

        costs = foreign.outcome(measure)
        if isinstance(costs, Exception):
            notes.append(f"the model does not run on fake tensors: {explain(costs, module)}")
            costs = ()
        notes += cost.writes(subject, mode)
        routes, formats = _try(subject, mode, opset)
    return Estimate(
        built=built,
        weights=_weigh(module),
        sizes=_sizes(module),
        costs=costs,
        routes=routes,
        formats=formats,
        notes=tuple(notes),
    )


def _try(subject: Subject, mode: FakeTensorMode, opset: int | None) -> tuple[tuple[Support, ...], tuple[Support, ...]]:
    """Capture a module of fake tensors by the first route that can, and return which formats the graph can have."""
    tensors = cost.fake_inputs(subject, subject.examples.default_sizes, mode)
    module = subject.eager.module
    routes = []

    def capture(options: Mapping[str, bool]) -> tuple[torch.export.ExportedProgram, Sequence[str]]:
        with functions.dynamic(module):
            captured = exported.trace(subject.eager.flat(), subject.inputs, subject.ranges, tensors, **options)
        return captured, outside(captured, opset, TRANSLATIONS)

    for name, options in EXPORTS.items():
        found = foreign.outcome(functools.partial(capture, options))
        if isinstance(found, Exception):
            routes.append(Support(name, str(explain(found, module))))
            continue
        captured, missing = found
        onnx = f"operators without an ONNX form: {', '.join(missing)}" if missing else ""
        own, remaining = _own_operators(Program(captured, Signature(subject.inputs, ())))
        aoti = own or (f"operators that cannot be compiled: {', '.join(remaining)}" if remaining else "")
        return (*routes, Support(name)), (Support("onnx", onnx), Support("aoti", aoti), Support("pt2", own))
    closed = "no route captures the model"
    return tuple(routes), tuple(Support(name, closed) for name in ("onnx", "aoti", "pt2"))


def _own_operators(program: Program) -> tuple[str, tuple[str, ...]]:
    """Return why operators from outside PyTorch cannot be inlined, or which of them remain after inlining."""
    try:
        return "", tuple(lower_program.foreign_operators(lower_program.inlined(program)))
    except ExportError as error:
        return str(error), ()


def _weigh(module: nn.Module) -> tuple[Weights, ...]:
    rows: dict[tuple[str, str], Weights] = {}
    for kind, tensors in (("parameters", module.parameters()), ("buffers", module.buffers())):
        for tensor in tensors:
            key = kind, str(tensor.dtype).removeprefix("torch.")
            row = rows.get(key, Weights(*key, 0, 0, 0))
            rows[key] = replace(
                row,
                tensors=row.tensors + 1,
                elements=row.elements + tensor.numel(),
                bytes=row.bytes + tensor.numel() * tensor.element_size(),
            )
    return tuple(rows.values())


def _sizes(module: nn.Module) -> dict[str, int]:
    floats = sum(tensor.numel() for tensor in cost.tensors_of(module) if tensor.is_floating_point())
    others = sum(
        tensor.numel() * tensor.element_size() for tensor in cost.tensors_of(module) if not tensor.is_floating_point()
    )
    return {name: floats * bits // 8 + others for name, bits in BITS.items()}


def lines(estimate: Estimate) -> list[str]:
    """Return an estimate as text."""
    text = ["Weights"]
    text += table(
        [
            (item.kind, item.dtype, f"{count(item.elements)} in {item.tensors} tensors", size(item.bytes))
            for item in estimate.weights
        ]
    )
    text += [
        "",
        "Size of the weights by precision",
        *table([(name, size(most)) for name, most in estimate.sizes.items()]),
    ]
    if estimate.costs:
        head = (*estimate.costs[0].sizes, "activations", "FLOPs")
        rows = [(*map(str, item.sizes.values()), size(item.activations), count(item.flops)) for item in estimate.costs]
        text += ["", "One run", *table([head, *rows])]
    for title, ways in (("Capture", estimate.routes), ("Formats", estimate.formats)):
        text += ["", title, *_ways(ways)]
    built = {"fake": "on fake tensors", "meta": "on the meta device", "real": "with real weights"}[estimate.built]
    return [*text, "", f"The model was built {built}.", *(f"note: {note}" for note in estimate.notes)]


def _ways(ways: Sequence[Support]) -> list[str]:
    """Return one line per way; a repeated obstacle refers to the first way that has it."""
    seen: dict[str, str] = {}
    rows = []
    for way in ways:
        first = seen.setdefault(way.obstacle, way.name)
        repeated = bool(way.obstacle) and first != way.name
        rows.append(f"  {way.name}: {f'the same as {first}' if repeated else way.obstacle or 'possible'}")
    return rows
