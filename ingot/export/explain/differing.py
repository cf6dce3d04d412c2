"""Code that computes other numbers during a capture than in a call, named where a captured graph differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from torch import nn

_CAPTURES = frozenset(["is_compiling", "is_exporting", "is_dynamo_compiling", "is_torchdynamo_compiling"])
_SEEDS = frozenset(["manual_seed", "Generator", "default_rng", "RandomState"])
_REMEDIES = {
    _CAPTURES: "a capture takes another side of its branch than a call; remove the branch",
    _SEEDS: "a graph does not draw the same random numbers; draw them once, into a buffer, or accept them as an input",
}


def named(module: nn.Module) -> str:
    """Return the first call in a ``forward`` that explains why a graph differs, with a remedy; empty without one."""
    for part in module.modules():
        code = getattr(getattr(type(part), "forward", None), "__code__", None)
        if code is None or type(part).__module__.startswith("torch."):
            continue
        names = dict.fromkeys(_names(code))
        for group, remedy in _REMEDIES.items():
            for name in (name for name in names if name in group):
                place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                return f"{type(part).__name__}.forward ({place}) uses {name}: {remedy}"
    return ""


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
