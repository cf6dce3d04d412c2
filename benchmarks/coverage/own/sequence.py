"""Own modules over sequences: recurrent, convolutional, attention, and step-by-step ones."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

Past = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class GruClassifier(nn.Module):
    """Reads tokens in both directions and classifies the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.gru = nn.GRU(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        _, last = self.gru(self.embedding(ids))  # [4, B, 24]
        return self.head(torch.cat([last[-2], last[-1]], dim=-1))


class LstmTranslator(nn.Module):
    """An LSTM encoder, an LSTM decoder fed with the target, and dot-product attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(60, 16)
        self.target = nn.Embedding(70, 16)
        self.encoder = nn.LSTM(16, 24, batch_first=True)
        self.decoder = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(48, 70)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        weights = torch.softmax(hidden @ memory.transpose(1, 2), dim=-1)  # [B, T, S]
        return self.head(torch.cat([hidden, weights @ memory], dim=-1))


class PackedLstm(nn.Module):
    """A tagger that skips padding by packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 20, batch_first=True, bidirectional=True)
        self.head = nn.Linear(40, 7)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])
        return self.head(hidden)


class Crnn(nn.Module):
    """Text recognition: columns of a convolutional network, read by an LSTM, decoded greedily."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.lstm = nn.LSTM(16 * 8, 24, bidirectional=True)
        self.head = nn.Linear(48, 30)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.features(image).flatten(1, 2).permute(2, 0, 1)  # [W/2, B, C*H]
        logits = functional.log_softmax(self.head(self.lstm(columns)[0]), dim=-1)
        return logits, logits.argmax(-1)


class Conformer(nn.Module):
    """Two conformer-like blocks over features with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.attention = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.convolution = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(32, 64, 1), nn.GLU(1), nn.Conv1d(32, 32, 7, padding=3, groups=32), nn.BatchNorm1d(32)
            )
            for _ in range(2)
        )

    def forward(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for index in range(2):
            x = self.norms[2 * index](features)
            features = features + self.attention[index](x, x, x, key_padding_mask=~mask, need_weights=False)[0]
            x = self.norms[2 * index + 1](features).masked_fill(~mask[..., None], 0.0)
            features = features + functional.silu(self.convolution[index](x.transpose(1, 2))).transpose(1, 2)
        return features.masked_fill(~mask[..., None], 0.0)


class TemporalConvolution(nn.Module):
    """Causal dilated convolutions with weight normalization, and a forecast of eight steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(4 if level == 0 else 16, 16, 3, dilation=2**level))
            for level in range(4)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        x = series.transpose(1, 2)
        for level, layer in enumerate(self.layers):
            y = functional.gelu(layer(functional.pad(x, (2 * 2**level, 0))))
            x = y + x if level else y
        return self.head(x[..., -1])


class CachedDecoder(nn.Module):
    """One step of a decoder: new tokens, and keys and values of the past as nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 32)
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.RMSNorm(32)

    def forward(self, ids: torch.Tensor, past: Past) -> tuple[torch.Tensor, Past]:
        x = self.embedding(ids)  # [B, S, 32]
        length, before = ids.shape[1], past[0][0].shape[2]
        visible = torch.ones(length, before + length, dtype=torch.bool).tril(diagonal=before)
        present = []
        for project, output, (keys, values) in zip(self.projections, self.outputs, past, strict=True):
            query, key, value = (
                part.unflatten(-1, (4, 8)).transpose(1, 2) for part in project(self.norm(x)).chunk(3, dim=-1)
            )
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
            x = x + output(attended.transpose(1, 2).flatten(2))
            present.append((key, value))
        return self.norm(x) @ self.embedding.weight.T, tuple(present)


class ComplexRotary(nn.Module):
    """Causal attention whose positions are rotations of complex numbers, as in the first Llama's own code."""

    rotations: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        angles = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (4, 8)) for part in self.project(x).chunk(3, dim=-1))
        query, key = self.rotate(query), self.rotate(key)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return attended.transpose(1, 2).flatten(2)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())  # [B, S, 4, 4]
        return torch.view_as_real(pairs * self.rotations[: x.shape[1], None]).flatten(3)


class GreedyDecoder(nn.Module):
    """Generates six tokens after a prompt, each from all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 40)

    def forward(self, prompt: torch.Tensor) -> torch.Tensor:
        ids = prompt
        for _ in range(6):
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            hidden = self.body(self.embedding(ids), mask=mask, is_causal=True)
            ids = torch.cat([ids, self.head(hidden[:, -1]).argmax(-1, keepdim=True)], dim=1)
        return ids


class LinearAttention(nn.Module):
    """Causal attention of linear cost: running sums of outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        memory = torch.einsum("bsk,bsv->bskv", key, value).cumsum(1)
        weight = torch.einsum("bsk,bsk->bs", query, key.cumsum(1))
        return torch.einsum("bsk,bskv->bsv", query, memory) / weight[..., None]


class Streaming(nn.Module):
    """A causal filter for audio in pieces: the end of one piece is kept for the next call."""

    tail: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 4, 5)
        self.register_buffer("tail", torch.zeros(1, 1, 4))

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.tail, chunk], dim=-1)
        self.tail.copy_(joined[..., -4:])
        return torch.tanh(self.filter(joined))
