"""Convolutional classifiers."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class _Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(*_conv(inputs, outputs, 3, stride), nn.ReLU(), *_conv(outputs, outputs, 3))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, outputs, 1, stride))
        self.activate = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.activate(self.body(x) + self.shortcut(x)))


class _Inverted(nn.Module):
    """MobileNetV2's block: widen, filter each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, widen: int = 4):
        super().__init__()
        wide = inputs * widen
        self.body = nn.Sequential(
            *_conv(inputs, wide, 1),
            nn.ReLU6(),
            *_conv(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *_conv(wide, outputs, 1),
        )
        self.residual = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.body(x) if self.residual else self.body(x))


class ResNet(nn.Module):
    """Residual classifier of images [B, 1, 32, 32]; 0.7 million parameters, logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_conv(1, 32, 3, 2),
            nn.ReLU(),
            _Residual(32, 32, 1),  # [B, 32, 16, 16]
            _Residual(32, 64, 2),
            _Residual(64, 64, 1),  # [B, 64, 8, 8]
            _Residual(64, 128, 2),
            _Residual(128, 128, 1),  # [B, 128, 4, 4]
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        return cast(Tensor, self.layers(image))


class MobileNet(nn.Module):
    """Classifier of images [B, 1, 32, 32] by inverted residuals; 0.14 million parameters, logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_conv(1, 24, 3, 2),
            nn.ReLU6(),  # [B, 24, 16, 16]
            _Inverted(24, 24, 1),
            _Inverted(24, 40, 2),
            _Inverted(40, 40, 1),  # [B, 40, 8, 8]
            _Inverted(40, 80, 2),
            _Inverted(80, 80, 1),  # [B, 80, 4, 4]
            *_conv(80, 320, 1),
            nn.ReLU6(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(320, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        return cast(Tensor, self.layers(image))


class _ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (64, 64, 128, 256, 512)
        blocks = [
            block
            for index, (inputs, outputs) in enumerate(pairwise(widths))
            for block in (_Residual(inputs, outputs, 1 + (index > 0)), _Residual(outputs, outputs, 1))
        ]
        self.layers = nn.Sequential(
            *_conv(3, 64, 7, 2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 1000),
        )

    def forward(self, image: Tensor) -> Tensor:
        return cast(Tensor, self.layers(image))


def resnet18() -> nn.Module:
    """Return a ResNet18 for images [B, 3, 112, 112], untrained: it is here for its speed."""
    torch.manual_seed(0)
    return _ResNet18()
