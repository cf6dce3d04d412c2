"""Tensor-parallel plans: which layers of a model may be divided over processes, and how."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import nn

from ingot.errors import InvalidArgument
from ingot.model_store.format.manifest import Division
from ingot.runtime.engines.sharding.tensor_parallel import division_of

AUTO: Final = "auto"
"""The model's own plan, as models of transformers have one."""
# The names in plans of transformers; where results are gathered follows from the program.
_STYLES: Mapping[str, Division] = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "embedding_rowwise": "rowwise",
}


def read_plan(path: Path) -> Mapping[str, str]:
    """Return the plan in a JSON file.

    Raises:
        InvalidArgument: it cannot be read, or is not an object of texts.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"the tensor-parallel plan {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"the tensor-parallel plan {path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(style, str) for style in found.values()):
        raise InvalidArgument(
            f"the tensor-parallel plan {path} is not an object of modules and styles; write "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    return found


def plan_of(model: nn.Module, given: Mapping[str, str] | str, remark: Callable[[str], None]) -> dict[str, Division]:
    """Return the plan for a model.

    Args:
        model: whose modules the plan names.
        given: styles by the names of modules, in which ``*`` stands for one part, or :data:`AUTO`.
        remark: called with how much the plan divides, and what of the model's own plan is left out.

    Raises:
        InvalidArgument: the plan is empty, names no module or one without a matrix, or has an unknown style; or the
            model has no plan.
    """
    if isinstance(given, str):
        if given != AUTO:
            raise InvalidArgument(f"'{given}' is not a tensor-parallel plan; give a mapping, or '{AUTO}'")
        return _own_plan(model, remark)
    if not given:
        raise InvalidArgument("the tensor-parallel plan is empty; name a linear layer in it")
    plan: dict[str, Division] = {}
    for pattern, style in given.items():
        if style not in ("colwise", "rowwise"):
            raise InvalidArgument(
                f"'{style}' of {pattern} is not a style of a tensor-parallel plan; use colwise or rowwise"
            )
        _check(model, pattern)
        plan[pattern] = _STYLES[style]
    remark(_extent(model, plan))
    return plan


def _own_plan(model: nn.Module, remark: Callable[[str], None]) -> dict[str, Division]:
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(own, Mapping) or not own:
        raise InvalidArgument(
            f"{type(model).__name__} lacks a tensor-parallel plan, tp_plan or _tp_plan; write one to a "
            'file, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, and give that'
        )
    plan = {pattern: _STYLES[style] for pattern, style in own.items() if style in _STYLES and _modules(model, pattern)}
    if left_out := {pattern: style for pattern, style in own.items() if pattern not in plan}:
        shown = ", ".join(f"{pattern} ({style})" for pattern, style in left_out.items())
        remark(f"every process of --shards holds all weights of {shown}")
    for pattern in plan:
        _check(model, pattern)
    if not plan:
        raise InvalidArgument(
            f"the tensor-parallel plan of {type(model).__name__} divides none of its layers; write one"
        )
    remark(_extent(model, plan))
    return plan


def _extent(model: nn.Module, plan: Mapping[str, Division]) -> str:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Embedding)}
    divided = [layer for name, layer in layers.items() if division_of(name, plan)]
    parts = {id(layer.weight): layer.weight.numel() for layer in divided}  # by identity, as layers can share weights
    share = sum(parts.values()) / sum(weight.numel() for weight in model.parameters())
    return (
        f"the tensor-parallel plan divides {len(divided)} of {len(layers)} layers, {share:.0%} of the weights; each "
        "process of --shards holds the others whole"
    )


def _modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if division_of(name, {pattern: "colwise"})]


def _check(model: nn.Module, pattern: str) -> None:
    """Check that a pattern names layers that can be divided."""
    found = _modules(model, pattern)
    others = {type(module).__name__ for module in found if not isinstance(module, nn.Linear | nn.Embedding)}
    if found and not others:
        return
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    fault = f"names {', '.join(sorted(others))}, which cannot be divided" if others else "names no module of the model"
    raise InvalidArgument(f"'{pattern}' of the tensor-parallel plan {fault}; there are: {shown or 'no linear layers'}")
