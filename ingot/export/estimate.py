"""What a model would take to export and to serve, told without its weights.

The module is built and run on fake tensors: shapes and datatypes without data. A model of 70 billion parameters is
planned in half a gigabyte of memory.

- **Activations** are the most bytes that the inputs and all intermediate results hold at one time while PyTorch runs
  the module operator by operator on a CPU: each tensor from the operator that makes it until the last reference to it
  is gone, views counted once. Weights, scratch memory inside operators and what allocators round up come on top;
  engines that fuse operators need less.
- **FLOPs** are those of matrix products, convolutions, attention and recurrent layers, a multiplication and its
  addition counting two.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ingot.errors import ExportError
from ingot.export import arguments
from ingot.export.capture import exported, ladder, layers
from ingot.export.explain import explain
from ingot.export.lower import program as lower_program
from ingot.export.lower.onnx import outside
from ingot.export.lower.translations import TRANSLATIONS
from ingot.export.program import Eager, Program, quiet
from ingot.export.proof.examples import Examples, infer_specs
from ingot.export.source.subject import Description, Subject, describe
from ingot.export.torch_arrays import from_torch, to_torch
from ingot.export.torch_internals import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    own_buffers,
    own_parameters,
    pytree,
    version,
)
from ingot.report.text import table
from ingot.report.units import count, size
from ingot.tensors import Signature, TensorSpec

BATCHES = (1, 8, 32)
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _recurrent_flops(x: Any, w: Any, r: Any, *rest: Any, **options: Any) -> int:
    """Return the FLOPs of a layer that reads ``x`` [S, B, I] with weights [D, G * H, I] and [D, G * H, H]."""
    return int(2 * x[0] * x[1] * (math.prod(w) + math.prod(r)))


_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.ingot.lstm: _recurrent_flops,
    torch.ops.ingot.gru: _recurrent_flops,
    torch.ops.ingot.rnn: _recurrent_flops,
}
"""What PyTorch's own counter leaves out."""


@dataclass(frozen=True)
class Weights:
    """All parameters or all buffers of one datatype. Tensors that are used in several places count once."""

    kind: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What one run takes; ``sizes`` are those of all named dimensions."""

    sizes: Mapping[str, int]
    flops: int
    activations: int


@dataclass(frozen=True)
class Support:
    """Whether a way through the export is open; ``obstacle`` says why not, or is empty."""

    name: str
    obstacle: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a model would take.

    ``built`` says how its tensors were made: ``fake`` and ``meta`` take no memory, ``real`` had to allocate them.
    ``sizes`` are the bytes of all weights by precision: of floating-point tensors alone, others stay as they are, and
    scales of quantized ones come on top. ``costs`` is empty where the model does not run on fake tensors.
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
    example_inputs: Any = None,
    *,
    inputs: str | Sequence[str | TensorSpec] = (),
    constants: Mapping[str, Any] | None = None,
    batch_dim: str | None = None,
    opset: int | None = None,
) -> Estimate:
    """Measure a model without its weights.

    Args:
        make: builds the module. It is called on fake tensors, and again on real ones if it cannot be built otherwise;
            a module that existed before is measured as it is.
        example_inputs: an example of the inputs, as for :func:`ingot.export.export_model`.
        inputs: the model's inputs, as for an export. Dimensions other than the batch are planned at the highest size of
            their range, or at a small one where there is no bound.
        constants: keywords of ``forward`` that are fixed in the graph.
        batch_dim: the dimension that is planned at several sizes; by default ``batch``.
        opset: the ONNX operator set; by default the exporter's.

    Raises:
        InvalidArgument: nothing says what the model takes, or it does not fit.
        ExportError: the model cannot be built, or is a graph already.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module, built = _build(make, mode)
    modes = [(part, part.training) for part in module.modules()]
    notes = []
    if built == "real":
        notes.append("the weights had to be made: the model cannot be built on fake tensors, or existed already")
    try:
        module.eval()
        description = describe(module, example_inputs, inputs, constants)
        notes += description.notes
        subject = bind(module, description)
        costs: tuple[Cost, ...] = ()
        try:
            costs = tuple(_measure(subject, sizes, mode) for sizes in _cases(subject, batch_dim or "batch"))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            notes.append(f"the model does not run on fake tensors: {explain(error, module)}")
        notes += _changes(subject, mode)
        routes, formats = _try(subject, mode, opset)
    finally:
        for part, training in modes:
            part.training = training
    return Estimate(built, _weigh(module), _sizes(module), costs, routes, formats, tuple(notes))


def _build(make: Callable[[], nn.Module], mode: FakeTensorMode) -> tuple[nn.Module, str]:
    """Build a module of fake tensors on the CPU, and say how."""
    for how, context in (("fake", mode), ("meta", torch.device("meta"))):
        # Whatever is raised without data may not be with it: real weights are the last resort.
        with contextlib.suppress(Exception):
            with quiet(), context:
                module = make()
            return _faked(module, mode), how if _has_no_data(module) else "real"
    return _faked(make(), mode), "real"


def _has_no_data(module: nn.Module) -> bool:
    return all(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in _tensors(module))


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _faked(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a module's copy of fake tensors, all of them on the CPU."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ExportError("a TorchScript model holds its weights; a plan needs the code that makes it")
    with FakeCopyMode(mode):
        copied = copy.deepcopy(module)
    moved: dict[int, torch.Tensor] = {}
    for part in copied.modules():
        for own in (own_parameters(part), own_buffers(part)):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = moved.setdefault(id(tensor), _on_cpu(tensor, mode))  # type: ignore[assignment]
    return copied


def _on_cpu(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def bind(module: nn.Module, description: Description) -> Subject:
    """Bind a description to a module, as for an export, but without running it.

    Raises:
        InvalidArgument: the description does not fit the module.
    """
    inputs, ranges = description.inputs, description.ranges
    if description.example is None:
        call = arguments.from_names(module, [spec.name for spec in inputs], description.constants)
        return Subject(Eager(module, call), inputs, ranges, Examples(inputs, ranges), ())
    call, tensors = arguments.from_example(module, description.example, description.constants)
    if inputs:
        return Subject(Eager(module, call), inputs, ranges, Examples(inputs, ranges), ())
    given = {name: from_torch(tensor) for name, tensor in tensors.items()}
    specs = infer_specs(call.names, given, "batch")
    return Subject(Eager(module, call), specs, ranges, Examples(specs, ranges, given), ())


def _fakes(subject: Subject, sizes: Mapping[str, int], mode: FakeTensorMode) -> tuple[torch.Tensor, ...]:
    arrays = subject.examples.make(sizes)
    return tuple(mode.from_tensor(to_torch(arrays[spec.name])) for spec in subject.inputs)


def _cases(subject: Subject, batch: str) -> list[dict[str, int]]:
    """Return sizes of all dimensions, one set for each batch."""
    signature = Signature(subject.inputs, (), ranges=subject.ranges)
    highest = {name: signature.range(name).high for name in signature.symbols}
    sizes = {name: highest[name] or size for name, size in subject.examples.default_sizes.items()}
    if batch not in sizes:
        return [sizes]
    wanted = [rows for rows in BATCHES if rows in signature.range(batch)] or [signature.range(batch).low]
    return [{**sizes, batch: rows} for rows in wanted]


def _measure(subject: Subject, sizes: Mapping[str, int], mode: FakeTensorMode) -> Cost:
    tensors = _fakes(subject, sizes, mode)
    args, kwargs = subject.eager.arguments.bind(tensors)
    flops = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    memory = _Memory(tensors, _tensors(subject.eager.module))
    with quiet(), torch.no_grad(), layers.dynamic(subject.eager.module), mode, memory, flops:
        subject.eager.module(*args, **kwargs)
    return Cost(dict(sizes), flops.get_total_flops(), memory.peak)


def _changes(subject: Subject, mode: FakeTensorMode) -> list[str]:
    """Run a module's copy on fake tensors and tell what it writes to. A captured graph would not know all of it:

    PyTorch's capture drops a buffer that is replaced by another tensor.
    """
    tensors = _fakes(subject, subject.examples.default_sizes, mode)
    args, kwargs = subject.eager.arguments.bind(tensors)
    with FakeCopyMode(mode):
        module = copy.deepcopy(subject.eager.module)
    parameters = dict(module.named_parameters())
    states = {**dict(module.named_buffers()), **dict(zip(subject.eager.names, tensors, strict=True))}
    versions = {name: version(tensor) for name, tensor in (parameters | states).items()}
    with contextlib.suppress(Exception), quiet(), torch.no_grad(), layers.dynamic(module), mode:
        module(*args, **kwargs)  # if it raises, a note has told of it
    now = states | dict(module.named_buffers())
    changed = [name for name in states if now[name] is not states[name] or version(now[name]) != versions[name]]
    notes = [
        f"the model changes its parameter {name} while it runs; make it a buffer"
        for name in parameters
        if version(parameters[name]) != versions[name]
    ]
    if changed:
        notes.append(f"the model changes {', '.join(changed)} while it runs: --lift-state makes it inputs and outputs")
    return notes


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory that tensors hold: added when an operator makes one, taken off when nothing refers to it."""

    def __init__(self, inputs: Sequence[torch.Tensor], weights: Iterator[torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in weights)
        self._now = self.peak = 0
        for tensor in inputs:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor):
                self._add(output)
        return outputs

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._alive:
            return
        self._alive.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._take_off, size)
        self._now += size
        self.peak = max(self.peak, self._now)

    def _take_off(self, size: int) -> None:
        self._now -= size


def _try(subject: Subject, mode: FakeTensorMode, opset: int | None) -> tuple[tuple[Support, ...], tuple[Support, ...]]:
    """Capture the module of fake tensors by the first route that can, and see which formats that may have."""
    tensors = _fakes(subject, subject.examples.default_sizes, mode)
    module = subject.eager.module
    routes = []
    for name, options in ladder.EXPORTS.items():
        try:
            with layers.dynamic(module):
                captured = exported.trace(subject.eager.flat(), subject.inputs, subject.ranges, tensors, **options)
            missing = outside(captured, opset, TRANSLATIONS)
        except Exception as error:  # noqa: BLE001 - torch.export raises many kinds
            routes.append(Support(name, str(explain(error, module))))
            continue
        onnx = f"operators without an ONNX form: {', '.join(missing)}" if missing else ""
        own, foreign = _own_operators(Program(captured, Signature(subject.inputs, ())))
        aoti = own or (f"operators that cannot be compiled: {', '.join(foreign)}" if foreign else "")
        return (*routes, Support(name)), (Support("onnx", onnx), Support("aoti", aoti), Support("pt2", own))
    closed = "no route captures the model"
    return tuple(routes), tuple(Support(name, closed) for name in ("onnx", "aoti", "pt2"))


def _own_operators(program: Program) -> tuple[str, tuple[str, ...]]:
    """Return why the operators that PyTorch does not have cannot be written out, and the names of those that stay."""
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
    floats = sum(tensor.numel() for tensor in _tensors(module) if tensor.is_floating_point())
    others = sum(
        tensor.numel() * tensor.element_size() for tensor in _tensors(module) if not tensor.is_floating_point()
    )
    return {name: floats * bits // 8 + others for name, bits in BITS.items()}


def lines(plan: Estimate) -> list[str]:
    """Return a plan as text."""
    text = ["Weights"]
    text += table(
        [
            (item.kind, item.dtype, f"{count(item.elements)} in {item.tensors} tensors", size(item.bytes))
            for item in plan.weights
        ]
    )
    text += ["", "Size of the weights by precision", *table([(name, size(most)) for name, most in plan.sizes.items()])]
    if plan.costs:
        head = (*plan.costs[0].sizes, "activations", "FLOPs")
        rows = [(*map(str, cost.sizes.values()), size(cost.activations), count(cost.flops)) for cost in plan.costs]
        text += ["", "One run", *table([head, *rows])]
    for title, ways in (("Capture", plan.routes), ("Formats", plan.formats)):
        text += ["", title, *_ways(ways)]
    built = {"fake": "on fake tensors", "meta": "on the meta device", "real": "with real weights"}[plan.built]
    return [*text, "", f"The model was built {built}.", *(f"note: {note}" for note in plan.notes)]


def _ways(ways: Sequence[Support]) -> list[str]:
    """Return a line for each way; an obstacle that several have is told once."""
    told: dict[str, str] = {}
    rows = []
    for way in ways:
        first = told.setdefault(way.obstacle, way.name)
        repeated = bool(way.obstacle) and first != way.name
        rows.append(f"  {way.name}: {f'the same as {first}' if repeated else way.obstacle or 'possible'}")
    return rows
