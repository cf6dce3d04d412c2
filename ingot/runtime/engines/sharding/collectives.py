"""Messages between the processes of one engine: tensors whose sizes the receiver does not know before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from ingot import foreign

Value = torch.Tensor | int
Form = tuple[int, torch.dtype] | None
"""The number of dimensions and the datatype of a tensor; None for an integer."""


class OutOfStep(Exception):
    """The processes can no longer work together: one has ended, or an operator may have failed in one alone."""


def in_step() -> AbstractContextManager[None]:
    """Report any failure as OutOfStep."""
    return foreign.reported_as(OutOfStep, str)


def sizes_of(values: Sequence[Value], forms: Sequence[Form], status: int = 0) -> torch.Tensor:
    """Return the message that precedes values: a status, and each one's sizes, or the integer itself."""
    found = [status]
    for value in values:
        found += value.shape if isinstance(value, torch.Tensor) else [int(value)]
    return torch.tensor(found + [0] * (_length(forms) - len(found)))


def no_sizes(forms: Sequence[Form]) -> torch.Tensor:
    """Return room for the message that precedes values."""
    return torch.zeros(_length(forms), dtype=torch.int64)


def room_for(sizes: torch.Tensor, forms: Sequence[Form], device: str) -> list[Value]:
    """Return uninitialized tensors for the values that a message describes, and the integers in it."""
    left = sizes.tolist()[1:]
    found: list[Value] = []
    for form in forms:
        count, dtype = form or (1, None)
        own, left = left[:count], left[count:]
        found.append(int(own[0]) if dtype is None else torch.empty(own, dtype=dtype, device=device))
    return found


def contents(values: Sequence[Value]) -> Iterator[torch.Tensor]:
    """Yield the bytes of tensors that are not empty; all datatypes can be sent as bytes."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            yield value.contiguous().reshape(-1).view(torch.uint8)


def broadcast(values: Sequence[torch.Tensor] | None, forms: Sequence[Form], device: str) -> list[torch.Tensor]:
    """Send tensors from the first process to all others, where ``values`` is None; return them.

    Raises:
        OutOfStep: a process has ended.
    """
    with in_step():
        sizes = no_sizes(forms) if values is None else sizes_of(values, forms)
        dist.broadcast(sizes, 0)
        shared = room_for(sizes, forms, device) if values is None else values
        for content in contents(shared):
            dist.broadcast(content, 0)
        return [value for value in shared if isinstance(value, torch.Tensor)]


def _length(forms: Sequence[Form]) -> int:
    return 1 + sum(1 if form is None else form[0] for form in forms)
