"""Small modules with a rare branch or an edge, and wrong graphs of each, for a test of the proof itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

aten = torch.ops.aten


class Case(NamedTuple):
    """A function as a module, and its inputs."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]


def _case(function: Callable[..., Any], *inputs: str) -> Case:
    return Case(function, inputs)


_ROWS = "x:float32[batch,4]"
_IDS = "ids:int64[batch,n]"
_TABLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
_WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))


def _relative(x: Tensor) -> Tensor:
    length: Tensor = x.norm(dim=-1, keepdim=True)
    return x / (length + 1e-6)


def _routed(x: Tensor) -> Tensor:
    hidden = x @ _WEIGHT
    return torch.where(hidden.amax(-1, keepdim=True) > 9, hidden.neg(), hidden)


def _age_band(age: Tensor) -> Tensor:
    return torch.where(age < 18, 0.5, torch.where(age >= 65, 0.7, 1.0))


def _pooled(x: Tensor, mask: Tensor) -> Tensor:
    kept = mask.unsqueeze(-1).float()
    return (x * kept).sum(1) / kept.sum(1).clamp(min=1e-9)


def _attention(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None, :] == 0, -1e4)
    return scores.softmax(-1) @ x


def _kept_sum(x: Tensor) -> Tensor:
    return torch.where((x > 2.5).any(-1), x.sum(-1), x.amin(-1))


def _all_known(ids: Tensor) -> Tensor:
    return torch.where((ids != 0).all(-1), 1.0, ids.float().mean(-1))


CASES: dict[str, Case] = {
    # Thresholds that ordinary values do not reach, or reach on one side only.
    "far_threshold": _case(lambda x: torch.where(x > 500, x * 2, x), _ROWS),
    "at_threshold": _case(lambda x: (x >= 0.5).float(), _ROWS),
    "below_zero": _case(lambda x: torch.where(x < -100, x.neg(), x + 1), _ROWS),
    "band": _case(lambda x: ((x > 3) & (x <= 3.25)).float(), _ROWS),
    "age_bands": _case(_age_band, "age:float32[batch]"),
    "one_column": _case(lambda x: torch.where(x[:, 2] > 65, x[:, 0], x[:, 1]), _ROWS),
    "two_inputs": _case(lambda x, y: torch.where(x >= y, x, y * 2), _ROWS, "y:float32[batch,4]"),
    "timestamps": _case(lambda t: (t >= 1700000000.5).double(), "t:float64[batch]"),
    "equal_to": _case(lambda x: torch.where(x == 7, 1.0, x), _ROWS),
    "celsius": _case(lambda x: ((x - 32) / 1.8 > 37.5).float(), _ROWS),
    "hidden_threshold": _case(_routed, _ROWS),
    "sum_threshold": _case(lambda x: torch.where(x.sum(-1) > 40, x[:, 0], x[:, 1]), _ROWS),
    "logarithm_threshold": _case(lambda x: torch.where(x.abs().log() > 4, x, x * 3), _ROWS),
    "count_threshold": _case(lambda x: torch.where((x > 0).sum(-1) >= 4, x[:, 0], x[:, 1]), _ROWS),
    "bool_threshold": _case(lambda x: torch.where((x > 30) | (x < -30), x * 0, x), _ROWS),
    "long_tail": _case(lambda x: torch.where(x > 1e6, x.log(), x), _ROWS),
    # Clamps and activations with ends.
    "clamp": _case(lambda x: x.clamp(-10, 10), _ROWS),
    "clamp_min": _case(lambda x: x.clamp(min=-6) * 2, _ROWS),
    "relu6": _case(lambda x: functional.relu6(x * 0.5), _ROWS),
    "hardswish": _case(lambda x: functional.hardswish(x), _ROWS),
    "hardtanh": _case(lambda x: functional.hardtanh(x, -8, 8), _ROWS),
    "threshold": _case(lambda x: functional.threshold(x, 4, -1), _ROWS),
    "softplus": _case(lambda x: functional.softplus(x), _ROWS),
    "softshrink": _case(lambda x: functional.softshrink(x, 3.5), _ROWS),
    "leaky": _case(lambda x: functional.leaky_relu(x - 5, 0.1), _ROWS),
    "huber": _case(lambda x: functional.huber_loss(x, x * 0, reduction="none", delta=5.0), _ROWS),
    "clamped_logits": _case(lambda x: (x @ _WEIGHT).clamp(-30, 30), _ROWS),
    # Epsilons, which matter for small values only.
    "norm_eps": _case(_relative, _ROWS),
    "variance_eps": _case(lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), _ROWS),
    "layer_norm": _case(lambda x: functional.layer_norm(x, (4,), eps=1e-5), _ROWS),
    "normalize": _case(lambda x: functional.normalize(x, dim=-1), _ROWS),
    "safe_log": _case(lambda x: torch.log(x.relu() + 1e-8), _ROWS),
    "safe_divide": _case(lambda x, y: x / (y + 1e-7), _ROWS, "y:float32[batch,4]=0..1"),
    "guarded_divide": _case(lambda x, y: torch.where(y == 0, 0.0, x / y), _ROWS, "y:float32[batch,4]"),
    # Rounding and remainders.
    "round": _case(lambda x: x.round() * 2, _ROWS),
    "floor": _case(lambda x: x.floor(), _ROWS),
    "to_integer": _case(lambda x: x.long(), _ROWS),
    "remainder": _case(lambda x: x % 24, _ROWS),
    "floor_divide": _case(lambda x: torch.div(x, 0.25, rounding_mode="floor"), _ROWS),
    "sign": _case(lambda x: torch.sign(x) + (x == 0).float(), _ROWS),
    # Integers: tables, buckets, masks.
    "integer_threshold": _case(lambda n: torch.where(n > 120, 1.0, n.float()), "n:int64[batch]"),
    "integer_divide": _case(lambda n: torch.div(n, 60, rounding_mode="trunc") + n % 60, "n:int64[batch]"),
    "buckets": _case(lambda x: torch.bucketize(x, torch.tensor([0.0, 10.0, 50.0])), _ROWS),
    "table": _case(lambda ids: functional.embedding(ids.clamp(max=5), _TABLE), _IDS),
    "padding_id": _case(lambda ids: functional.embedding(ids, _TABLE) * (ids != 0).unsqueeze(-1), _IDS),
    "last_id": _case(lambda ids: torch.where(ids == 5, 0.0, functional.embedding(ids, _TABLE)[..., 0]), _IDS),
    "all_of_a_row": _case(_all_known, _IDS),
    "any_of_a_row": _case(_kept_sum, _ROWS),
    "masked_mean": _case(_pooled, "x:float32[batch,n,3]", "mask:int64[batch,n]"),
    "attention_mask": _case(_attention, "x:float32[batch,n,3]", "mask:int64[batch,n]"),
    "ties": _case(lambda x: x.round().argmax(-1), _ROWS),
    "not_a_number": _case(lambda x: torch.nan_to_num(x, 0.0, 100.0, -100.0), _ROWS),
    "selected": _case(lambda x: x[x > 3.5].sum() + x.sum(), "x:float32[n]"),
    # Sizes.
    "first_columns": _case(lambda x: x[:, :200].sum(1), "x:float32[batch,n]"),
    "last_columns": _case(lambda x: x[:, -40:].sum(1), "x:float32[batch,n]"),
    "share_of_columns": _case(lambda x: x[:, : math.ceil(x.shape[1] * 0.3)].sum(1), "x:float32[batch,n]"),
    "every_third": _case(lambda x: x[:, : x.shape[1] // 3 * 3].sum(1), "x:float32[batch,n]"),
}

# Operators whose replacement is wrong for some values.
_SWAPS: dict[str, str] = {
    "gt": "ge",
    "ge": "gt",
    "lt": "le",
    "le": "lt",
    "round": "floor",
    "floor": "trunc",
    "trunc": "floor",
    "any": "all",
    "all": "any",
    "remainder": "fmod",
    "fmod": "remainder",
    "maximum": "add",
    "logical_or": "logical_and",
    "bitwise_or": "bitwise_and",
    "bitwise_and": "bitwise_or",
}
_DELETED = {"clamp", "clamp_min", "clamp_max", "hardtanh", "relu", "relu6", "nan_to_num", "abs", "round", "slice"}
_END = (1 << 63) - 1
_UNCHANGED = {"select", "unsqueeze", "squeeze", "sum", "mean", "amax", "amin", "transpose", "permute", "view", "expand"}


def mutants(graph: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield wrong variants of a graph: an operator swapped or left out, a branch always taken, a number changed."""
    for index, node in enumerate(graph.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target.overloadpacket.__name__
        for label, change in _changes(node, name):
            copied = fx.GraphModule(graph, _copied(graph.graph))
            change(list(copied.graph.nodes)[index])
            copied.graph.eliminate_dead_code()
            copied.recompile()
            yield f"{node.name}: {label}", copied


def _copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    output = new.graph_copy(graph, {})
    new.output(output)
    return new


def _changes(node: fx.Node, name: str) -> Iterator[tuple[str, Callable[[fx.Node], None]]]:
    if name in _SWAPS:
        packet = getattr(aten, _SWAPS[name])
        overload = str(node.target._overloadname)  # type: ignore[union-attr]
        if hasattr(packet, overload):
            yield f"{_SWAPS[name]} for {name}", lambda new: setattr(new, "target", getattr(packet, overload))
    if name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc"):
        other = {"floor": "trunc", "trunc": "floor"}[str(node.kwargs["rounding_mode"])]
        yield f"rounds by {other}", lambda new: setattr(new, "kwargs", {**new.kwargs, "rounding_mode": other})
    whole = name == "slice" and node.args[2:] in ((0, _END), (0,), ())
    if name in _DELETED and not whole:
        yield "left out", _leave_out
    if name == "where":
        for place in (1, 2):
            yield f"always argument {place}", partial(_always, place=place)
    if name == "argmax":
        yield "the last", _last
    if name not in _UNCHANGED:
        for place, value in enumerate(node.args[1:], 1):
            for changed in _numbers(value, name):
                yield f"{changed} for {value}", partial(_set, place=place, value=changed)


def _numbers(value: object, name: str) -> Iterator[float]:
    if type(value) is int and abs(value) < 1 << 40 and not (name == "slice" and value in (0, 1)):
        yield value + 1
    elif type(value) is float and value == value and abs(value) != float("inf"):
        if 0 < abs(value) <= 1e-3:
            yield from (0.0, 10 * value)
        else:
            yield value + 0.05 * abs(value) if value else 0.05


def _leave_out(node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])


def _set(node: fx.Node, place: int, value: float) -> None:
    node.update_arg(place, value)


def _always(node: fx.Node, place: int) -> None:
    with node.graph.inserting_before(node):
        condition: Any = node.args[0]
        fixed = node.graph.call_function(aten.full_like.default, (condition, place == 1), {"dtype": torch.bool})
    node.update_arg(0, fixed)


def _last(node: fx.Node) -> None:
    value: Any = node.args[0]
    size = 4
    with node.graph.inserting_before(node):
        flipped = node.graph.call_function(aten.flip.default, (value, [-1]))
    node.update_arg(0, flipped)
    with node.graph.inserting_after(node):
        index = node.graph.call_function(aten.rsub.Scalar, (node, size - 1))
    node.replace_all_uses_with(index, delete_user_cb=lambda user: user is not index)


class Called(nn.Module):
    """A function as a model, with the names of its parameters."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.forward = function
