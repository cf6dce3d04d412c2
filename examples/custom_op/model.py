"""A custom operator and a model whose code does not use it; docs/guides/make/custom-ops.md explains this file.

    python -m examples.custom_op.model

trains the model for some seconds and writes gated.pth (the weights), gated.npz (training images, for calibration) and
one.npy (one held-out image, in a batch of one).
"""

import numpy as np
import torch
from torch import nn

import ingot
from ingot.demo import Data, load, predict


@ingot.op("acme::gated_rms_norm", example=(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)))
def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return the root-mean-square norm of x [..., N], scaled by weight [N] and by the sigmoid of gate [..., N]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight * torch.sigmoid(gate)


class GatedNorm(nn.Module):
    """The same formula in plain PyTorch, as one finds it in a model; it trains, which the operator does not."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight * torch.sigmoid(gate)


class Gated(nn.Module):
    """A classifier of 8 x 8 digits: a convolution, two gated layers, 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(nn.Linear(256, 512) for _ in range(2))
        self.norms = nn.ModuleList(GatedNorm(256) for _ in range(2))
        self.classify = nn.Linear(256, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image)).flatten(1)  # [B, 256]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden, gate = layer(x).chunk(2, -1)
            x = x + norm(hidden, gate)
        logits: torch.Tensor = self.classify(x)
        return logits


model = Gated


def train(data: Data, epochs: int = 8) -> Gated:
    """Return a model trained by Adam for some seconds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trained = Gated()
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    optimizer = torch.optim.Adam(trained.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trained.eval()


if __name__ == "__main__":
    training, held_out = load()
    trained = train(training)
    print(f"accuracy on held-out images: {(predict(trained, held_out.images) == held_out.labels).mean():.4f}")
    torch.save(trained.state_dict(), "gated.pth")
    np.savez("gated.npz", image=training.images, label=training.labels)
    np.save("one.npy", held_out.images[:1])
