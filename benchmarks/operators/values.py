"""The values on which an exported form is judged: other draws, and values that attack an operator's edges."""

from __future__ import annotations

import torch

from benchmarks.operators.samples import Sample, Tensors, resized

VARIANTS = ("example", "redrawn", "mixed", "scaled", "special", "nan", "infinite", "ties", "zero", "extreme")
"""Kinds of values, whose place is the seed of a case; the first are those that the exporters see."""
ATTACKS = VARIANTS[VARIANTS.index("special") :]

_SPECIAL = (
    *(0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, 2.0, -2.0, 3.0),
    *(1e-8, -1e-8, 1e-4, -1e-4, 20.0, -20.0, 89.0, -89.0, 200.0, -200.0, 16777217.0, 1e8, -1e8, 1e-30, 1e30, -1e30),
)
"""Where kernels change their method. Numbers that a datatype cannot hold become infinite or 0 in it."""


def make(sample: Sample, variant: str, size: int) -> Tensors:
    """Return the tensors of a sample with other values, at a size of the dynamic dimension."""
    base = sample.tensors if variant == "example" else sample.redrawn
    tensors = resized(base, sample.axes, size) if sample.symbol else base
    generator = torch.Generator().manual_seed(VARIANTS.index(variant))
    return tuple(_changed(tensor, variant, index, sample.each, generator) for index, tensor in enumerate(tensors))


def applies(sample: Sample, variant: str) -> bool:
    """Return whether a kind of values may differ from a sample's own."""
    floating = any(tensor.is_floating_point() for tensor in sample.tensors)
    if variant == "extreme":
        return sample.each and any(_is_integer(tensor) for tensor in sample.tensors)
    return (variant != "special" or sample.each) and (variant not in (*ATTACKS, "scaled") or floating)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool


def _changed(tensor: torch.Tensor, variant: str, index: int, each: bool, generator: torch.Generator) -> torch.Tensor:
    if variant in ("mixed", "nan", "infinite") and _is_ascending(tensor):
        return tensor  # boundaries or offsets, which have no meaning in another order
    if variant == "mixed":
        return tensor.reshape(-1)[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)
    if variant == "extreme" and _is_integer(tensor) and each:
        limits = torch.iinfo(tensor.dtype)
        values = [limits.min, limits.max, 0, 1, 7, limits.max // 2 + 1, *((-1, -7) if limits.min else ())]
        return _cycled(tensor, torch.tensor(values, dtype=tensor.dtype), index)
    if not tensor.is_floating_point():
        return tensor
    if variant == "scaled":
        return tensor * 1.25
    if variant == "special":
        return _cycled(tensor, torch.tensor(_SPECIAL, dtype=tensor.dtype), index)
    if variant == "ties":
        return tensor.round().clamp(-2, 2)
    if variant == "zero":
        return torch.zeros_like(tensor) if index % 2 == 0 else tensor
    changed = tensor.clone()
    if variant == "nan":
        changed.view(-1)[changed.numel() // 2 :][:1] = torch.nan  # kernels treat the first value differently
    if variant == "infinite" and changed.numel():
        changed.view(-1)[:1] = torch.inf
        changed.view(len(changed) if changed.ndim else 1, -1)[-1] = -torch.inf
    return changed


def _is_ascending(tensor: torch.Tensor) -> bool:
    return (
        tensor.ndim > 0 and tensor.shape[-1] > 2 and tensor.dtype is not torch.bool and bool((tensor.diff() >= 0).all())
    )


def _cycled(tensor: torch.Tensor, values: torch.Tensor, index: int) -> torch.Tensor:
    """Repeat values over a tensor, for the second input with another period, so that all pairs occur."""
    places = torch.arange(tensor.numel())
    places = places if index == 0 else (places // len(values) + places * index) % len(values)
    return values[places % len(values)].reshape(tensor.shape)
