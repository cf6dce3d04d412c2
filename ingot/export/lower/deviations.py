"""Operators whose ONNX form differs from PyTorch by a bound that no form of ONNX Runtime's kernels removes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ingot.export.explain import places
from ingot.export.lower.forms.exact_math import MOST_MULTIPLIED
from ingot.export.lower.forms.integers import MOST_FACTORS
from ingot.export.torch_internals import OpOverload

_SIGMOID = "within 1e-7, not relative to small results"
_NAN = "a NaN among the values may be ignored"
_NAN_PLACE = f"{_NAN}, and the place of another value returned"
_OVERFLOW = "finite beyond 1e37, where PyTorch overflows"
_ROUNDED = "integers beyond 2^53 are rounded to 53 bits"
_POWERS = f"powers of odd integers with an exponent above {MOST_MULTIPLIED} are not exact"
_FOURIER = "with an infinity among the values, or where a sum overflows, all results may be NaN or infinite"
_PIXELS = "with an infinity among the pixels, infinite where PyTorch returns NaN"
_MEANS = "with an infinity among the values, the mean is infinite where PyTorch returns NaN"
_LOSS = "with an infinity among the values, NaN where PyTorch returns a number or infinity"
_HALF = "results in float16 are not rounded on CPUs: finite beyond 65504, where PyTorch returns an infinity"
_GATES = (
    "states within 1e-6, not relative to small results; with an infinity among the values, a finite state where "
    "PyTorch returns NaN"
)
_WAYS = ("", "i", "r", "ir", "h", "ih")
_REFLECTION = 2
_VOLUMES = 5

_Bound = tuple[str, Callable[[fx.Node, torch.Tensor], bool]]


def _is_floating(node: fx.Node, x: torch.Tensor) -> bool:
    return x.is_floating_point()


def _computes_in_half(node: fx.Node, x: torch.Tensor) -> bool:
    result = node.meta.get("val")
    return isinstance(result, torch.Tensor) and result.dtype is x.dtype is torch.float16


def _is_double(node: fx.Node, x: torch.Tensor) -> bool:
    return x.dtype is torch.float64


def _reflects(node: fx.Node, x: torch.Tensor) -> bool:
    return node.args[3:4] == (_REFLECTION,) or x.dim() == _VOLUMES


def _aligns_corners(node: fx.Node, x: torch.Tensor) -> bool:
    return len(node.args) > 2 and node.args[2] is True


def _returns_means(node: fx.Node, x: torch.Tensor) -> bool:
    return any(user.args[1:] == (1,) for user in node.users)


def _multiplies_many(node: fx.Node, x: torch.Tensor) -> bool:
    """Return whether integers are multiplied whose number is dynamic, or above the number that the graph writes out."""
    named = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    sizes = [x.shape[named]] if isinstance(named, int) and x.dim() else list(x.shape)
    fixed = [size for size in sizes if isinstance(size, int)]
    count = len(fixed) == len(sizes) and torch.Size(fixed).numel() <= MOST_FACTORS
    return not x.is_floating_point() and not x.is_complex() and not count


def _is_power_of_integers(node: fx.Node, x: torch.Tensor) -> bool:
    """Return whether the result is an integer, unless the exponent is a number for which it is exact."""
    result, exponent = node.meta.get("val"), node.args[1]
    exact = isinstance(exponent, int) and exponent <= MOST_MULTIPLIED
    return isinstance(result, torch.Tensor) and not result.is_floating_point() and not result.is_complex() and not exact


def _always(node: fx.Node, x: torch.Tensor) -> bool:
    return True


_BOUNDS: dict[str, _Bound] = {
    **{f"fft_{way}fft{dims}": (_FOURIER, _always) for way in _WAYS for dims in ("", "2", "n")},
    **dict.fromkeys(("stft", "istft"), (_FOURIER, _always)),
    **dict.fromkeys(("sigmoid", "silu"), (_SIGMOID, _is_floating)),
    **{f"max_pool{rank}d": (_NAN, _is_floating) for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices": (_NAN_PLACE, _is_floating) for rank in (1, 2, 3)},
    **{f"adaptive_max_pool{rank}d": (_NAN, _is_floating) for rank in (1, 2, 3)},
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), (_PIXELS, _aligns_corners)),
    **dict.fromkeys(("native_group_norm", "native_layer_norm"), (_MEANS, _returns_means)),
    "multi_margin_loss": (_LOSS, _is_floating),
    "cross_entropy_loss": ("a NaN or an infinity among the scores may be ignored", _is_double),
    **dict.fromkeys(("gru", "lstm"), (_GATES, _is_floating)),
    "unique_dim": ("rows that hold a NaN may count as equal", _is_floating),
    "pow": (_POWERS, _is_power_of_integers),
    "special_erfcx": ("1.2e-7 of the value", _is_double),
    **dict.fromkeys(("hardswish", "remainder", "fmod"), (_OVERFLOW, _is_floating)),
    **dict.fromkeys(
        ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
        ("at coordinates beyond 1e7 pixels, and for volumes at infinities and NaN", _reflects),
    ),
    **dict.fromkeys(("prod", "cumprod"), (_ROUNDED, _multiplies_many)),
}
"""By the operator's name: the bound, and whether it applies to a call with this first tensor.

See docs/guides/make/export.md.
"""


def of(exported: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Return one line for each operator and place, such as ``max_pool2d (net.py:12): a NaN ... may be ignored``."""
    found: dict[str, None] = {}
    rounds = True
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes if node.op == "call_function"):
        name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""
        first = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
        if not name or not isinstance(first, torch.Tensor):
            continue
        bound, applies = _BOUNDS.get(name.rstrip("_"), ("", _is_floating))
        bounds = [bound] if bound and applies(node, first) else []
        if rounds and _computes_in_half(node, first):  # stated once, as it concerns all operators that follow
            rounds = False
            bounds.append(_HALF)
        place = places.of_node(node) if bounds else None
        for each in bounds:
            found[f"{name}{f' ({place.short})' if place is not None else ''}: {each}"] = None
    return tuple(found)
