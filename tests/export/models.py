"""Models for the tests of export; the command line and ``load_source`` find them by import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """4 values in, 3 out; the one that checkpoints are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


net = Net()
number = 5


def factory() -> nn.Module:
    return Net()


def needy(width: int) -> nn.Module:
    return nn.Linear(width, width)


def failing() -> nn.Module:
    raise RuntimeError("no weights here\n\nsee the manual")


class Served:
    def predict_one(self, x: str) -> str:
        return x


def wrong() -> int:
    return number


class Function(nn.Module):
    """Any function of tensors as a model."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Pair(nn.Module):
    """Two inputs of different shapes, which must not be mixed up."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.sum(1) - 2 * right.sum(1)


class Counter(nn.Module):
    """Changes a buffer when it runs; ``shown`` says whether the output depends on it."""

    def __init__(self, shown: bool):
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.shown = shown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls if self.shown else x * 2


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x
