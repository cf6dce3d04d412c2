"""A small transformer decoder, for the tests of models that are divided over processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ingot.model_store.format.manifest import Division

PLAN: dict[str, Division] = {
    **dict.fromkeys(("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.up", "head"), "colwise"),
    **dict.fromkeys(("layers.*.o", "layers.*.down", "embed"), "rowwise"),
}
INPUT = "ids:int64[batch,seq=1..32]"
TOKENS = 48


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norms[0](x)
        q, k, v = (
            layer(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token numbers in, a score for each possible next token out."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Planned(Decoder):
    """With its own plan, as models of transformers have one."""

    tp_plan = {**PLAN, "norm": "sequence_parallel", "head": "colwise_rep", "experts.*": "rowwise"}  # noqa: RUF012 - as they have it


def make() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


def planned() -> nn.Module:
    torch.manual_seed(0)
    return Planned()
