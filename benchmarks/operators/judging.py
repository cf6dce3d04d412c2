"""Judge an exported group of samples by eager, output by output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.coverage.case import Case, Fill, Tensors
from benchmarks.coverage.judge import Broken, Candidate, Wrong, compare
from benchmarks.operators import accepted, values
from benchmarks.operators.samples import Call, Sample, as_numpy_has_it, run
from ingot.tensors import Array, DType

# As in the proofs of most exporters, and small against the errors that matter.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SIZES = (4, 7, 3, 33, 1)
"""Sizes of the dynamic dimension: the example's, then those of the first values; attacks have the largest."""
LEAST = 4


class Group(nn.Module):
    """Samples that are exported together: a module with the outputs of all of them."""

    def __init__(self, samples: Sequence[Sample]):
        super().__init__()
        self.parts = nn.ModuleList(sample.build() for sample in samples)
        self.counts = [len(sample.tensors) for sample in samples]

    def forward(self, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call every sample with its own tensors."""
        rest = iter(x)
        outputs: list[torch.Tensor] = []
        for part, count in zip(self.parts, self.counts, strict=True):
            outputs += part(*(next(rest) for _ in range(count)))
        return tuple(outputs)


def case(name: str, samples: Sequence[Sample]) -> Case:
    """Return samples as one case of the exporters; its seeds are the places of :data:`values.VARIANTS`."""
    specs: list[str] = []
    fills: dict[str, Fill] = {}
    for sample in samples:
        for index, (tensor, axis) in enumerate(zip(sample.tensors, sample.axes, strict=True)):
            symbol = f"m={LEAST}..64" if sample.symbol == "m" else "n"
            shape = (symbol if place == axis else str(size) for place, size in enumerate(tensor.shape))
            flat = f"x.{len(specs)}"
            specs.append(f"{flat}:{DType.of(tensor.numpy()).torch_name}[{','.join(shape)}]")
            fills[flat] = _fill(sample, index)
    return Case(name, "operators", lambda: Group(samples), tuple(specs), fills, sizes={"n": SIZES, "m": SIZES})


def _fill(sample: Sample, index: int) -> Fill:
    def fill(shape: tuple[int, ...], sizes: object, generator: torch.Generator) -> torch.Tensor:
        axis = next((axis for axis in sample.axes if axis is not None), None)
        place = sample.axes[index]
        size = shape[place] if place is not None else SIZES[0] if axis is None else _size(sample, sizes)
        return values.make(sample, values.VARIANTS[generator.initial_seed()], size)[index]

    return fill


def _size(sample: Sample, sizes: object) -> int:
    return int(sizes[sample.symbol]) if isinstance(sizes, dict) else SIZES[0]


@dataclass(frozen=True)
class Fault:
    """A difference of one sample.

    ``reasons`` and ``stated`` are why it is accepted, and the notes that state it; both are empty if a part of it is
    neither.
    """

    sample: int
    text: str
    reasons: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """One call of one sample in eager; without an answer, the values are those of the example."""

    index: int
    sample: Sample
    part: nn.Module
    variant: str
    tensors: Sequence[torch.Tensor]
    answer: list[torch.Tensor]
    valid: bool


def faults(
    name: str, samples: Sequence[Sample], dtype: torch.dtype, start: Callable[[], Candidate], notes: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield the differences between an exported group and eager; ``notes`` are those of the export.

    Raises:
        Broken: the exported form fails on values that eager accepts.
    """
    module = case(name, samples).module()
    parts = list(module.get_submodule("parts").children())
    candidate = start()
    for size, variant in _plan(samples):
        calls = [
            _ask(index, sample, part, variant, size)
            for index, (sample, part) in enumerate(zip(samples, parts, strict=True))
        ]
        flat: Tensors = {f"x.{index}": tensor for index, tensor in enumerate(t for call in calls for t in call.tensors)}
        where = f"for values '{variant}'" + (f", size {size}" if any(sample.symbol for sample in samples) else "")
        actual = iter(_called(candidate, flat, where))
        for call in calls:
            outputs = [next(actual) for _ in call.answer]
            if call.valid:
                yield from _compared(name, call, outputs, dtype, where, notes)


def _plan(samples: Sequence[Sample]) -> Iterator[tuple[int, str]]:
    yield SIZES[0], "example"
    for size, variant in zip(SIZES[1:], ("redrawn", "mixed", "scaled", "redrawn"), strict=True):
        yield size, variant
    for variant in values.ATTACKS:
        if any(values.applies(sample, variant) for sample in samples):
            yield SIZES[3], variant


def _ask(index: int, sample: Sample, part: nn.Module, variant: str, size: int) -> _Asked:
    size = max(size, LEAST) if sample.symbol == "m" else size
    tensors = values.make(sample, variant, size)
    answer = run(part, tensors)
    if answer is not None:
        return _Asked(index, sample, part, variant, tensors, answer, valid=values.applies(sample, variant))
    tensors = values.make(sample, "example", size)
    return _Asked(index, sample, part, variant, tensors, run(part, tensors) or [], valid=False)


def _called(candidate: Candidate, inputs: Tensors, where: str) -> list[Array]:
    try:
        return list(candidate(inputs))
    except Exception as error:  # an engine may raise anything
        raise Broken(f"{type(error).__name__} {where}: {' '.join(str(error).split())[:300]}") from error


def _compared(
    name: str, call: _Asked, outputs: Sequence[Array], dtype: torch.dtype, where: str, notes: Sequence[str]
) -> Iterator[Fault]:
    each = call.sample.each and call.variant == "special"
    for output, (answer, actual) in enumerate(zip(call.answer, outputs, strict=True)):
        expected = answer.numpy()
        tolerance = max(TOLERANCES.get(kind, 0) for kind in (dtype, answer.dtype)) or 1e-4
        try:
            compare(f"output {output}", expected, actual, where, tolerance, each=each)
        except Wrong as error:
            why = accepted.reasons(tolerance, _difference(name, call, output, expected, actual), notes)
            text = f"({call.sample.text}): {error}{_element(call, expected, why.rest)}"
            known = why.rest is expected
            yield Fault(call.index, text, why.accepted if known else (), why.stated if known else ())
        else:
            if accepted.zero_has_other_sign(expected, actual):
                yield Fault(call.index, f"({call.sample.text}): {accepted.ZERO} {where}", (accepted.ZERO,))


def _difference(name: str, call: _Asked, output: int, expected: Array, actual: Array) -> accepted.Difference:
    arguments, keywords = call.part.arguments(call.tensors) if isinstance(call.part, Call) else ((), {})
    arguments = pytree.tree_map(as_numpy_has_it, arguments)
    own = call.sample.each and call.variant == "special"
    return accepted.Difference(
        name,
        expected,
        actual,
        [tensor.numpy() for tensor in call.tensors],
        arguments,
        keywords,
        each=call.sample.each,
        floor=0.0
        if own or expected.dtype.kind != "f"
        else float(np.abs(expected[np.isfinite(expected)]).max(initial=0)),
        other=_other_kernel(call, output),
        single=_in_single(call, output),
    )


def _other_kernel(call: _Asked, output: int) -> Array | None:
    """Return eager's answer for tensors with gaps between elements, which its vectorized kernels do not accept."""
    part, tensors = _in_own_datatype(call)
    answer = run(part, tuple(torch.stack((tensor, tensor), -1)[..., 0] for tensor in tensors), keep=True)
    return answer[output].numpy() if answer else None


def _in_own_datatype(call: _Asked) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a call and its tensors so that it converts none of them, which would leave no gaps."""
    part = call.part
    if not isinstance(part, Call) or part.dtype is not torch.bfloat16:
        return part, tuple(call.tensors)
    tensors = tuple(tensor.to(part.dtype) if tensor.is_floating_point() else tensor for tensor in call.tensors)
    return Call(part.function, part.structure, part.constants, torch.float32), tensors


def _in_single(call: _Asked, output: int) -> Array | None:
    """Return eager's answer of an operator on float16 or bfloat16, computed in float32 and rounded once."""
    part = call.part
    if not isinstance(part, Call) or part.dtype not in (torch.float16, torch.bfloat16):
        return None
    given = tuple(tensor.to(part.dtype).float() if tensor.is_floating_point() else tensor for tensor in call.tensors)
    answer = run(Call(part.function, part.structure, part.constants, torch.float32), given)
    if not answer or not answer[output].is_floating_point():
        return None
    rounded = answer[output].to(part.dtype)
    return (rounded.float() if part.dtype is torch.bfloat16 else rounded).numpy()


def _element(call: _Asked, expected: Array, actual: Array) -> str:
    """Describe the element that differs most, with the elements of the inputs that it was computed from."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return ""
    place = accepted.worst(expected, actual)
    tensors = call.tensors if call.sample.each else ()
    own = ", ".join(str(tensor.broadcast_to(expected.shape)[place].item()) for tensor in tensors)
    return f": {expected[place]!s} became {actual[place]!s}" + (f" for {own}" if own else "")
