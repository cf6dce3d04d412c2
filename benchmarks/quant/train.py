"""Training of the benchmark's models: seconds each, always the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.quant.data import Part, Parts

# More would spin while they wait for each other, and on a busy machine train these small models ten times slower.
THREADS = 1


def fit(module: nn.Module, parts: Parts, epochs: int, rate: float, rows: int = 64) -> nn.Module:
    """Train a classifier by AdamW with one warm cycle of the learning rate.

    Args:
        module: changed in place; its weights are reinitialized from the caller's seed.
        parts: whose training part is used.
        epochs: passes over it.
        rate: the highest learning rate.
        rows: of one step.
    """
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    inputs, labels = _tensors(parts.train)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.02)
    steps = epochs * (len(inputs) // rows)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    module.train()
    for _ in range(epochs):
        order = torch.randperm(len(inputs))[: len(inputs) // rows * rows]
        for batch in order.split(rows):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(inputs[batch]), labels[batch], label_smoothing=0.05)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return module.eval()


def settle(module: nn.Module, parts: Parts) -> nn.Module:
    """Let the batch normalizations of an untrained model see data, as if it had been trained."""
    inputs = torch.from_numpy(next(iter(parts.train.inputs.values())))
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the mean over all batches
    module.train()
    with torch.no_grad():
        for batch in inputs.split(32):  # type: ignore[no-untyped-call]
            module(batch)
    return module.eval()


def accuracy(module: nn.Module, part: Part) -> float:
    """Return the share of a part's rows that a classifier gets right."""
    inputs, labels = _tensors(part)
    with torch.no_grad():
        found = torch.cat([module(batch).argmax(1) for batch in inputs.split(256)])  # type: ignore[no-untyped-call]
    return float((found == labels).float().mean())


def _tensors(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    if part.labels is None:
        raise ValueError("a classifier needs labels")
    return torch.from_numpy(next(iter(part.inputs.values()))), torch.from_numpy(part.labels)


Finish = Callable[[nn.Module, Parts], nn.Module]
