"""Functions of PyTorch whose capture would fix a dynamic size, written for any size.

PyTorch captures adaptive pooling as a fixed number of windows of known length, pooling of a whole input with the length
of the example, and an affine grid, ``linspace`` and ``logspace`` as a fixed number of points. Layers of transformers
branch on the values of their masks, and a covariance on its divisor.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import transformer

from ingot.export.capture import recurrent
from ingot.export.torch_internals import (
    broadcast_shapes,
    check,
    remember_constructors,
    sym_max,
    sym_min,
    without_listing,
)

Tensor = torch.Tensor


@contextlib.contextmanager
def dynamic(module: nn.Module, *, strict: bool = False, hidden: bool = False) -> Iterator[None]:
    """Let the layers of a module be captured at any size.

    Args:
        module: what is captured.
        strict: whether its bytecode is read, in which pooling cannot be replaced: Dynamo knows it by its identity.
        hidden: whether PyTorch takes the frames of replacements for its own, when it looks for the user's line; not
            for Dynamo, which reads only code outside of PyTorch.
    """
    listing = without_listing(needed=strict)
    with (
        listing,
        _replaced(module, _BY_IDENTITY if strict else (), hidden=hidden),
        recurrent.opaque() if recurrent.used_by(module) else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: nn.Module, kept: Collection[str], *, hidden: bool) -> Iterator[None]:
    """Replace the functions; a replacement calls the original where the sizes that matter are fixed."""
    names = [name for name in _FUNCTIONS if name not in kept]
    places = {(owner, name): name for name in names for owner in _OWNERS.get(name, (functional,))}
    places |= _imported(module, {id(getattr(owner, name)): name for owner, name in places})
    remember_constructors()  # PyTorch would remember the replacements, and `with torch.device(...)` miss the originals
    originals = {(owner, name): getattr(owner, name) for owner, name in places}
    inherited = {(owner, name) for owner, name in places if name not in vars(owner)}
    for (owner, name), original in originals.items():
        replacement: Any = _FUNCTIONS[places[owner, name]](original)
        if hidden:
            replacement.__code__ = replacement.__code__.replace(co_filename=torch.__file__)
        setattr(owner, name, functools.wraps(original)(replacement))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            if (owner, name) in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _imported(module: nn.Module, names: Mapping[int, str]) -> dict[tuple[Any, str], str]:
    """Return where code of the module's classes imported functions, as by ``from torch import cov``."""
    kinds = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    files = [sys.modules[name] for name in kinds if name in sys.modules]
    return {(file, own): names[id(value)] for file in files for own, value in vars(file).items() if id(value) in names}


def _adaptive(
    rank: int, along: Callable[[Tensor, int], Tensor], needed: bool, original: Callable[..., Any]
) -> Callable[..., Any]:
    def pool(input: Tensor, output_size: Any, *options: Any, **named: Any) -> Any:  # noqa: A002 - PyTorch's name
        counts = (output_size,) * rank if isinstance(output_size, int) else tuple(output_size)
        pairs = zip(input.shape[-rank:], counts, strict=True)
        free = needed or _any_dynamic(size for size, count in pairs if count not in (None, 1))
        if not free or any((*options, *named.values())):  # for example return_indices
            return original(input, output_size, *options, **named)
        result = input
        for axis, count in enumerate(counts, start=-rank):
            if count is not None:
                result = along(result.movedim(axis, -1), count).movedim(-1, axis)
        return result

    return pool


def _pooled(
    rank: int, reduced: Callable[[Tensor, list[int]], Tensor], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Reduce the axes along which the window is the whole input, as in ``max_pool1d(x, x.shape[2])``."""

    def pool(input: Tensor, kernel_size: Any, *options: Any, **named: Any) -> Any:  # noqa: A002 - PyTorch's name
        kernel = tuple(kernel_size) if isinstance(kernel_size, list | tuple) else (kernel_size,) * rank
        if not _any_dynamic(kernel) or len(kernel) < rank:
            return original(input, kernel_size, *options, **named)
        windows = list(zip(range(-rank, 0), kernel, strict=True))
        whole = [axis for axis, size in windows if _equal(size, input.shape[axis])]
        stride = options[0] if options else named.get("stride")  # it moves no window that is the whole input
        kept = all(axis in whole or (stride is None and _equal(size, 1)) for axis, size in windows)
        rest = (*options[1:], *(value for name, value in named.items() if name != "stride"))
        if whole and kept and not any(rest):  # such as padding
            return reduced(input, whole)
        return original(input, kernel_size, *options, **named)

    return pool


def _equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal, without a condition on dynamic ones."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return isinstance(one, int) and isinstance(other, int) and one == other


def _mean(x: Tensor, count: int) -> Tensor:
    if count == 1:
        return x.mean(-1, keepdim=True)
    inside, lengths = _windows(x.shape[-1], count, x.device)
    # masked_fill, not a product with zeros and ones: 0 * inf is NaN in all windows.
    return x.unsqueeze(-2).masked_fill(~inside, 0).sum(-1) / lengths[:, 0].to(x.dtype)


def _maximum(x: Tensor, count: int) -> Tensor:
    inside, _ = _windows(x.shape[-1], count, x.device)
    return x.unsqueeze(-2).masked_fill(~inside, -math.inf).amax(-1)


def _windows(size: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a mask [count, size] of the positions in each window, and the window lengths [count, 1]."""
    index = torch.arange(count, device=device)[:, None]
    begin = torch.div(index * size, count, rounding_mode="floor")
    end = torch.div((index + 1) * size + count - 1, count, rounding_mode="floor")
    place = torch.arange(size, device=device)
    return (begin <= place) & (place < end), end - begin


def _affine_grid(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
        if not _any_dynamic(size[2:]):
            return original(theta, size, align_corners)
        lines = [_line(count, bool(align_corners), theta) for count in reversed(size[2:])]  # x first, then y
        points = torch.meshgrid(*reversed(lines), indexing="ij")
        ends = torch.stack([*reversed(points), torch.ones_like(points[0])], dim=-1)  # [(D,) H, W, rank + 1]
        flat = ends.reshape(1, -1, len(size) - 1) @ theta.transpose(1, 2)
        return flat.reshape(-1, *size[2:], len(size) - 2)

    return grid


def _line(count: int, corners: bool, like: Tensor) -> Tensor:
    """Return ``count`` evenly spaced positions in [-1, 1]: including the ends, or the centres of equal cells."""
    place = torch.arange(count, dtype=like.dtype, device=like.device)
    if not corners:
        return (2 * place + 1) / count - 1
    return torch.where(torch.full_like(place, count) > 1, 2 * place / (count - 1) - 1, 0)


def _linspace(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def points(start: Any, end: Any, steps: Any = None, **options: Any) -> Tensor:
        if not isinstance(steps, torch.SymInt) or "out" in options:
            return original(start, end, steps, **options)
        kind = options.pop("dtype", None) or torch.get_default_dtype()
        count: Any = steps
        place: Tensor = torch.arange(count, **options).to(torch.float64)
        gap = (end - start) / sym_max(count - 1, 1)
        # As PyTorch: from both ends, so that the last value is exact.
        ahead, behind = start + place * gap, end - (count - 1 - place) * gap
        return torch.where(place < sym_max(count // 2, 1), ahead, behind).to(kind)

    return points


def _logspace(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def points(start: Any, end: Any, steps: Any = None, base: float = 10.0, **options: Any) -> Tensor:
        if not isinstance(steps, torch.SymInt) or "out" in options:
            return original(start, end, steps, base, **options)
        kind = options.pop("dtype", None) or torch.get_default_dtype()
        exponents = torch.linspace(start, end, cast(Any, steps), dtype=torch.float64, **options)
        return torch.pow(base, exponents).to(kind)

    return points


def _detect_is_causal_mask(original: Callable[..., bool]) -> Callable[..., bool]:
    """Read what the caller says: a graph cannot branch on whether the values of a mask are those of a causal one.

    The mask is passed to the attention all the same, so that the result does not depend on this.
    """

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return detect


def _fill_diagonal(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
        if x.dim() != 2 or wrap or not _any_dynamic(x.shape):
            return original(x, fill_value, wrap)
        x.diagonal().fill_(fill_value)
        return x

    return fill


def _cov(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the covariance without weights: PyTorch branches on the value of the divisor."""

    def cov(input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:  # noqa: A002
        if fweights is not None or aweights is not None or not _has_rows(input):
            return original(input, correction=correction, fweights=fweights, aweights=aweights)
        rows = input if input.dim() == 2 else input.unsqueeze(0)
        centred = rows - rows.mean(1, keepdim=True)
        result: Tensor = centred @ centred.mH / sym_max(rows.shape[1] - correction, 0)
        return result if input.dim() == 2 else result[0, 0]

    return cov


def _corrcoef(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def corrcoef(input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
        if not _has_rows(input):
            return original(input)
        covariance = torch.cov(input)
        if input.dim() == 1:
            return covariance / covariance
        deviation = covariance.diagonal().sqrt()
        return (covariance / deviation[:, None] / deviation[None, :]).clamp(-1, 1)

    return corrcoef


def _cross(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return products along the first dimension of size 3, as PyTorch does where none is named."""

    def cross(input: Tensor, other: Tensor, dim: int | None = None, **options: Any) -> Tensor:  # noqa: A002
        sizes = list(input.shape)
        threes = [axis for axis, size in enumerate(sizes) if isinstance(size, int) and size == 3]
        if dim is not None or options or not threes:
            return original(input, other, dim=dim, **options)
        result = original(input, other, dim=threes[0])
        x, y = input.expand(result.shape), other.expand(result.shape)
        for axis in reversed(range(threes[0])):
            if isinstance(sizes[axis], torch.SymInt):
                own = x.roll(-1, axis) * y.roll(-2, axis) - x.roll(-2, axis) * y.roll(-1, axis)
                result = torch.where(torch.full((), sizes[axis], device=x.device) == 3, own, result)
        return result

    return cross


def _combinations(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:  # noqa: A002
        if r < 1 or not _any_dynamic(input.shape):
            return original(input, r, with_replacement)
        size = input.shape[0]
        places = torch.meshgrid([torch.arange(size, device=input.device)] * r, indexing="ij")
        kept = torch.ones_like(places[0], dtype=torch.bool)
        for one, other in pairwise(places):
            kept = kept & (one <= other if with_replacement else one < other)
        chosen = kept.nonzero()
        number = math.prod(size + step if with_replacement else size - step for step in range(r)) // math.factorial(r)
        check(chosen.shape[0] == number)
        return input[chosen]

    return combinations


def _kron(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kron(input: Tensor, other: Tensor, **options: Any) -> Tensor:  # noqa: A002 - PyTorch's name
        if options or not _any_dynamic((*input.shape, *other.shape)):
            return original(input, other, **options)
        rank = max(input.dim(), other.dim())
        left, right = ([*(1 for _ in range(rank - x.dim())), *x.shape] for x in (input, other))
        x = input.reshape([*chain.from_iterable((size, 1) for size in left)])
        y = other.reshape([*chain.from_iterable((1, size) for size in right)])
        return (x * y).reshape([own * factor for own, factor in zip(left, right, strict=True)])

    return kron


def _tensor_split(original: Callable[..., Any]) -> Callable[..., Any]:
    def split(input: Tensor, *given: Any, **named: Any) -> Any:  # noqa: A002 - PyTorch's name
        count = given[0] if given else named.get("sections")
        dim = given[1] if len(given) > 1 else named.get("dim", 0)
        if not isinstance(count, int) or not isinstance(input.shape[dim], torch.SymInt):
            return original(input, *given, **named)
        size = input.shape[dim]
        ends = [part * (size // count) + sym_min(part, size % count) for part in range(count + 1)]
        return tuple(input.narrow(dim, begin, end - begin) for begin, end in pairwise(ends))

    return split


def _take_along_dim(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def take(input: Tensor, indices: Tensor, dim: int | None = None, **options: Any) -> Tensor:  # noqa: A002
        if dim is None or options or not _any_dynamic((*input.shape, *indices.shape)):
            return original(input, indices, *(() if dim is None else (dim,)), **options)
        lengths = input.shape[dim], indices.shape[dim]
        shapes = [list(x.shape) for x in (input, indices)]
        for shape in shapes:
            shape[dim] = 1
        whole = list(broadcast_shapes(*shapes))
        source, places = (
            x.expand([*whole[: dim % len(whole)], length, *whole[dim % len(whole) + 1 :]])
            for x, length in zip((input, indices), lengths, strict=True)
        )
        return source.gather(dim, places % lengths[0])  # PyTorch wraps indices, those past the end too

    return take


def _multi_dot(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Multiply from left to right: PyTorch chooses the order by the sizes."""

    def multi_dot(tensors: Sequence[Tensor], **options: Any) -> Tensor:
        if options or not _any_dynamic(size for x in tensors for size in x.shape):
            return original(tensors, **options)
        return functools.reduce(torch.matmul, tensors)

    return multi_dot


def _has_rows(x: Tensor) -> bool:
    return x.dim() in (1, 2) and x.is_floating_point()


def _any_dynamic(sizes: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


_OWNERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("linspace", "logspace", "combinations"), (torch,)),
    **dict.fromkeys(("cov", "corrcoef", "cross", "kron", "tensor_split", "take_along_dim"), (torch, Tensor)),
    "multi_dot": (torch.linalg,),
    "adaptive_avg_pool1d": (functional, torch),
    "affine_grid_generator": (torch,),
    "fill_diagonal_": (Tensor,),
    "_detect_is_causal_mask": (transformer,),
}
"""Where functions stand that are not only in ``torch.nn.functional``."""
_POOLING: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    f"{kind}_pool{rank}d": functools.partial(_pooled, rank, functools.partial(reduced, keepdim=True))
    for kind, reduced in (("avg", torch.mean), ("max", torch.amax))
    for rank in (1, 2, 3)
}
_BY_IDENTITY = frozenset(_POOLING)
# Adaptive maximum pooling, and that of volumes, is always replaced: the operators have no ONNX form for fixed sizes.
_FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_detect_is_causal_mask": _detect_is_causal_mask,
    "affine_grid": _affine_grid,
    "affine_grid_generator": _affine_grid,
    "linspace": _linspace,
    "logspace": _logspace,
    "cov": _cov,
    "corrcoef": _corrcoef,
    "cross": _cross,
    "combinations": _combinations,
    "kron": _kron,
    "tensor_split": _tensor_split,
    "take_along_dim": _take_along_dim,
    "multi_dot": _multi_dot,
    "fill_diagonal_": _fill_diagonal,
    **_POOLING,
    "adaptive_avg_pool1d": functools.partial(_adaptive, 1, _mean, False),
    "adaptive_avg_pool2d": functools.partial(_adaptive, 2, _mean, False),
    "adaptive_avg_pool3d": functools.partial(_adaptive, 3, _mean, True),
    "adaptive_max_pool1d": functools.partial(_adaptive, 1, _maximum, True),
    "adaptive_max_pool2d": functools.partial(_adaptive, 2, _maximum, True),
    "adaptive_max_pool3d": functools.partial(_adaptive, 3, _maximum, True),
}
