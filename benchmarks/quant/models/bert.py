"""all-MiniLM-L6-v2: a BERT of six layers that makes embeddings of sentences.

Written out here because ``transformers`` is a large dependency for one model; the weights have the names of the
published file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, WORDS, PLACES = 384, 12, 6, 30522, 512
_EPSILON = 1e-12


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=_EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        found = self.word_embeddings(ids) + self.position_embeddings(places) + self.token_type_embeddings.weight[0]
        return cast(Tensor, self.LayerNorm(found))


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            part(x).view(rows, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)  # [B, heads, T, d]
            for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return seen.transpose(1, 2).reshape(rows, tokens, WIDTH)


class _Output(nn.Module):
    """A linear layer with the shortcut around it."""

    def __init__(self, inputs: int):
        super().__init__()
        self.dense = nn.Linear(inputs, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=_EPSILON)

    def forward(self, x: Tensor, around: Tensor) -> Tensor:
        return cast(Tensor, self.LayerNorm(self.dense(x) + around))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": _SelfAttention(), "output": _Output(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
        self.output = _Output(4 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        return cast(Tensor, self.output(functional.gelu(self.intermediate["dense"](x)), x))


class SentenceEncoder(nn.Module):
    """Unit embeddings [B, 384] of token ids [B, T], with a mask [B, T] that is 1 where there is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = _Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer() for _ in range(LAYERS))})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        hidden = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in cast(nn.ModuleList, self.encoder["layer"]):
            x = layer(x, hidden)
        weight = attention_mask[:, :, None].to(x.dtype)
        mean = (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return functional.normalize(mean, dim=1)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the encoder's weights from the published ``model.safetensors``."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if entry.get("dtype") == "F32" and not name.startswith("pooler"):
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.float32).reshape(entry["shape"])
    return found
