"""Attention as vision models and diffusion models share it."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head attention to itself or to a context, with an optional bias on the scores."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(context or width, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, context: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, _, width = x.shape
        other = x if context is None else context
        query, key, value = (
            part.view(batch, -1, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query(x), self.key(other), self.value(other))
        )
        y = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(batch, -1, width))


class Mlp(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class RelativeBias(nn.Module):
    """A learned bias of each head for each offset within a square window."""

    index: torch.Tensor

    def __init__(self, heads: int, side: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        offsets = (at[:, :, None] - at[:, None]) + side - 1
        self.register_buffer("index", offsets[0] * (2 * side - 1) + offsets[1], persistent=False)

    def forward(self) -> torch.Tensor:
        return self.table[self.index].permute(2, 0, 1)
