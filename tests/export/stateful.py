"""Small modules that keep state, initialize themselves or run other code than ``forward``, for the tests of states.

Each is a class with its inputs. ``CASES`` maps what it does to what an export must do: an answer that equals the
module's at each call, or a refusal whose text matches a pattern.
"""

from __future__ import annotations

import functools
import math
import os
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """How a module is made, its inputs, and the refusal of its export; None if it must be exported and right.

    ``lifted`` is the refusal with ``--lift-state``, the same by default; ``""`` if the state is lifted.
    """

    make: Callable[[], nn.Module]
    refused: str | None
    inputs: tuple[str, ...] = ("x:float32[batch,4]",)
    lifted: str | None = None


def module(forward: Callable[..., Any], setup: Callable[[Any], object] = lambda self: None, **members: Any) -> Any:
    """Return a module of a class with this ``forward``, after ``setup`` was called with it."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setup(self)

    Made.forward = forward
    for name, value in members.items():
        setattr(Made, name, value)
    return Made()


def buffer(**values: Any) -> Callable[[Any], None]:
    def setup(self: Any) -> None:
        for name, value in values.items():
            self.register_buffer(name, None if value is None else torch.as_tensor(value).clone())

    return setup


def weight(**values: Any) -> Callable[[Any], None]:
    def setup(self: Any) -> None:
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.as_tensor(value).clone()))

    return setup


def plain(**values: Any) -> Callable[[Any], None]:
    def setup(self: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value() if callable(value) else value)

    return setup


def both(*setups: Callable[[Any], object]) -> Callable[[Any], None]:
    def setup(self: Any) -> None:
        for each in setups:
            each(self)

    return setup


CASES: dict[str, Case] = {}


def case(
    title: str,
    refused: str | None,
    setup: Callable[[Any], object] = lambda self: None,
    *,
    lifted: str | None = None,
    inputs: tuple[str, ...] = ("x:float32[batch,4]",),
    **members: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a case whose module has the decorated function as its ``forward``."""

    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        CASES[title] = Case(functools.partial(module, forward, setup, **members), refused, inputs, lifted)
        return forward

    return add


# Buffers


@case("peak of all calls", "peak", buffer(peak=0.0), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.peak = torch.maximum(self.peak, x.abs().max())
    return x / (self.peak + 1)


@case("peak that large values raise", "peak", buffer(peak=50.0), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
    return x / self.peak


@case("peak that large values raise, under Python's if", "peak", buffer(peak=50.0), lifted="values of a tensor")
def _(self: Any, x: Tensor) -> Any:
    if bool(x.abs().max() > self.peak):
        self.peak.copy_(x.abs().max())
    return x / self.peak


@case("peak written where a condition holds", "peak", buffer(peak=50.0), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.peak.copy_(torch.where(x.max() > 100, x.max(), self.peak))
    return x - self.peak


@case("counter, and a peak that few inputs raise", "count", both(buffer(count=0.0), buffer(peak=50.0)), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.count += 1
    self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
    return x / self.peak + self.count


@case("counter in a buffer", "count", buffer(count=0), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.count += 1
    return x + self.count


@case("counter written by index", "count", buffer(count=[0.0, 0.0]), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.count[0] += 1
    return x + self.count.sum()


@case("counter written through a view", "count", buffer(count=[0.0, 0.0]), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.count.view(2)[1:].add_(1)
    return x + self.count.sum()


@case("counter in .data of a buffer", "count", buffer(count=0.0), lifted="captured graph changes")
def _(self: Any, x: Tensor) -> Any:
    self.count.data.add_(1)
    return x + self.count


@case("ring of earlier inputs", "ring", buffer(ring=torch.zeros(3, 4)), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.ring = torch.cat([self.ring[1:], x.mean(0, keepdim=True)])
    return x + self.ring.sum(0)


@case("buffer that grows", "seen", buffer(seen=torch.zeros(1, 4)))
def _(self: Any, x: Tensor) -> Any:
    self.seen = torch.cat([self.seen, x.mean(0, keepdim=True)])
    return x + self.seen.sum(0)


@case("NaN until the first call", "first", buffer(first=math.nan), lifted="")
def _(self: Any, x: Tensor) -> Any:
    self.first = torch.where(torch.isnan(self.first), x.mean(), self.first)
    return x - self.first


@case("batch normalization that stays in training", "running_mean", plain(norm=lambda: nn.BatchNorm1d(4)))
def _(self: Any, x: Tensor) -> Any:
    self.norm.training = True
    return self.norm(x)


@case(
    "batch normalization whose eval does nothing",
    "norm",
    plain(norm=lambda: nn.BatchNorm1d(4)),
    train=lambda self, mode=True: self,
)
def _(self: Any, x: Tensor) -> Any:
    return self.norm(x)


@case(
    "one buffer lifted, one attribute dropped", "count|total", both(buffer(count=0.0), plain(total=0.0)), lifted="total"
)
def _(self: Any, x: Tensor) -> Any:
    self.count += 1
    self.total = self.total + 1.0
    return x + self.count + self.total


@case("buffer that is two of a kind", "second", buffer(first=0.0), lifted="makes the buffer second")
def _(self: Any, x: Tensor) -> Any:
    if "second" not in self._buffers:
        self.register_buffer("second", self.first)
    self.first.add_(1)
    return x + self.second


@case("spectral norm by the old hook", None, plain(layer=lambda: nn.utils.spectral_norm(nn.Linear(4, 4))))
def _(self: Any, x: Tensor) -> Any:
    return self.layer(x)


# Attributes


@case("counter in an attribute", "calls", plain(calls=0))
def _(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return x + self.calls


@case("counter that shows from the fourth call", "calls", plain(calls=0))
def _(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return x + 1 if self.calls > 3 else x


@case("counter that shows a little", "calls", plain(calls=0))
def _(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return x + 1e-6 * self.calls


@case("peak in a Python number", "peak", plain(peak=50.0))
def _(self: Any, x: Tensor) -> Any:
    self.peak = max(self.peak, float(x.abs().max()))
    return x / self.peak


@case("peak in a tensor that is not a buffer", "peak", plain(peak=lambda: torch.tensor(50.0)))
def _(self: Any, x: Tensor) -> Any:
    self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
    return x / self.peak


@case("counter in a tensor that is not a buffer", "count", plain(count=lambda: torch.zeros(())))
def _(self: Any, x: Tensor) -> Any:
    self.count += 1
    return x + self.count


@case("counter in a list", "log", plain(log=list))
def _(self: Any, x: Tensor) -> Any:
    self.log.append(1)
    return x + len(self.log)


@case("sizes in a list outside of captures", None, plain(sizes=list))
def _(self: Any, x: Tensor) -> Any:
    if not torch.compiler.is_exporting():
        self.sizes.append(len(x))
    return x * 2


@case("sizes in a list", None, plain(sizes=list))
def _(self: Any, x: Tensor) -> Any:
    self.sizes.append(len(x))
    return x * 2


@case("counter in a list of one number", "log", plain(log=lambda: [0]))
def _(self: Any, x: Tensor) -> Any:
    self.log[0] += 1
    return x + self.log[0]


@case("counter in a dict", "state", plain(state=dict))
def _(self: Any, x: Tensor) -> Any:
    self.state["calls"] = self.state.get("calls", 0) + 1
    return x + self.state["calls"]


class Registry(dict[str, Any]):
    """Like a registry of transformers: other parameters than a dictionary's, and keys that it changes."""

    def get(self, key: Any) -> Any:  # type: ignore[override]
        return super().get(str(key)) or {}

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(f"{key}!", value)

    def __iter__(self) -> Any:
        raise TypeError("it has no order")

    keys = values = items = clear = update = __len__ = __iter__  # type: ignore[assignment]


class Ordered(OrderedDict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key, last=False)

    def clear(self) -> None:
        raise TypeError("it only grows")


class Series(list[Any]):
    def __iter__(self) -> Any:
        raise TypeError("it has no order")

    clear = extend = append = __len__ = __iter__  # type: ignore[assignment]


@case(
    "containers with other methods",
    None,
    plain(registry=lambda: Registry({"a": 1}), ordered=lambda: Ordered(a=1, b=2), series=lambda: Series([1, 2])),
)
def _(self: Any, x: Tensor) -> Any:
    return x * dict.__getitem__(self.registry, "a") * list.__getitem__(self.series, 1)


@case("counter in containers with other methods", "registry", plain(registry=lambda: Registry({"a": 1})))
def _(self: Any, x: Tensor) -> Any:
    dict.__setitem__(self.registry, "a", dict.__getitem__(self.registry, "a") + 1)
    return x + dict.__getitem__(self.registry, "a")


FACTOR = torch.tensor(2.0)
TOTAL = torch.tensor(0.0)


@case("number of the file", None)
def _(self: Any, x: Tensor) -> Any:
    return x * FACTOR


@case("counter in a number of the file", "TOTAL")
def _(self: Any, x: Tensor) -> Any:
    TOTAL.add_(1)
    return x + TOTAL


@case("counter in an object", "state", plain(state=lambda: types.SimpleNamespace(calls=0)))
def _(self: Any, x: Tensor) -> Any:
    self.state.calls += 1
    return x + self.state.calls


@case("earlier inputs in a deque", "recent", plain(recent=lambda: deque(maxlen=3)))
def _(self: Any, x: Tensor) -> Any:
    self.recent.append(x.mean(0))
    return x + sum(self.recent)


@case("hidden state of the last call", "hidden", plain(hidden=lambda: None, cell=lambda: nn.GRUCell(4, 4)))
def _(self: Any, x: Tensor) -> Any:
    if self.hidden is not None and len(self.hidden) != len(x):
        self.hidden = None
    self.hidden = self.cell(x, self.hidden)
    return self.hidden


@case("first input of all", "first", plain(first=None))
def _(self: Any, x: Tensor) -> Any:
    if self.first is None:
        self.first = x.mean(0)
    return x - self.first


@case("numpy array that is written", "total", plain(total=lambda: np.zeros(1, np.float32)))
def _(self: Any, x: Tensor) -> Any:
    self.total += 1
    return x + float(self.total[0])


@case("numpy array that is read only", None, plain(table=lambda: np.frombuffer(b"abcd", np.uint8)))
def _(self: Any, x: Tensor) -> Any:
    return x * int(self.table[0])


@case("numpy array that is resized", None, plain(log=lambda: np.zeros(3)))
def _(self: Any, x: Tensor) -> Any:
    self.log.resize((5,), refcheck=False)
    return x * 2


@case("generator of random numbers", "noise|random", plain(noise=lambda: torch.Generator().manual_seed(0)))
def _(self: Any, x: Tensor) -> Any:
    return x + torch.rand(4, generator=self.noise)


@case("generator of Python", "noise|random", plain(noise=lambda: random.Random(0)))
def _(self: Any, x: Tensor) -> Any:
    return x + self.noise.random()


@case("generator of numpy", "noise|random", plain(noise=lambda: np.random.default_rng(0)))
def _(self: Any, x: Tensor) -> Any:
    return x + float(self.noise.random())


@case("counter of the class", "calls", calls=0)
def _(self: Any, x: Tensor) -> Any:
    type(self).calls += 1
    return x + self.calls


def _closure() -> nn.Module:
    calls = 0

    def forward(self: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return x + calls

    return module(forward)  # type: ignore[no-any-return]


CASES["counter in a closure"] = Case(_closure, "state|calls")


@case("last input, which nothing reads", None, plain(last=None))
def _(self: Any, x: Tensor) -> Any:
    self.last = x
    return x * 2


@case("counter that nothing reads", None, plain(calls=0))
def _(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return x * 2


@case("random numbers", "random")
def _(self: Any, x: Tensor) -> Any:
    return x + torch.rand(4)


@case("dropout that stays in training", "random")
def _(self: Any, x: Tensor) -> Any:
    return functional.dropout(x, 0.5, training=True)


@case("random numbers of a fixed seed", None)
def _(self: Any, x: Tensor) -> Any:
    torch.manual_seed(1)
    return x * 2


# Initialization by the first call


def _normalize(self: Any, x: Tensor) -> Any:
    if not self.known:
        self.scale.data.copy_(1 / (x.std(0) + 1e-6))
        self.known = True
    return x * self.scale


CASES["ActNorm with a flag"] = Case(
    functools.partial(module, _normalize, both(weight(scale=torch.ones(4)), plain(known=False))), "scale.*first call"
)
CASES["ActNorm of a buffer with a flag"] = Case(
    functools.partial(module, _normalize, both(buffer(scale=torch.ones(4)), plain(known=False))), "scale|known"
)


@case("ActNorm with a flag in a buffer", "scale", both(weight(scale=torch.ones(4)), buffer(known=False)))
def _(self: Any, x: Tensor) -> Any:
    if not self.known:
        with torch.no_grad():
            self.scale.copy_(1 / (x.std(0) + 1e-6))
            self.known.fill_(True)
    return x * self.scale


@case("buffer registered by the first call", "mean")
def _(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "mean"):
        self.register_buffer("mean", x.mean(0))
    return x - self.mean


@case("parameter registered by the first call", "mean")
def _(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "mean"):
        self.mean = nn.Parameter(x.mean(0).detach())
    return x - self.mean


@case("layer made by the first call", "layer")
def _(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "layer"):
        self.layer = nn.Linear(x.shape[1], 3)
    return self.layer(x)


@case("lazy layer", "layer|initialized", plain(layer=lambda: nn.LazyLinear(3)))
def _(self: Any, x: Tensor) -> Any:
    return self.layer(x)


@case("weight normalization initialized by data", "gain", both(weight(gain=1.0), plain(ready=False)))
def _(self: Any, x: Tensor) -> Any:
    if not self.ready:
        self.gain.data = 1 / x.std().reshape(())
        self.ready = True
    return x * self.gain


@case("scale of the first call in a Python number", "scale", plain(scale=None))
def _(self: Any, x: Tensor) -> Any:
    if self.scale is None:
        self.scale = float(x.abs().max())
    return x / self.scale


# Parameters


@case("parameter multiplied by 1 in .data", "weight", weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.data.mul_(1.0)
    return x * self.weight


@case("parameter clamped in .data", "weight", weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.data.clamp_(-0.5, 0.5)
    return x * self.weight


@case("parameter that decays", "weight", weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.data.mul_(0.9)
    return x * self.weight


@case("parameter whose .data is replaced", "weight", weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.data = self.weight.data * 0.9
    return x * self.weight


@case("parameter written by a detached view", "weight", weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.detach()[0] += 1
    return x * self.weight


@case("parameter that a large value scales", "weight", weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.data.copy_(torch.where(x.abs().max() > 100, 2 * self.weight, self.weight))
    return x * self.weight


@case(
    "embedding with max_norm",
    "rows.weight",
    plain(rows=lambda: nn.Embedding(5, 4, max_norm=0.5)),
    inputs=("x:int64[batch,3]=0..4",),
)
def _(self: Any, x: Tensor) -> Any:
    return self.rows(x)


@case(
    "embedding whose max_norm changes one row",
    "rows.weight",
    both(
        plain(rows=lambda: nn.Embedding(50, 4, max_norm=2.0)),
        lambda self: self.rows.weight.data.fill_(0.1),
        lambda self: self.rows.weight.data[47].fill_(5.0),
    ),
    inputs=("x:int64[batch,3]=0..49",),
)
def _(self: Any, x: Tensor) -> Any:
    return self.rows(x)


def _old_weight_norm(self: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        self.layer = nn.utils.weight_norm(nn.Linear(4, 4))


@case("weight norm by the old hook", None, _old_weight_norm)
def _(self: Any, x: Tensor) -> Any:
    return self.layer(x)


@case(
    "weight norm by parametrization", None, plain(layer=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
)
def _(self: Any, x: Tensor) -> Any:
    return self.layer(x)


@case(
    "spectral norm by parametrization",
    None,
    plain(layer=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
)
def _(self: Any, x: Tensor) -> Any:
    return self.layer(x)


class _LoRA(nn.Linear):
    """Merges its two factors into the weight in evaluation mode, as loralib does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.a, self.b, self.merged = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(4, 1)), False

    def train(self, mode: bool = True) -> _LoRA:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (1 if not mode else -1) * (self.b @ self.a).data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.merged else result + x @ (self.b @ self.a).T


CASES["LoRA that merges in eval"] = Case(lambda: nn.Sequential(_LoRA(), nn.ReLU()), None)


# Caches


@case("mask cached in an attribute by its size", None, plain(mask=None), inputs=("x:float32[batch,seq,4]",))
def _(self: Any, x: Tensor) -> Any:
    if self.mask is None or len(self.mask) != x.shape[1]:
        self.mask = torch.ones(x.shape[1], x.shape[1]).tril()
    return self.mask @ x


@case("rotary table that grows", None, buffer(table=torch.zeros(0)), inputs=("x:float32[batch,seq,4]",))
def _(self: Any, x: Tensor) -> Any:
    if x.shape[1] > len(self.table):
        self.table = torch.arange(x.shape[1]).float()
    return x * self.table[: x.shape[1], None].cos()


@case(
    "rotary table that grows past 100",
    "table|seq",
    both(plain(table=lambda: torch.arange(100.0)), plain(scale=1.0)),
    inputs=("x:float32[batch,seq,4]",),
)
def _(self: Any, x: Tensor) -> Any:
    if x.shape[1] > len(self.table):
        self.scale = x.shape[1] / 100
        self.table = torch.arange(x.shape[1]).float() / self.scale
    return x * self.table[: x.shape[1], None].cos()


@case("dynamic rope whose base grows", "longest", plain(longest=8), inputs=("x:float32[batch,seq,4]",))
def _(self: Any, x: Tensor) -> Any:
    self.longest = max(self.longest, x.shape[1])
    return x * (torch.arange(x.shape[1]) / self.longest).cos()[:, None]


@case("table filled once, of a fixed size", None, buffer(table=None))
def _(self: Any, x: Tensor) -> Any:
    if self.table is None:
        self.table = torch.arange(4.0)
    return x + self.table


@case("table in an attribute filled once, with a flag", None, plain(table=None, ready=False))
def _(self: Any, x: Tensor) -> Any:
    if not self.ready:
        self.table, self.ready = torch.arange(4.0), True
    return x + self.table


@case("flag that turns another answer on", "ready", plain(ready=False))
def _(self: Any, x: Tensor) -> Any:
    if self.ready:
        return x + 1
    self.ready = True
    return x


@case("result of an equal shape, cached", "answers", plain(answers=dict))
def _(self: Any, x: Tensor) -> Any:
    if len(x) not in self.answers:
        self.answers[len(x)] = x * 2
    return self.answers[len(x)]


# Calls


def _hooked(register: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4))
        register(made)
        return made

    return make


def _halved(module: Any, args: tuple[Any, ...]) -> Any:
    return tuple(value / 2 for value in args)


def _halved_keywords(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(value / 2 for value in args), {name: value / 2 for name, value in kwargs.items()}


def _counted(module: Any, output: Tensor) -> Any:
    module.calls = getattr(module, "calls", 0) + 1
    return output + module.calls


CASES["hook before the root"] = Case(_hooked(lambda made: made.register_forward_pre_hook(_halved)), None)
CASES["hook before the root, with keywords"] = Case(
    _hooked(lambda made: made.register_forward_pre_hook(_halved_keywords, with_kwargs=True)), None
)
CASES["hook after the root"] = Case(_hooked(lambda made: made.register_forward_hook(lambda m, a, y: y + 1)), None)
CASES["hook after the root that reads the input"] = Case(
    _hooked(lambda made: made.register_forward_hook(lambda m, args, y: y + sum(args))), None
)
CASES["hook before a layer"] = Case(_hooked(lambda made: made[0].register_forward_pre_hook(_halved)), None)
CASES["hook after a layer that keeps its output"] = Case(
    _hooked(lambda made: made[0].register_forward_hook(lambda m, a, y: setattr(m, "last", y))), None
)
CASES["hook that counts"] = Case(
    _hooked(lambda made: made.register_forward_hook(lambda m, a, y: _counted(m, y))),
    "calls",
)


@case(
    "call that is overridden",
    None,
    __call__=lambda self, *args, **kwargs: nn.Module.__call__(self, *(a * 2 for a in args), **kwargs),
)
def _(self: Any, x: Tensor) -> Any:
    return x + 1


@case(
    "call with other names",
    None,
    __call__=lambda self, image: nn.Module.__call__(self, image * 2),
)
def _(self: Any, x: Tensor) -> Any:
    return x + 1


def _doubling(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *(value * 2 for value in args), **kwargs)

    return call


@case("decorator without the names", None)
@_doubling
def _(self: Any, x: Tensor) -> Any:
    return x + 1


@case("decorator with the names", None)
@(lambda function: functools.wraps(function)(_doubling(function)))
def _(self: Any, x: Tensor) -> Any:
    return x + 1


@case("forward that is replaced", None, lambda self: _replace(self))
def _(self: Any, x: Tensor) -> Any:
    return x + 1


def _replace(self: Any) -> None:
    own = self.forward
    self.forward = lambda *args, **kwargs: own(*(value * 2 for value in args), **kwargs)


@case(
    "two inputs, and a hook on the second",
    None,
    lambda self: _second(self),
    inputs=("x:float32[batch,4]", "y:float32[batch,4]"),
)
def _(self: Any, x: Tensor, y: Tensor) -> Any:
    return x - y


def _second(self: Any) -> None:
    self.register_forward_pre_hook(lambda module, args: (args[0], *(value * 3 for value in args[1:])))


@case("gap before an input", None, inputs=("x:float32[batch,4]", "z:float32[batch,4]"))
def _(self: Any, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
    return x + (0 if y is None else 100 * y) - (0 if z is None else z)


# The process


@case("environment and warnings", None)
def _(self: Any, x: Tensor) -> Any:
    os.environ["TEST_STATE"] = "1"
    warnings.filterwarnings("ignore", message="ingot test")
    return x * 2


@case("default type", None)
def _(self: Any, x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    return x * 2


@case("deterministic algorithms", None)
def _(self: Any, x: Tensor) -> Any:
    torch.use_deterministic_algorithms(True)
    return x * 2


@case("gradients switched off", None, weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    return x * self.weight


@case("frozen by the first call", None, weight(weight=torch.ones(4)))
def _(self: Any, x: Tensor) -> Any:
    self.weight.requires_grad_(False)
    return x * self.weight


@case("hook registered by the first call", None)
def _(self: Any, x: Tensor) -> Any:
    if not self._forward_hooks:
        self.register_forward_hook(lambda module, args, output: None)
    return x * 2


@case("hook registered by the first call that changes the next", "hook")
def _(self: Any, x: Tensor) -> Any:
    if not self._forward_hooks:
        self.register_forward_hook(lambda module, args, output: output + 1)
    return x * 2


@case("mode of a layer switched", None, plain(drop=lambda: nn.Dropout(0.5)))
def _(self: Any, x: Tensor) -> Any:
    self.drop.eval()
    return self.drop(x)
