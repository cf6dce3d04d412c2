"""The model kinds of the capture matrix: those that exporters get right, refuse, or get silently wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """Residual and depthwise convolutions with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)
        with torch.no_grad():
            for part in self.modules():
                if isinstance(part, nn.BatchNorm1d):
                    part.running_mean = torch.rand(8)  # fresh statistics of zero and one would hide mistakes
                    part.running_var = torch.rand(8) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x.transpose(1, 2))
        return self.head((y + self.depthwise(y)).mean(2))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Attention whose shapes come from its input, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.position = nn.Parameter(torch.randn(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        x = x + self.position[:seq]
        q, k, v = self.qkv(x).view(batch, seq, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, width)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Branch(nn.Module):
    """A Python branch on a tensor's values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return -x


class Cond(nn.Module):
    """The same branch as the graph has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: -x, (x,))  # type: ignore[no-any-return]


class Selected(nn.Module):
    """The number of outputs depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Nested(nn.Module):
    """A keyword-only input, and outputs in a dict of tuples."""

    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> Any:
        return {"a": x * scale, "b": (x + 1, x - 1)}


class Stateful(nn.Module):
    """Changes a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        return x + self.total


class Overwriting(nn.Module):
    """Changes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class Sliced(nn.Module):
    """A size that is read from a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(x[0, 0, 0].abs().item()) % 2 + 1]


class Looped(nn.Module):
    """A Python loop over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row * index for index, row in enumerate(x)])


KINDS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "convnet": ConvNet,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "branch": Branch,
    "cond": Cond,
    "selected": Selected,
    "nested": Nested,
    "stateful": Stateful,
    "overwriting": Overwriting,
    "sliced": Sliced,
    "looped": Looped,
}
