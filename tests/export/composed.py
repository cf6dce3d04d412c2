"""Modules composed of four parts: a state, a way to call, an operation on the batch and one along the sequence.

Faults lie where parts meet, as where a hook changes what a state sees. :data:`COMPOSITIONS` are a twentieth of all
combinations, in which each part meets each part of another kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

INPUTS = ("x:float32[batch,seq,4]", "mask:int64[batch,seq]")
# With this step, each part meets each part of another kind.
_STEP, _COUNT = 291, 256


@dataclass(frozen=True)
class State:
    """What a module does with its state before its first layer.

    Attributes:
        name: in the test's name.
        run: from the module and values [batch, seq, 4] to values of the same shape.
        prepare: called once with the module.
        refused: the refusal of the export; None if it is lifted, or there is no state.
        apart: whether samples do not meet in it.
        kept: whether the next call depends on it.
    """

    name: str
    run: Callable[[Any, Tensor], Tensor]
    prepare: Callable[[Any], object] = lambda module: None
    refused: str | None = None
    apart: bool = True
    kept: bool = True


@dataclass(frozen=True)
class Way:
    """How the module's code is reached: by hooks, or by another class."""

    name: str
    prepare: Callable[[Any], object] = lambda module: None
    kind: Callable[[type[nn.Module]], type[nn.Module]] = lambda made: made


@dataclass(frozen=True)
class Step:
    """An operation on values and a mask; ``apart`` is whether samples do not meet in it."""

    name: str
    run: Callable[[Tensor, Tensor], Tensor]
    apart: bool = True
    padded: bool = False


class Composed(nn.Module):
    """Runs its parts one after another, with a layer between them."""

    def __init__(self, state: State, way: Way, batch: Step, along: Step):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.run, self.batch, self.along = state.run, batch.run, along.run
        state.prepare(self)
        way.prepare(self)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layer(self.run(self, x)).tanh()
        return self.along(self.batch(x, mask), mask)


def _buffer(name: str, value: Any) -> Callable[[Any], object]:
    return lambda module: module.register_buffer(name, torch.as_tensor(value))


def _attribute(name: str, make: Callable[[], Any]) -> Callable[[Any], object]:
    return lambda module: setattr(module, name, make())


def _count(module: Any, x: Tensor) -> Any:
    module.count += 1
    return x + module.count * 0.1


def _peak(module: Any, x: Tensor) -> Any:
    module.peak.copy_(torch.where(x.max() > 3, x.max(), module.peak))
    return x / module.peak


def _mean(module: Any, x: Tensor) -> Any:
    module.mean = module.mean * 0.9 + x.mean((0, 1)) * 0.1
    return x - module.mean


def _scratch(module: Any, x: Tensor) -> Any:
    module.scratch.copy_(x[0, 0])
    return x + module.scratch * 0.5


def _calls(module: Any, x: Tensor) -> Any:
    module.calls += 1
    return x * module.calls


def _seen(module: Any, x: Tensor) -> Tensor:
    module.seen.append(len(module.seen))
    return x + len(module.seen)


def _closure(module: Any) -> None:
    calls = [0]

    def advance() -> int:
        calls[0] += 1
        return calls[0]

    module.advance = advance


def _first(module: Any, x: Tensor) -> Any:
    if module.scale is None:
        module.scale = x.abs().mean()
    return x / module.scale


def _grown(module: Any, x: Tensor) -> Any:
    module.past = torch.cat([module.past, x[:1, :1].reshape(1, 4)])
    return x + module.past.mean(0)


STATES = (
    State("none", lambda module, x: x, kept=False),
    State("count", _count, _buffer("count", 0.0)),
    State("peak", _peak, _buffer("peak", 2.0), apart=False),
    State("mean", _mean, _buffer("mean", torch.zeros(4)), apart=False),
    State("scratch", _scratch, _buffer("scratch", torch.zeros(4)), apart=False, kept=False),
    State("number", _calls, _attribute("calls", int), refused="calls"),
    State("list", _seen, _attribute("seen", list), refused="seen"),
    State("closure", lambda module, x: x + module.advance(), _closure, refused="calls"),
    State("first call", _first, _attribute("scale", lambda: None), refused="scale"),
    State("growing", _grown, _buffer("past", torch.zeros(1, 4)), refused="past"),
)


def _overridden(made: type[nn.Module]) -> type[nn.Module]:
    class Overridden(made):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 3

    return Overridden


def _decorated(made: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any) -> Any:
        return made.forward(self, *args) - 1

    return type("Decorated", (made,), {"forward": forward})


WAYS = (
    Way("plain"),
    Way("hook before", lambda made: made.register_forward_pre_hook(lambda m, args: (args[0] / 2, *args[1:]))),
    Way(
        "hook before with keywords",
        lambda made: made.register_forward_pre_hook(
            lambda m, args, named: ((args[0] + 1, *args[1:]), named), with_kwargs=True
        ),
    ),
    Way(
        "hook after",
        lambda made: made.register_forward_hook(
            lambda m, args, y: y + args[0].mean((1, 2)).reshape(-1, *[1] * (y.dim() - 1))
        ),
    ),
    Way("hook in a layer", lambda made: made.layer.register_forward_hook(lambda m, args, y: y * args[0].sigmoid())),
    Way("weight norm", lambda made: nn.utils.parametrizations.weight_norm(made.layer)),
    Way("overridden call", kind=_overridden),
    Way("decorated", kind=_decorated),
)


def _by_position(x: Tensor, mask: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0])] * 2


def _rare(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where((x > 0.9999).any(), -x, x)


def _rows(x: Tensor, mask: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[0]) < 16)[:, None, None]


def _capacity(x: Tensor, mask: Tensor) -> Tensor:
    chosen = functional.one_hot(x.mean(1).argmax(-1), 4)
    return x * ((chosen.cumsum(0) * chosen).sum(-1) <= 16)[:, None, None]


BATCHES = (
    Step("apart", lambda x, mask: x),
    Step("own largest", lambda x, mask: x / x.abs().amax((1, 2), keepdim=True).clamp(min=0.1)),
    Step("by position", _by_position),
    Step("mean", lambda x, mask: x - x.mean(0), apart=False),
    Step("rare value", _rare, apart=False),
    Step("sixteen rows", _rows, apart=False),
    Step("capacity", _capacity, apart=False),
    Step("sorted", lambda x, mask: x.sort(0).values, apart=False),
)


def _masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _masked_largest(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask[..., None] == 0, -1e9).amax(1)


def _attention(x: Tensor, mask: Tensor) -> Tensor:
    return _masked_mean(functional.scaled_dot_product_attention(x, x, x, mask[:, None] > 0), mask)


def _by_length(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1) / (x.shape[1] // 16 + 1)


ALONG = (
    Step("mean", _masked_mean),
    Step("each", lambda x, mask: (x * mask[..., None]).cumsum(1)),
    Step("length", _by_length),
    Step("last", lambda x, mask: x[:, -1]),
    Step("padded mean", _masked_mean, padded=True),
    Step("padded largest", _masked_largest, padded=True),
    Step("padded attention", _attention, padded=True),
    Step("padded length", _by_length, padded=True),
)


@dataclass(frozen=True)
class Composition:
    """One choice of each part."""

    state: State
    way: Way
    batch: Step
    along: Step

    @property
    def title(self) -> str:
        return ", ".join(part.name for part in (self.state, self.way, self.batch, self.along))

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.way.kind(Composed)(self.state, self.way, self.batch, self.along)


_ALL = list(itertools.product(STATES, WAYS, BATCHES, ALONG))
COMPOSITIONS = [Composition(*_ALL[place * _STEP % len(_ALL)]) for place in range(_COUNT)]
