"""Hand-written modules for tables, graphs, spectra and mixed inputs, and some with data-dependent control flow."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Dlrm(nn.Module):
    """A recommender (DLRM): dense features, three summed embedding bags, and the dot products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, 16, mode="sum") for size in (100, 50, 20))
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, categories: tuple[torch.Tensor, ...]) -> torch.Tensor:
        bottom = self.bottom(dense)
        bags = (bag(ids) for bag, ids in zip(self.bags, categories, strict=True))
        vectors = torch.stack([bottom, *bags], dim=1)  # [B, 4, 16]
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(4, 4, offset=-1)
        return torch.sigmoid(self.top(torch.cat([bottom, products[:, row, column]], dim=1))).squeeze(1)


class TwoTowers(nn.Module):
    """Scores items for users, both described by dicts of features."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(200, 16)
        self.history = nn.EmbeddingBag(300, 16, mode="mean")
        self.words = nn.Embedding(300, 16, padding_idx=0)
        self.user_tower, self.item_tower = nn.Linear(33, 12), nn.Linear(16, 12)

    def forward(self, user: dict[str, torch.Tensor], item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        age = user["age"][:, None] / 100
        left = self.user_tower(torch.cat([self.ids(user["id"]), self.history(user["history"]), age], dim=1))
        present = (item["words"] != 0).float()[..., None]
        words = (self.words(item["words"]) * present).sum(1) / present.sum(1).clamp(min=1)
        left, right = functional.normalize(left, dim=-1), functional.normalize(self.item_tower(words), dim=-1)
        scores = left @ right.T * 20
        return {"scores": scores, "best": scores.argmax(1), "user": left}


class GraphConvolution(nn.Module):
    """Two message-passing layers over an edge list, normalized by degrees, and a mean over the graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = edges
        degree = torch.ones(len(nodes)).index_add(0, target, torch.ones(edges.shape[1]))
        weight = (degree[source] * degree[target]).rsqrt()[:, None]
        for layer in self.layers:
            messages = layer(nodes)
            nodes = functional.relu(
                messages / degree[:, None] + torch.zeros_like(messages).index_add(0, target, messages[source] * weight)
            )
        return nodes, nodes.mean(0)


class GraphPooling(nn.Module):
    """Attention over each graph's nodes: a softmax by scattered maxima and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 1), nn.Linear(8, 12)

    def forward(self, nodes: torch.Tensor, graph: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        count = graphs.shape[0]  # one row of features for each graph
        gate = self.gate(nodes).squeeze(1)
        most = gate.new_full((count,), -1e9).scatter_reduce(0, graph, gate, "amax")
        share = torch.exp(gate - most[graph])
        share = share / gate.new_zeros(count).scatter_add(0, graph, share)[graph]
        pooled = nodes.new_zeros(count, 12)
        return graphs + pooled.scatter_add(0, graph[:, None].expand(-1, 12), share[:, None] * self.value(nodes))


class MixtureOfExperts(nn.Module):
    """Each token goes to two of four experts; an expert computes only the tokens that were routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 16)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            mixed = mixed.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        return mixed.view_as(x)


class FourierOperator(nn.Module):
    """A Fourier neural operator: learned complex weights on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(2, 12), nn.Linear(12, 1)
        self.weights = nn.Parameter(torch.randn(12, 12, 6, 2) / 12)
        self.local = nn.Conv1d(12, 12, 1)

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        x = self.lift(field).transpose(1, 2)  # [B, 12, N]
        spectrum = torch.fft.rfft(x, norm="ortho")
        low = torch.einsum("bif,iof->bof", spectrum[..., :6], torch.view_as_complex(self.weights))
        rest = torch.zeros_like(spectrum[..., 6:])
        x = functional.gelu(
            torch.fft.irfft(torch.cat([low, rest], dim=-1), n=x.shape[-1], norm="ortho") + self.local(x)
        )
        return self.drop(x.transpose(1, 2))


class MelSpectrogram(nn.Module):
    """A speech front end: short-time Fourier transform, mel bands, logarithm, and standardization over time."""

    window: torch.Tensor
    bands: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(128))
        self.register_buffer("bands", torch.rand(65, 20))

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(audio, 128, 64, window=self.window, center=True, return_complex=True)
        power = spectrum.abs() ** 2  # [B, 65, T]
        mel = torch.log(power.transpose(1, 2) @ self.bands + 1e-6)
        return (mel - mel.mean(1, keepdim=True)) / (mel.std(1, keepdim=True) + 1e-5)


class Fusion(nn.Module):
    """Takes an image, text and scalars in one nested dict; returns a nested dict that includes a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.words = nn.Embedding(60, 8)
        self.head = nn.Linear(20, 4)

    def forward(self, sample: dict[str, dict[str, torch.Tensor]], scale: float = 1.0) -> dict[str, object]:
        text = sample["text"]
        mask = text["mask"].float()[..., None]
        words = (self.words(text["ids"]) * mask).sum(1) / mask.sum(1)
        joined = torch.cat([self.image(sample["image"]["pixels"]), words, sample["image"]["meta"]], dim=1)
        logits = self.head(joined) * scale
        return {"class": {"logits": logits, "index": logits.argmax(-1)}, "parts": (joined, words)}


class Selection(nn.Module):
    """Returns only the rows that pass a threshold, and where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.nonzero(self.score(rows).squeeze(1) > 0).squeeze(1)
        return functional.layer_norm(rows[found], (6,)), found


class RowLoop(nn.Module):
    """Standardizes each row by its own top half in a Python loop over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in batch:
            top = row.sort(descending=True).values[:5]
            rows.append((row - top.mean()) / (top.std() + 1))
        return self.head(torch.stack(rows))


class EarlyExit(nn.Module):
    """Stops after the first classifier if its mean confidence over the batch is high."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early = nn.Linear(8, 16), nn.Linear(16, 3)
        self.second, self.late = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        logits = self.early(hidden)
        if logits.softmax(-1).amax(-1).mean() > 0.6:
            return logits
        return self.late(torch.relu(self.second(hidden)))


class ConditionalExit(EarlyExit):
    """The same with ``torch.cond``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        logits = self.early(hidden)
        sure = logits.softmax(-1).amax(-1).mean() > 0.6
        return torch.cond(
            sure, lambda h, y: y.clone(), lambda h, y: self.late(torch.relu(self.second(h))), (hidden, logits)
        )


class RunningStatistics(nn.Module):
    """Scores anomalies against a running mean and variance, which every call updates."""

    mean: torch.Tensor
    variance: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        score = ((rows - self.mean) ** 2 / self.variance).mean(-1)
        self.calls += 1
        share = 1.0 / (self.calls + 1)
        self.mean.lerp_(rows.mean(0), share)
        self.variance.lerp_(((rows - self.mean) ** 2).mean(0), share)
        return score
