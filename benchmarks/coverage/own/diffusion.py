"""Parts of diffusion models in the manner of diffusers."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from benchmarks.coverage.case import Case, integers, padding_mask, uniform
from benchmarks.coverage.own.attention import Attention, Mlp


def sinusoids(steps: torch.Tensor, width: int) -> torch.Tensor:
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=steps.device) / half)
    angles = steps[:, None].float() * rates[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbedding(nn.Module):
    """Sinusoids of a time step through two layers, with an optional label."""

    def __init__(self, width: int = 32, labels: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, width), nn.Linear(width, width)
        self.label = nn.Embedding(labels, width) if labels else None

    def forward(self, steps: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        x = self.second(functional.silu(self.first(sinusoids(steps, 16))))
        return x if self.label is None or label is None else x + self.label(label)


class ResnetBlock(nn.Module):
    """Two normalised convolutions with the time between them."""

    def __init__(self, inputs: int, outputs: int, time: int | None = 32) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs) if time else None
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        y = self.conv1(functional.silu(self.first(x)))
        if self.time is not None and time is not None:
            y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.second(y)))


class TransformerBlock(nn.Module):
    """Attention of an image's places to each other and to a text, around a gated feed-forward layer."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, 2), Attention(width, 2, context)
        self.gated, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        batch, channels, height, width = x.shape
        y = self.norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        y = self.enter(y)
        y = y + self.own(self.norms[0](y))
        y = y + self.cross(self.norms[1](y), bias, text)
        value, gate = self.gated(self.norms[2](y)).chunk(2, dim=-1)
        y = self.leave(y + self.down(value * functional.gelu(gate)))
        return x + y.reshape(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()


class ConditionalUNet(nn.Module):
    """A U-Net on latents with cross-attention to a text, of any size and length, which resizes to skipped features."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.depth = depth
        self.time = TimeEmbedding()
        self.enter = nn.Conv2d(4, 16, 3, padding=1)
        self.down = nn.ModuleList(ResnetBlock(one, other) for one, other in ((16, 16), (16, 16), (16, 32), (32, 32)))
        self.look = nn.ModuleList(TransformerBlock(width, 24) for width in (16, 16, 32, 32))
        self.halve = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for width in (16, 32))
        self.middle, self.centre = ResnetBlock(32, 32), TransformerBlock(32, 24)
        self.up = nn.ModuleList(
            ResnetBlock(one, other) for one, other in ((64, 32), (64, 32), (48, 16), (32, 16), (32, 16))
        )
        self.again = nn.ModuleList(TransformerBlock(width, 24) for width in (32, 32, 16, 16, 16))
        self.norm, self.leave = nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, sample: torch.Tensor, step: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        time = self.time(step)
        x = self.enter(sample)
        skipped = [x]
        for index, (resnet, look) in enumerate(zip(self.down, self.look, strict=True)):
            if index == 2:
                x = self.halve[0](x)
            x = look(resnet(x, time), text)
            skipped.append(x)
        x = self.halve[1](x)
        x = self.middle(self.centre(x, text), time)
        for resnet, look in zip(self.up, self.again, strict=True):
            skip = skipped.pop()
            if x.shape[-2:] != skip.shape[-2:]:
                x = functional.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = look(resnet(torch.cat([x, skip], dim=1), time), text)
        return self.leave(functional.silu(self.norm(x)))


class MaskedConditioning(nn.Module):
    """Cross-attention to a text with a mask of its padding, and a label added to the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.enter = TimeEmbedding(labels=10), nn.Conv2d(4, 16, 3, padding=1)
        self.resnet, self.look = ResnetBlock(16, 16), TransformerBlock(16, 24)
        self.leave = nn.Conv2d(16, 4, 3, padding=1)

    def forward(
        self, sample: torch.Tensor, step: torch.Tensor, text: torch.Tensor, mask: torch.Tensor, label: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        bias = (1 - mask.to(sample.dtype))[:, None, None] * -10000.0
        x = self.resnet(self.enter(sample), self.time(step, label))
        return {"sample": self.leave(self.look(x, text, bias))}


class VaeEncoder(nn.Module):
    """Halves an image by asymmetric padding; attention in the middle; mean and log variance."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.halve = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2)
        self.blocks = nn.ModuleList([ResnetBlock(16, 16, None), ResnetBlock(16, 32, None)])
        self.norm, self.attention = nn.GroupNorm(4, 32), Attention(32, 1)
        self.leave = nn.Conv2d(32, 8, 1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.halve(functional.pad(self.blocks[0](self.enter(image)), (0, 1, 0, 1)))
        x = self.blocks[1](x)
        places = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attention(places).transpose(1, 2).reshape(x.shape)
        mean, variance = self.leave(x).chunk(2, dim=1)
        return mean, variance.clamp(-30.0, 20.0)


class VaeDecoder(nn.Module):
    """Twice enlarges a latent by its nearest neighbours and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, 32, 3, padding=1)
        self.blocks = nn.ModuleList([ResnetBlock(32, 32, None), ResnetBlock(32, 16, None)])
        self.convs = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)])
        self.norm, self.leave = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        x = self.enter(latent / 0.18215)
        for resnet, conv in zip(self.blocks, self.convs, strict=True):
            x = conv(functional.interpolate(resnet(x), scale_factor=2.0, mode="nearest"))
        return (self.leave(functional.silu(self.norm(x))) / 2 + 0.5).clamp(0, 1)


class Dit(nn.Module):
    """A diffusion transformer with adaptive layer norms, on latents of a fixed size, cut into patches and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(4, 32, 2, 2), TimeEmbedding(labels=10)
        self.positions = nn.Parameter(torch.randn(1, 16, 32), requires_grad=False)
        self.norms = nn.ModuleList(nn.LayerNorm(32, elementwise_affine=False) for _ in range(3))
        self.modulate, self.final = nn.Linear(32, 192), nn.Linear(32, 64)
        self.attention, self.mlp, self.out = Attention(32, 4), Mlp(32), nn.Linear(32, 2 * 2 * 4)

    def forward(self, latent: torch.Tensor, step: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        time = functional.silu(self.time(step, label))
        x = self.patches(latent).flatten(2).transpose(1, 2) + self.positions
        parts = self.modulate(time).unsqueeze(1).chunk(6, dim=-1)
        x = x + parts[2] * self.attention(self.norms[0](x) * (1 + parts[1]) + parts[0])
        x = x + parts[5] * self.mlp(self.norms[1](x) * (1 + parts[4]) + parts[3])
        shift, scale = self.final(time).unsqueeze(1).chunk(2, dim=-1)
        x = self.out(self.norms[2](x) * (1 + scale) + shift)
        side = int(x.shape[1] ** 0.5)
        x = x.reshape(-1, side, side, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 4, 2 * side, 2 * side)


class JointTransformer(nn.Module):
    """Text and image in one attention with rotary positions of rows and columns, for latents of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(16, 32), nn.Linear(24, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 16)
        self.query_norm, self.key_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, latent: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = latent.shape
        x = latent.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        x = self.image(x.reshape(batch, (height // 2) * (width // 2), channels * 4))
        rows = torch.arange(height // 2)[:, None].expand(-1, width // 2).flatten()
        columns = torch.arange(width // 2)[None].expand(height // 2, -1).flatten()
        length = text.shape[1]
        zeros = torch.zeros(length, dtype=rows.dtype)
        angles = torch.cat([self.angles(torch.cat([zeros, at])) for at in (rows, columns)], dim=-1)
        x = torch.cat([self.text(text), x], dim=1)
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key = self.rotated(self.query_norm(query), angles), self.rotated(self.key_norm(key), angles)
        y = functional.scaled_dot_product_attention(query, key, value)
        y = self.out(y.transpose(1, 2).flatten(2)[:, length:])
        y = y.view(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return y.reshape(batch, channels, height, width)

    def angles(self, at: torch.Tensor) -> torch.Tensor:
        return torch.outer(at.float(), 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4))

    def rotated(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1).flatten(-2)


class EulerStep(nn.Module):
    """Guidance of two predictions and one step of Euler's method, with the noise levels looked up."""

    levels: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 50) ** 2
        kept = torch.cumprod(1 - betas, dim=0)
        self.register_buffer("levels", torch.cat([(((1 - kept) / kept) ** 0.5).flip(0), torch.zeros(1)]))

    def forward(
        self, sample: torch.Tensor, noise: torch.Tensor, index: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        free, guided = noise.unbind(1)
        guess = free + scale[:, None, None, None] * (guided - free)
        now, then = (self.levels[at][:, None, None, None] for at in (index, index + 1))
        return sample + (sample - (sample - now * guess)) / now * (then - now)


class AudioUNet(nn.Module):
    """A one-dimensional U-Net on audio, whose halves are transposed back and cut to size."""

    def __init__(self) -> None:
        super().__init__()
        self.time = TimeEmbedding()
        self.down = nn.ModuleList(nn.Conv1d(one, other, 8, 4, 2) for one, other in ((2, 16), (16, 32)))
        self.up = nn.ModuleList(nn.ConvTranspose1d(one, other, 8, 4, 2) for one, other in ((32, 16), (16, 2)))
        self.shift = nn.Linear(32, 32)

    def forward(self, audio: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        lengths, x = [], audio
        for conv in self.down:
            lengths.append(x.shape[-1])
            x = functional.gelu(conv(functional.pad(x, (0, (4 - x.shape[-1] % 4) % 4))))
        x = x + self.shift(self.time(step)).unsqueeze(-1)
        for conv, length in zip(self.up, reversed(lengths), strict=True):
            x = conv(functional.gelu(x))[..., :length]
        return audio + x


_LATENT, _STEP = "sample:float32[batch,4,height=4..64,width=4..64]", "step:int64[batch]"
_TEXT = "text:float32[batch,seq=1..77,24]"
_SMALL = {"height": (8, 12, 6, 9), "width": (10, 8, 12, 7)}
_STEPS = {"step": integers(0, 1000), "label": integers(0, 10)}

CASES = (
    Case("diffusers_unet", "diffusion", ConditionalUNet, (_LATENT, _STEP, _TEXT), _STEPS, sizes=_SMALL),
    Case(
        "diffusers_masked_text",
        "diffusion",
        MaskedConditioning,
        (_LATENT, _STEP, _TEXT, "mask:int64[batch,seq=1..77]", "label:int64[batch]"),
        {**_STEPS, "mask": padding_mask},
        sizes=_SMALL,
    ),
    Case(
        "diffusers_vae_encoder",
        "diffusion",
        VaeEncoder,
        ("image:float32[batch,3,height=8..128,width=8..128]",),
        sizes={"height": (16, 24, 12, 17), "width": (20, 16, 24, 13)},
    ),
    Case(
        "diffusers_vae_decoder",
        "diffusion",
        VaeDecoder,
        ("latent:float32[batch,4,height=4..64,width=4..64]",),
        sizes=_SMALL,
    ),
    Case(
        "diffusers_time_embedding",
        "diffusion",
        lambda: TimeEmbedding(labels=10),
        ("steps:int64[batch]", "label:int64[batch]"),
        {"steps": integers(0, 1000), **_STEPS},
    ),
    Case("diffusers_dit", "diffusion", Dit, ("latent:float32[batch,4,8,8]", _STEP, "label:int64[batch]"), _STEPS),
    Case(
        "diffusers_joint_transformer",
        "diffusion",
        JointTransformer,
        ("latent:float32[batch,4,height=4..64:2,width=4..64:2]", _TEXT),
        sizes={"height": (8, 12, 6, 10), "width": (10, 8, 12, 6)},
    ),
    Case(
        "diffusers_euler_step",
        "diffusion",
        EulerStep,
        (
            "sample:float32[batch,4,height=4..64,width=4..64]",
            "noise:float32[batch,2,4,height=4..64,width=4..64]",
            "index:int64[batch]",
            "scale:float32[batch]",
        ),
        {"index": integers(0, 50), "scale": uniform(1, 9)},
        sizes=_SMALL,
    ),
    Case(
        "diffusers_audio_unet",
        "diffusion",
        AudioUNet,
        ("audio:float32[batch,2,samples=64..65536]", _STEP),
        _STEPS,
        sizes={"samples": (256, 400, 203, 601)},
    ),
)
