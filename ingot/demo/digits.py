"""A convolutional classifier of handwritten digits: 1,797 real images of 8 x 8 grey values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ingot.tensors import Array

INPUT = "image:float32[batch,1,8,8]"


class Digits(nn.Module):
    """Three convolutions and a linear layer, 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, 32),
            *_block(32, 64),
            nn.MaxPool2d(2),  # [B, 64, 4, 4]
            *_block(64, 64),
            nn.MaxPool2d(2),  # [B, 64, 2, 2]
        )
        self.classify = nn.Linear(64 * 2 * 2, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 10] for images [B, 1, 8, 8] of values from 0 to 1."""
        return self.classify(self.features(image).flatten(1))  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


@dataclass(frozen=True)
class Data:
    """Images [N, 1, 8, 8] in float32 from 0 to 1, and labels [N]."""

    images: Array
    labels: Array


def load() -> tuple[Data, Data]:
    """Return the training and the held-out set, 1,347 and 450 images, always the same split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return Data(parts[0], parts[2]), Data(parts[1], parts[3])


def train(data: Data, epochs: int = 12, progress: Callable[[int, float], None] = lambda epoch, loss: None) -> Digits:
    """Return a model trained by Adam for some seconds; ``progress`` is called with each epoch's number and loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # torch's threads spin: on a busy machine several train this small model 10 times slower
    model = Digits()
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in torch.randperm(len(images)).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        schedule.step()
        progress(epoch + 1, total / len(images))
    return model.eval()


def predict(model: nn.Module, images: Array) -> Array:
    """Return the class of each image, as PyTorch computes it."""
    with torch.no_grad():
        return model(torch.from_numpy(images)).argmax(1).numpy()  # type: ignore[no-any-return]
