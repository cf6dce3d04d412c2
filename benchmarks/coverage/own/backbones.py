"""Image backbones in the manner of timm."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from benchmarks.coverage.case import Case
from benchmarks.coverage.own.attention import Attention, Mlp, RelativeBias
from benchmarks.coverage.own.vision import block


class ConVit(nn.Module):
    """Gated positional attention, whose relative positions are kept in a buffer at the first call."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.norm = nn.LayerNorm(32)
        self.qkv, self.position, self.out = nn.Linear(32, 96), nn.Linear(3, 4), nn.Linear(32, 6)
        self.gate = nn.Parameter(torch.ones(4))
        self.register_buffer("positions", torch.zeros(1, 1, 1, 3), persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.patches(image).flatten(2).transpose(1, 2))
        if self.positions.shape[1] != x.shape[1]:
            self.positions = self.relative(x.shape[1])
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        content = (query @ key.transpose(-2, -1) * 8**-0.5).softmax(-1)
        place = self.position(self.positions).permute(0, 3, 1, 2).softmax(-1)
        gate = self.gate.sigmoid().view(1, -1, 1, 1)
        weights = (1 - gate) * content + gate * place
        x = (weights / weights.sum(-1, keepdim=True)) @ value
        return self.out(x.transpose(1, 2).flatten(2).mean(1))

    def relative(self, count: int) -> torch.Tensor:
        side = int(count**0.5)
        steps = torch.arange(side).view(1, -1) - torch.arange(side).view(-1, 1)
        across = steps.repeat(side, side)
        down = steps.repeat_interleave(side, 0).repeat_interleave(side, 1)
        return torch.stack([across, down, across**2 + down**2], dim=-1).unsqueeze(0).float()


class Hiera(nn.Module):
    """Attention within mask units over five dimensions, whose queries are pooled by their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        batch, count, _ = x.shape
        windows = count // 16
        qkv = self.qkv(x).reshape(batch, -1, windows, 3, 2, 12).permute(3, 0, 4, 2, 1, 5)
        query, key, value = qkv.unbind(0)  # [B, heads, windows, tokens, channels]
        query = query.unflatten(3, (4, -1)).amax(3)
        x = functional.scaled_dot_product_attention(query, key, value)
        return self.out(x.transpose(1, 3).reshape(batch, -1, 24)).mean(1)


class SwinBlock(nn.Module):
    """Attention in windows of 4 x 4, shifted or not, on images that are padded to whole windows."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.bias = Attention(width, 2), RelativeBias(2, 4)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        tall, wide = (4 - height % 4) % 4, (4 - width % 4) % 4
        y = functional.pad(self.first(x), (0, 0, 0, wide, 0, tall))
        padded = (height + tall, width + wide)
        mask = None
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), dims=(1, 2))
            mask = self.mask(*padded, y)
        y = windows(y)
        bias = self.bias()[None]
        if mask is not None:
            bias = bias + mask.repeat(batch, 1, 1).unsqueeze(1)
        y = self.attention(y, bias).view(batch, padded[0] // 4, padded[1] // 4, 4, 4, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, *padded, channels)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), dims=(1, 2))
        x = x + y[:, :height, :width]
        return x + self.mlp(self.second(x))

    def mask(self, height: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Return minus infinity, nearly, between parts of a window that the shift brought together."""
        down = torch.arange(height, device=like.device)
        across = torch.arange(width, device=like.device)
        areas = [
            (at >= size - 4).long() + (at >= size - self.shift).long() for at, size in ((down, height), (across, width))
        ]
        area = windows((3 * areas[0][:, None] + areas[1][None])[None, :, :, None]).squeeze(-1)
        return (area[:, :, None] != area[:, None]).to(like.dtype) * -100.0


def windows(x: torch.Tensor) -> torch.Tensor:
    """Return ``[batch x windows, 16, channels]`` of ``[batch, height, width, channels]``."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // 4, 4, width // 4, 4, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)


class Swin(nn.Module):
    """Two stages of window attention, shifted every other block, with patches merged between them."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.stages = nn.ModuleList(
            nn.Sequential(*(SwinBlock(width, 2 * (index % 2)) for index in range(depth))) for width in (24, 48)
        )
        self.norm, self.reduce = nn.LayerNorm(96), nn.Linear(96, 48, bias=False)
        self.head = nn.Linear(48, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stages[0](self.patches(image).permute(0, 2, 3, 1))
        _, height, width, _ = x.shape
        x = functional.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        x = self.stages[1](self.reduce(self.norm(torch.cat(parts, dim=-1))))
        return self.head(x.mean((1, 2)))


class ConvNext(nn.Module):
    """Depthwise 7 x 7, layer norm over channels, an inverted bottleneck with response normalisation, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(24, 24, 7, padding=3, groups=24) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(24, 1e-6) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(24, 96) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(96, 24) for _ in range(2))
        self.scale = nn.Parameter(torch.full((2, 96), 0.1))
        self.head = nn.Linear(24, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for index, (conv, norm) in enumerate(zip(self.depthwise, self.norms, strict=True)):
            y = functional.gelu(self.up[index](norm(conv(x).permute(0, 2, 3, 1))))
            spread = y.norm(p=2, dim=(1, 2), keepdim=True)
            y = y + self.scale[index] * y * (spread / (spread.mean(-1, keepdim=True) + 1e-6))
            x = x + self.down[index](y).permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class EfficientNet(nn.Module):
    """Inverted bottlenecks with squeeze and excitation, padded as TensorFlow does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, bias=False)
        self.expand, self.depth = block(16, 48), nn.Conv2d(48, 48, 5, 2, groups=48, bias=False)
        self.norm, self.act = nn.BatchNorm2d(48), nn.SiLU(inplace=True)
        self.squeeze, self.excite = nn.Conv2d(48, 4, 1), nn.Conv2d(4, 48, 1)
        self.project, self.head = nn.Conv2d(48, 24, 1), nn.Linear(24, 7)

    def same(self, x: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
        needs = [
            max((-(-size // stride) - 1) * stride + kernel - size, 0)
            for size, kernel, stride in zip(x.shape[-2:], conv.kernel_size, conv.stride, strict=True)
        ]
        tall, wide = needs
        return conv(functional.pad(x, (wide // 2, wide - wide // 2, tall // 2, tall - tall // 2)))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.expand(self.same(image, self.stem))
        x = self.act(self.norm(self.same(x, self.depth)))
        x = x * self.excite(self.act(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.head(self.project(x).mean((2, 3)))


class MlpMixer(nn.Module):
    """Mixes patches, then channels, each by a gated perceptron; the image's size is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.tokens = nn.ModuleList(Mlp(16) for _ in range(2))
        self.channels = nn.ModuleList(Mlp(32) for _ in range(2))
        self.head = nn.Linear(32, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for index, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * index + 1](x))
        return self.head(x.mean(1))


class RepVgg(nn.Module):
    """Blocks of three branches that were trained apart: 3 x 3, 1 x 1 and the identity, each with its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 24, 2)
        self.large = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(3))
        self.small = nn.ModuleList(nn.Conv2d(24, 24, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in range(9))
        self.head = nn.Linear(24, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for index, (large, small) in enumerate(zip(self.large, self.small, strict=True)):
            norms = self.norms[3 * index : 3 * index + 3]
            x = (norms[0](large(x)) + norms[1](small(x)) + norms[2](x)).relu()
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class CoAtNet(nn.Module):
    """A convolution stage with squeeze and excitation, then attention with a relative bias over a fixed grid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 16, 2), block(16, 32, 2), block(32, 32, 2))
        self.norm, self.attention, self.bias = nn.LayerNorm(32), Attention(32, 4), RelativeBias(4, 4)
        self.pool, self.mlp, self.head = nn.MaxPool2d(2), Mlp(32), nn.Linear(32, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(image)).flatten(2).transpose(1, 2)
        x = x + self.attention(self.norm(x), self.bias()[None])
        return self.head((x + self.mlp(x)).mean(1))


class Vit(nn.Module):
    """A vision transformer for images of any size: position embeddings are resampled to the image's grid."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.positions = nn.Parameter(torch.randn(1, 36, 32))
        self.norm, self.attention, self.mlp = nn.LayerNorm(32), Attention(32, 4), Mlp(32)
        self.head = nn.Linear(32, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image)
        grid = self.positions.view(1, 6, 6, 32).permute(0, 3, 1, 2)
        grid = functional.interpolate(grid, size=x.shape[-2:], mode="bicubic", antialias=False)
        x = (x + grid).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.attention(self.norm(x))
        return self.head((x + self.mlp(x))[:, 0])


class Xcit(nn.Module):
    """Attention across channels instead of positions, which accepts images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 16, 2), block(16, 32, 2))
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.temperature = nn.Parameter(torch.ones(4, 1, 1))
        self.local = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.head = nn.Linear(32, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, -1).transpose(1, 2)
        query, key, value = self.qkv(x).reshape(batch, -1, 3, 4, 8).permute(2, 0, 3, 4, 1).unbind(0)
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        y = ((query @ key.transpose(-2, -1)) * self.temperature).softmax(-1) @ value
        x = x + self.out(y.permute(0, 3, 1, 2).reshape(batch, -1, channels))
        x = x.transpose(1, 2).reshape(batch, channels, height, width)
        return self.head((x + self.local(x)).flatten(2).mean(-1))


class MaxVit(nn.Module):
    """Attention in blocks, then over a grid of the same size, on images of whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 24, 2)
        self.local, self.distant = Attention(24, 2), Attention(24, 2)
        self.bias = RelativeBias(2, 4)
        self.head = nn.Linear(24, 7)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        y = self.local(windows(x), self.bias()[None])
        y = y.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        x = x + y.reshape(batch, height, width, channels)
        y = x.view(batch, 4, height // 4, 4, width // 4, channels).permute(0, 2, 4, 1, 3, 5)
        y = self.distant(y.reshape(-1, 16, channels), self.bias()[None])
        y = y.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 3, 1, 4, 2, 5)
        return self.head((x + y.reshape(batch, height, width, channels)).mean((1, 2)))


class Vgg(nn.Module):
    """Plain convolutions, then linear layers that hold nearly all the weights (33 million)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256, 256)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
                for one, other in itertools.pairwise(widths)
            )
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(7),
            nn.Flatten(),
            nn.Linear(256 * 49, 2048),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(2048, 2048),
            nn.ReLU(inplace=True),
            nn.Linear(2048, 1000),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image))


_SMALL, _FREE = "image:float32[batch,3,32,32]", "image:float32[batch,3,height=32..256,width=32..256]"

CASES = (
    Case("timm_convit", "backbone", ConVit, (_SMALL,)),
    Case("timm_hiera", "backbone", Hiera, ("image:float32[batch,3,64,64]",)),
    Case("timm_swin", "backbone", Swin, (_FREE,)),
    Case("timm_convnext", "backbone", ConvNext, (_FREE,)),
    Case("timm_efficientnet", "backbone", EfficientNet, (_FREE,)),
    Case("timm_mlp_mixer", "backbone", MlpMixer, (_SMALL,)),
    Case("timm_repvgg", "backbone", RepVgg, (_FREE,)),
    Case("timm_coatnet", "backbone", CoAtNet, ("image:float32[batch,3,64,64]",)),
    Case("timm_vit", "backbone", Vit, (_FREE,)),
    Case("timm_xcit", "backbone", Xcit, (_FREE,)),
    Case(
        "timm_maxvit",
        "backbone",
        MaxVit,
        ("image:float32[batch,3,height=32..256:8,width=32..256:8]",),
        sizes={"height": (48, 64, 40, 88)},
    ),
    Case("timm_vgg", "backbone", Vgg, ("image:float32[batch,3,224,224]",)),
)
