"""Rewrite rules for both kinds of graph, one per file, and the selection among them and the user's own.

Start in fx/silu_gate.py and onnx/layer_norm.py, which are short. A new rule is an instance in ``RULES`` of fx or onnx;
:func:`select` chooses those of one export.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.export.rewrite import ops
from ingot.export.rewrite.passes.manager import FxPass, OnnxPass
from ingot.export.rewrite.rules import fx, onnx

ENTRY_POINTS = "ingot.rules"
"""The entry-point group of a user's rules: each entry is a pass, or a sequence of passes."""


def select(wanted: Sequence[str | FxPass | OnnxPass] = ("default",)) -> tuple[tuple[FxPass, ...], tuple[OnnxPass, ...]]:
    """Return the rules of each kind, in the order in which they run.

    Args:
        wanted: names of rules, or ``default``, ``all`` or ``none``. Passes among them run first.

    Raises:
        InvalidArgument: a name is unknown, or an entry point does not hold passes.
    """
    # The user's rules run first: Ingot's could replace parts of their patterns.
    own = [item for item in wanted if not isinstance(item, str)]
    known = (*own, *ops.rules(), *_installed(), *fx.RULES, *onnx.RULES)
    names = {rule.name for rule in known}
    for name in (item for item in wanted if isinstance(item, str)):
        if name not in names | {"default", "all", "none"}:
            raise InvalidArgument(f"there is no rule '{name}'; the rules are: {', '.join(sorted(names))}")
    chosen = [
        rule
        for rule in known
        if rule in own or rule.name in wanted or "all" in wanted or ("default" in wanted and rule.default)
    ]
    return (
        tuple(rule for rule in chosen if isinstance(rule, FxPass)),
        tuple(rule for rule in chosen if isinstance(rule, OnnxPass)),
    )


def _loaded(entry: EntryPoint) -> Any:
    def unloaded(error: Exception) -> str:
        return f"the rules of entry point '{entry.name}' cannot be loaded: {error}"

    with foreign.reported_as(InvalidArgument, unloaded):
        return entry.load()


def _installed() -> list[FxPass | OnnxPass]:
    found: list[FxPass | OnnxPass] = []
    for entry in entry_points(group=ENTRY_POINTS):
        loaded = _loaded(entry)
        for rule in loaded if isinstance(loaded, Sequence) else [loaded]:
            if not isinstance(rule, FxPass | OnnxPass):
                raise InvalidArgument(f"entry point '{entry.name}' holds a {type(rule).__name__}, which is not a pass")
            found.append(rule)
    return found
