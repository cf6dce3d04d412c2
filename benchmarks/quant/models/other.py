"""A vision transformer, a recurrent classifier and a perceptron."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    """A transformer's layer, normalized first."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            part.reshape(rows, tokens, self.heads, width // self.heads).transpose(1, 2)  # [B, heads, T, d]
            for part in self.project(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.join(seen.transpose(1, 2).reshape(rows, tokens, width))
        return cast(Tensor, x + self.feed(self.norms[1](x)))


class Transformer(nn.Module):
    """Classifier of images [B, 1, 32, 32] cut into 64 patches; 0.8 million parameters, logits [B, 10]."""

    def __init__(self, width: int = 128, depth: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2) + self.places  # [B, 64, width]
        return cast(Tensor, self.classify(self.norm(self.blocks(tokens)).mean(1)))


class Recurrent(nn.Module):
    """Classifier that reads an image [B, 32, 32] row by row; two layers of LSTM, logits [B, 10]."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.lstm = nn.LSTM(32, width, num_layers=2, batch_first=True)
        self.classify = nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        states, _ = self.lstm(rows)
        return cast(Tensor, self.classify(states[:, -1]))


class Perceptron(nn.Module):
    """Classifier of table rows [B, 128]; 1.7 million parameters, logits [B, 8]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (128, 1024, 1024, 512)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 8))

    def forward(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.layers(features))
