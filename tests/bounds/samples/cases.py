"""Functions of a batch, of which some let its samples influence each other.

Each takes ``x`` [batch, seq, 4], ``n`` [batch], integers of 0 to 2, and ``w`` [4, 4], which all samples share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def capacity(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
    """A mixture of experts whose experts accept 16 tokens each, the first ones of the batch."""
    scores = (x.mean(1) @ w)[:, :3]
    chosen = F.one_hot(scores.argmax(-1), 3)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return x.mean(1) * (place <= 16).unsqueeze(-1)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def cumulative(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0]).view(-1, 1, 1)
    return torch.where(rows < 16, x, -x)


MIXING: dict[str, Function] = {
    "the batch's mean": lambda x, n, w: x - x.mean(0, keepdim=True),
    "the batch's largest value": lambda x, n, w: x / x.amax(0, keepdim=True).clamp(min=1),
    "the largest value of all": lambda x, n, w: x / x.abs().max().clamp(min=1e-6),
    "division by n.max()": lambda x, n, w: x / n.max().clamp(min=1),
    "any below -500": lambda x, n, w: torch.where((x < -500).any(), torch.zeros_like(x), x),
    "all above -500": lambda x, n, w: x * (x > -500).all(),
    "capacity of experts": capacity,
    "rows beyond 16": lambda x, n, w: cumulative(x),
    "rows beyond 500": lambda x, n, w: x * (torch.arange(x.shape[0]) < 500).view(-1, 1, 1),
    "softmax over the batch": lambda x, n, w: x.softmax(0),
    "log-softmax over the batch": lambda x, n, w: x.log_softmax(0),
    "sum over the batch": lambda x, n, w: x + x.sum(0),
    "product over the batch": lambda x, n, w: x * x.prod(0),
    "norm over the batch": lambda x, n, w: x / x.norm(dim=0, keepdim=True).clamp(min=1),
    "standard deviation": lambda x, n, w: x / (1 + x.std(0, unbiased=False)),
    "variance of everything": lambda x, n, w: x / (1 + x.var(unbiased=False)),
    "cumulative sum": lambda x, n, w: x.cumsum(0),
    "cumulative product": lambda x, n, w: x.cumprod(0),
    "flipped": lambda x, n, w: x.flip(0),
    "rolled": lambda x, n, w: x.roll(1, 0),
    "sorted": lambda x, n, w: x.sort(0).values,
    "ranks": lambda x, n, w: x.argsort(0).float(),
    "top of the batch": lambda x, n, w: x >= x.topk(1, 0).values,
    "the first sample": lambda x, n, w: x - x[:1],
    "the last sample": lambda x, n, w: x - x[-1:],
    "the first sample by select": lambda x, n, w: x * x[0],
    "the number of samples": lambda x, n, w: x * x.shape[0],
    "the number, with every second step": lambda x, n, w: x / x[:, ::2].shape[0],
    "the number of samples and steps": lambda x, n, w: x[:, ::2].sum(1) / x[:, ::2, 0].numel(),
    "the number beyond 64": lambda x, n, w: x * max(1, x.shape[0] // 64 + 1),
    "one over the number": lambda x, n, w: x / (1 + x.shape[0] * 1e-6),
    "positions": lambda x, n, w: x + torch.arange(x.shape[0]).view(-1, 1, 1) * 1e-3,
    "linspace": lambda x, n, w: x + torch.arange(x.shape[0]).float().view(-1, 1, 1) / x.shape[0],
    "every second sample": lambda x, n, w: x + (torch.arange(x.shape[0]) % 2).view(-1, 1, 1),
    "mean of neighbours": lambda x, n, w: F.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "difference of neighbours": lambda x, n, w: x - F.pad(x, (0, 0, 0, 0, 1, 0))[:-1],
    "attention over the batch": lambda x, n, w: (x.mean(1) @ x.mean(1).T).softmax(-1) @ x.mean(1),
    "similarities, reduced": lambda x, n, w: (x.mean(1) @ x.mean(1).T).amax(1),
    "distances": lambda x, n, w: (x.mean(1)[:, None] - x.mean(1)[None]).abs().sum(-1).amin(1),
    "equal to another": lambda x, n, w: (n[:, None] == n[None]).sum(1),
    "another's value by index": lambda x, n, w: x[n],
    "another's value by gather": lambda x, n, w: x.mean(1).gather(0, n[:, None].expand(-1, 4)),
    "n selects from the batch": lambda x, n, w: x.mean(1).index_select(0, n),
    "positions reversed": lambda x, n, w: x[x.shape[0] - 1 - torch.arange(x.shape[0])],
    "batch as sequence": lambda x, n, w: x.transpose(0, 1).softmax(1).transpose(0, 1),
    "batch as channels": lambda x, n, w: F.instance_norm(x.permute(1, 2, 0)).permute(2, 0, 1),
    "one group of all": lambda x, n, w: x.reshape(-1, 4).softmax(0).reshape(x.shape),
    "rows joined": lambda x, n, w: x.reshape(1, -1).softmax(-1).reshape(x.shape),
    "normalized by all": lambda x, n, w: (x - x.mean()) / x.abs().max().clamp(min=1),
    "any sample masked": lambda x, n, w: x.masked_fill((n > 1).any(), 0.0),
    "count of a class": lambda x, n, w: x / (1 + (n == 2).sum()),
    "first that exceeds": lambda x, n, w: x + (x.mean((1, 2)) > 3).int().argmax(),
    "mean where": lambda x, n, w: x - torch.where(x > 2, x, 0.0).sum(0, keepdim=True),
    "matrix of all samples": lambda x, n, w: x.mean(1) @ (x.mean(1).T @ x.mean(1)),
    "einsum over the batch": lambda x, n, w: torch.einsum("bsc,bsd->cd", x, x)[None] + x[:, :1],
    "outer sum": lambda x, n, w: torch.einsum("bs,ct->bs", x.mean(2), x.mean(2)),
    "softmax of the transposed": lambda x, n, w: x.mean(1).T.softmax(-1).T,
    "added to the reversed batch": lambda x, n, w: x + x.flip(0),
    "scattered to another": lambda x, n, w: torch.zeros_like(x.mean(1)).index_add(0, n, x.mean(1)),
    "another factor for the first": lambda x, n, w: x * (1 + (torch.arange(x.shape[0]) == 0)).view(-1, 1, 1),
    "sum from the end": lambda x, n, w: x.flip(0).cumsum(0).flip(0),
    "drawn in order": lambda x, n, w: x[n.argsort()],
    "histogram": lambda x, n, w: F.one_hot(n, 3).sum(0)[n],
    "lower triangle": lambda x, n, w: torch.ones(x.shape[0], x.shape[0]).tril() @ x.mean(1),
}

APART: dict[str, Function] = {
    "the sample's mean": lambda x, n, w: x - x.mean((1, 2), keepdim=True),
    "softmax of the features": lambda x, n, w: x.softmax(-1),
    "softmax of the sequence": lambda x, n, w: x.softmax(1),
    "softmax from the end": lambda x, n, w: x.softmax(-2),
    "rows flattened and restored": lambda x, n, w: (x.reshape(-1, 4) @ w).reshape(x.shape),
    "features flattened": lambda x, n, w: x.flatten(1).softmax(-1).reshape(x.shape),
    "heads": lambda x, n, w: attention(x.reshape(*x.shape[:2], 2, 2).transpose(1, 2)).transpose(1, 2).flatten(2),
    "heads merged with the batch": lambda x, n, w: (
        x.reshape(*x.shape[:2], 2, 2)
        .transpose(1, 2)
        .reshape(-1, x.shape[1], 2)
        .softmax(1)
        .reshape(x.shape[0], 2, x.shape[1], 2)
        .transpose(1, 2)
        .flatten(2)
    ),
    "batch in the middle": lambda x, n, w: x.transpose(0, 1).softmax(0).transpose(0, 1),
    "batch last": lambda x, n, w: x.permute(1, 2, 0).cumsum(0).permute(2, 0, 1),
    "own value by position": lambda x, n, w: x[torch.arange(x.shape[0]), n.clamp(max=0)],
    "own value by gather": lambda x, n, w: x.gather(2, n[:, None, None].expand(-1, x.shape[1], 1)),
    "table of all": lambda x, n, w: w[n],
    "table times sample": lambda x, n, w: x.mean(1) * w[n],
    "class token": lambda x, n, w: torch.cat([w[:1].unsqueeze(0).expand(x.shape[0], -1, -1), x], 1)[:, 0],
    "class token kept": lambda x, n, w: torch.cat([torch.zeros(x.shape[0], 1, 4), x], 1).softmax(1)[:, 1:],
    "two copies, taken apart": lambda x, n, w: torch.cat([x, -x], 0).sigmoid()[x.shape[0] :],
    "two copies, both taken": lambda x, n, w: (lambda y: y[: x.shape[0]] - y[x.shape[0] :])(
        torch.cat([x, x * 2], 0).tanh()
    ),
    "zeros of the batch": lambda x, n, w: x + torch.zeros(x.shape[0], 1, 4),
    "ones like": lambda x, n, w: x * torch.ones_like(x[:, :1]),
    "masked by length": lambda x, n, w: x * (torch.arange(x.shape[1])[None, :, None] <= n[:, None, None]),
    "positions of the sequence": lambda x, n, w: x + torch.arange(x.shape[1])[None, :, None],
    "number of the sequence": lambda x, n, w: x / x.shape[1],
    "reversed sequence": lambda x, n, w: x.flip(1),
    "rolled sequence": lambda x, n, w: x.roll(1, 1),
    "sorted sequence": lambda x, n, w: x.sort(1).values,
    "own maximum": lambda x, n, w: x / x.amax((1, 2), keepdim=True),
    "own any": lambda x, n, w: torch.where((x < -500).any(1, keepdim=True), torch.zeros_like(x), x),
    "own count": lambda x, n, w: x / (1 + (x > 0).sum((1, 2), keepdim=True)),
    "layer norm": lambda x, n, w: F.layer_norm(x, (4,)),
    "group norm": lambda x, n, w: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "instance norm": lambda x, n, w: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "convolution": lambda x, n, w: F.conv1d(x.transpose(1, 2), w[:, :, None], padding=0).transpose(1, 2),
    "pooling": lambda x, n, w: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "own matrix": lambda x, n, w: x @ (x.transpose(1, 2) @ x),
    "einsum of each": lambda x, n, w: torch.einsum("bsc,btc->bst", x, x).softmax(-1) @ x,
    "weights by einsum": lambda x, n, w: torch.einsum("bsc,cd->bsd", x, w),
    "one-hot": lambda x, n, w: F.one_hot(n, 3).float(),
    "cumulative sum of the sequence": lambda x, n, w: x.cumsum(1),
    "sines and cosines": lambda x, n, w: torch.stack((x[..., ::2].sin(), x[..., 1::2].cos()), 3).flatten(2),
    "mean of every second step": lambda x, n, w: x[:, ::2].mean(1),
    "number of every second step": lambda x, n, w: x[:, ::2].sum(1) / x[:, ::2].shape[1],
    "own last": lambda x, n, w: x[:, -1],
    "written to the first step": lambda x, n, w: torch.cat([x[:, :1] * 2, x[:, 1:]], 1),
    "repeated and averaged": lambda x, n, w: x.repeat(1, 2, 1).mean(1),
    "shared statistics": lambda x, n, w: x / (1 + w.mean()),
    "split and joined": lambda x, n, w: torch.cat(torch.split(x, [1, 3], -1)[::-1], -1),
    "new dimension": lambda x, n, w: x[:, None].expand(-1, 2, -1, -1).sum(1),
    "places of maxima": lambda x, n, w: F.max_pool1d(x.transpose(1, 2), 3, 1, 1, return_indices=True)[1],
    "interpolated": lambda x, n, w: F.interpolate(x.transpose(1, 2), scale_factor=2.0).transpose(1, 2),
}
