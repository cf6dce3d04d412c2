"""Own modules over images and volumes."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.coverage.case import Sizes


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    """Segments images of any size: features are padded to the size of the skipped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 8), block(8, 16), block(16, 32)])
        self.up = nn.ModuleList([block(32 + 16, 16), block(16 + 8, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skipped = []
        x = image
        for index, layer in enumerate(self.down):
            x = layer(functional.max_pool2d(x, 2) if index else x)
            skipped.append(x)
        for layer, skip in zip(self.up, reversed(skipped[:-1]), strict=True):
            x = functional.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = layer(torch.cat([x, skip], dim=1))
        return self.head(x)


class SpatialTransformer(nn.Module):
    """Straightens an image by an affine grid that it predicts."""

    identity: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(block(1, 8, 2), block(8, 8, 2), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.theta = nn.Linear(128, 6)
        self.register_buffer("identity", torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        theta = self.identity + 0.1 * torch.tanh(self.theta(self.features(image)))
        grid = functional.affine_grid(theta.view(-1, 2, 3), list(image.shape), align_corners=False)
        return functional.grid_sample(image, grid, padding_mode="border", align_corners=False)


class DeformableAttention(nn.Module):
    """Queries look at learned offsets around reference points in feature maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Linear(16, 4 * 2 * 4 * 2)  # heads, levels, points, xy
        self.weights = nn.Linear(16, 4 * 2 * 4)
        self.value = nn.Conv2d(16, 16, 1)

    def forward(self, query: torch.Tensor, points: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        batch, count, _ = query.shape
        levels = [features, functional.avg_pool2d(features, 2)]
        offsets = self.offsets(query).view(batch, count, 4, 2, 4, 2)
        weights = self.weights(query).view(batch, count, 4, 8).softmax(-1).view(batch, count, 4, 2, 4)
        total = query.new_zeros(batch * 4, 4, count)
        for index, level in enumerate(levels):
            size = torch.tensor([level.shape[-1], level.shape[-2]])
            value = self.value(level).view(batch * 4, 4, *level.shape[-2:])
            at = points[:, :, None, None] + offsets[:, :, :, index] / size  # [B, Q, heads, points, 2]
            grid = (2 * at - 1).transpose(1, 2).flatten(0, 1)
            sampled = functional.grid_sample(value, grid, padding_mode="zeros", align_corners=False)
            total = total + (sampled * weights[:, :, :, index].transpose(1, 2).reshape(batch * 4, 1, count, 4)).sum(-1)
        return total.view(batch, 16, count).transpose(1, 2)


class SuperResolution(nn.Module):
    """Three times the size by pixel shuffling, added to a bicubic enlargement."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.PReLU(16), nn.Conv2d(16, 27, 3, padding=1))
        self.shuffle = nn.PixelShuffle(3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        large = functional.interpolate(image, scale_factor=3, mode="bicubic", align_corners=False)
        return (large + self.shuffle(self.body(image))).clamp(0, 1)


class Video(nn.Module):
    """Classifies clips by factored 3D convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(3, 8, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
            nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0)),
            nn.BatchNorm3d(16),
            nn.ReLU(),
            nn.MaxPool3d((1, 2, 2)),
            nn.AdaptiveAvgPool3d(1),
        )
        self.head = nn.Linear(16, 6)

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(clip).flatten(1))


class Detector(nn.Module):
    """A dense detection head: anchors from the features' size, boxes, the best twenty, and their suppression."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(3, 16, 2), block(16, 24, 2), block(24, 24, 2))
        self.scores = nn.Conv2d(24, 4, 3, padding=1)
        self.boxes = nn.Conv2d(24, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.backbone(image)
        height, width = features.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres = (torch.stack([columns, rows], dim=-1).flatten(0, 1) + 0.5) * 8  # [A, 2]
        distances = functional.softplus(self.boxes(features)).flatten(2).transpose(1, 2) * 8
        boxes = torch.cat([centres - distances[..., :2], centres + distances[..., 2:]], dim=-1)
        scores, labels = self.scores(features).flatten(2).transpose(1, 2).sigmoid().max(-1)
        best, index = scores.topk(20, dim=1)
        boxes = boxes.gather(1, index[..., None].expand(-1, -1, 4))
        return {"boxes": boxes, "labels": labels.gather(1, index), "scores": best * self.decay(boxes)}

    def decay(self, boxes: torch.Tensor) -> torch.Tensor:
        """Return how much each box is left by the better ones that overlap it: matrix NMS of SOLOv2."""
        area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
        low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
        high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        overlap = (shared / (area[:, :, None] + area[:, None] - shared)).triu(diagonal=1)  # [B, 20, 20]
        most = overlap.amax(1)
        return ((1 - overlap) / (1 - most[:, :, None]).clamp(min=1e-3)).amin(1).clamp(max=1)


def random_boxes(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Corners of boxes that often overlap."""
    corner = torch.rand(shape[0], 2, generator=generator) * 40
    return torch.cat([corner, corner + 10 + torch.rand(shape[0], 2, generator=generator) * 30], dim=1)


class GreedySuppression(nn.Module):
    """Greedy non-maximum suppression of one image's boxes, one box after the other; returns the boxes that are kept."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = scores.argsort(descending=True)
        boxes, scores = boxes[order], scores[order]
        low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
        overlaps = shared / (area[:, None] + area[None] - shared) > 0.3
        later = torch.arange(len(boxes))
        kept = torch.ones_like(scores, dtype=torch.bool)
        for index in range(16):
            kept = kept & ~(overlaps[index] & (later > index) & kept[index])
        kept = kept & (scores > 0.2)
        return boxes[kept], scores[kept]


class Vae(nn.Module):
    """A convolutional variational autoencoder: reconstruction, mean and log variance, with the noise as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.GroupNorm(4, 16)
        )
        self.moments = nn.Conv2d(16, 8, 1)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 16, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, image: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.moments(self.encoder(image)).chunk(2, dim=1)
        latent = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * noise
        return self.decoder(latent), mean, log_variance


class DiffusionStep(nn.Module):
    """One DDIM step: noise predicted at a time step and taken out by the schedule."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.enter, self.leave = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0))

    def forward(self, latent: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        angles = step[:, None] * torch.exp(torch.arange(8) * (-torch.tensor(10000.0).log() / 8))
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = functional.silu(self.norm(self.enter(latent) + time[:, :, None, None]))
        tokens = x.flatten(2).transpose(1, 2)
        x = x + self.attention(tokens, tokens, tokens)[0].transpose(1, 2).view_as(x)
        noise = self.leave(x)
        now = self.kept[step].view(-1, 1, 1, 1)
        before = self.kept[(step - 20).clamp(min=0)].view(-1, 1, 1, 1)
        clean = (latent - (1 - now).sqrt() * noise) / now.sqrt()
        return before.sqrt() * clean + (1 - before).sqrt() * noise
