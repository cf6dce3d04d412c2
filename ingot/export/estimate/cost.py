"""FLOPs and memory of one run of a module on fake tensors.

- **Activations** are the most bytes that the inputs and all intermediate results hold at one time while PyTorch runs
  the module operator by operator on a CPU. Each tensor counts from the operator that makes it until its last reference
  is gone, and views count once. Weights, scratch memory inside operators and the rounding of allocators come on top.
  Engines that fuse operators need less.
- **FLOPs** are those of matrix products, convolutions, attention and recurrent layers. A multiplication and its
  addition count as two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.capture import exported, functions
from ingot.export.program import Program, quiet
from ingot.export.source.subject import Subject
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
from ingot.model_store import MemoryEvidence
from ingot.tensors import Signature

BATCHES = (1, 8, 32)


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
"""Operators that PyTorch's own counter leaves out."""


@dataclass(frozen=True)
class Cost:
    """One run at some ``sizes`` of the named dimensions: FLOPs, and bytes of activations."""

    sizes: Mapping[str, int]
    flops: int
    activations: int


def build(make: Callable[[], nn.Module], mode: FakeTensorMode) -> tuple[nn.Module, str]:
    """Build a module of fake tensors on the CPU.

    Returns:
        The module, and how it was built: on ``fake`` tensors, on the ``meta`` device, or with ``real`` weights.

    Raises:
        ExportError: it is a TorchScript model.
    """

    def without_data(how: str, context: contextlib.AbstractContextManager[Any]) -> tuple[nn.Module, str]:
        with quiet(), context:
            module = make()
        return _faked(module, mode), how if _has_no_data(module) else "real"

    for how, context in (("fake", mode), ("meta", torch.device("meta"))):
        # Code that fails without data may run with it, so real weights are the last resort.
        found = foreign.attempt(functools.partial(without_data, how, context))
        if found is not None:
            return found
    return _faked(make(), mode), "real"


def _has_no_data(module: nn.Module) -> bool:
    return all(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors_of(module))


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def _faked(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a module with fake tensors on the CPU."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ExportError("a TorchScript model has its weights already; an estimate needs the code that builds it")
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


def fake_inputs(subject: Subject, sizes: Mapping[str, int], mode: FakeTensorMode) -> tuple[torch.Tensor, ...]:
    """Return fake tensors for all inputs of a module, which have no values and take no memory."""
    shapes = [[dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape] for spec in subject.inputs]
    types = [getattr(torch, spec.dtype.torch_name) for spec in subject.inputs]
    with mode:
        return tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in zip(shapes, types, strict=True))


def cases(subject: Subject, batch: str, *, highest: bool = True) -> list[dict[str, int]]:
    """Return the sizes to measure at: several of the batch; of other dimensions the highest of their range, or one."""
    signature = Signature(subject.inputs, (), ranges=subject.ranges)
    ends = {name: signature.range(name).high if highest else None for name in signature.symbols}
    sizes = {name: ends[name] or size for name, size in subject.examples.default_sizes.items()}
    if batch not in sizes:
        return [sizes]
    wanted = [rows for rows in BATCHES if rows in signature.range(batch)] or [signature.range(batch).low]
    return [{**sizes, batch: rows} for rows in wanted]


def measure(subject: Subject, sizes: Mapping[str, int], mode: FakeTensorMode) -> Cost:
    """Run a module once and count."""
    tensors = fake_inputs(subject, sizes, mode)
    args, kwargs = subject.eager.arguments.bind(tensors)
    flops = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    memory = _Memory(tensors, tensors_of(subject.eager.module))
    with quiet(), torch.no_grad(), functions.dynamic(subject.eager.module), mode, memory, flops:
        subject.eager.module(*args, **kwargs)
    return Cost(dict(sizes), flops.get_total_flops(), memory.peak)


def plan_memory(program: Program, subject: Subject, batch: str) -> MemoryEvidence:
    """Plan the memory of calls of a captured graph, as a linear function of the batch.

    The graph runs on fake tensors at several sizes of the batch. Each result counts until its last use.

    Raises:
        Exception: the graph does not run on fake tensors, as where values become sizes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet():
        graph = _faked(exported.unguarded(program.exported), mode)
    peaks: dict[int, int] = {}
    for sizes in cases(subject, batch, highest=False):
        tensors = fake_inputs(subject, sizes, mode)
        memory = _Memory(tensors, tensors_of(graph))
        with quiet(), torch.no_grad(), mode, memory:
            graph(*tensors)
        peaks[sizes.get(batch, 1)] = memory.peak
    fewest, most = min(peaks), max(peaks)
    slope = -((peaks[fewest] - peaks[most]) // (most - fewest)) if most > fewest else 0
    # No size that was tried takes more than the plan.
    return MemoryEvidence(fixed=max(0, *(peak - slope * rows for rows, peak in peaks.items())), per_row=max(0, slope))


def writes(subject: Subject, mode: FakeTensorMode) -> list[str]:
    """Run a copy of a module, and return remarks on the state that it writes to.

    A captured graph does not show all of it: ``torch.export`` drops a buffer that the code replaces.
    """
    tensors = fake_inputs(subject, subject.examples.default_sizes, mode)
    args, kwargs = subject.eager.arguments.bind(tensors)
    with FakeCopyMode(mode):
        module = copy.deepcopy(subject.eager.module)
    parameters = dict(module.named_parameters())
    states = {**dict(module.named_buffers()), **dict(zip(subject.eager.names, tensors, strict=True))}
    versions = {name: version(tensor) for name, tensor in (parameters | states).items()}

    def run() -> None:
        with quiet(), torch.no_grad(), functions.dynamic(module), mode:
            module(*args, **kwargs)

    foreign.attempt(run)  # a failure is already in the notes
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
    """Tracks the bytes of live tensors: added when an operator makes one, removed with its last reference."""

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
        weakref.finalize(storage, self._remove, size)
        self._now += size
        self.peak = max(self.peak, self._now)

    def _remove(self, size: int) -> None:
        self._now -= size
