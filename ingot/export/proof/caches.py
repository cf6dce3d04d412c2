"""Buffers that a model fills on its first call and that depend on sizes alone: constants, not states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from ingot.errors import ExportError, ParityError
from ingot.export.program import Eager
from ingot.export.proof.examples import Examples
from ingot.export.proof.probe import same, unchanged
from ingot.tensors import Array

Buffers = dict[str, torch.Tensor]


def find(eager: Eager, examples: Examples) -> Buffers:
    """Return the buffers that a first call fills, with their values at the default sizes.

    A second call with other inputs must not change them, and a first call with those inputs must fill them with the
    same values: a scale set by the first batch is a state.
    """
    first, other = (examples.make(examples.default_sizes, seed) for seed in (0, 1))
    with unchanged(eager.module) as saved:
        filled = _after(eager, first)
        changed = [name for name, value in filled.items() if name not in saved or not same(value, saved[name])]
        again = _after(eager, other) if changed else {}
    if not changed:
        return {}
    with unchanged(eager.module):
        apart = _after(eager, other)
    found = {
        name: filled[name]
        for name in changed
        if all(name in values and same(filled[name], values[name]) for values in (again, apart))
    }
    return found if len(found) == len(changed) else {}  # with a state, the others may be flags of that state


def fill(eager: Eager, caches: Buffers, example: Mapping[str, Array]) -> Eager:
    """Fill the caches of a model, and return the model with empty caches before each call.

    Raises:
        ParityError: its outputs change once the caches are filled.
    """
    module = eager.module
    empty = {name: getattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in caches}
    fresh = Eager(module, eager.arguments, eager.output_names, eager.states, empty, eager.scratch)
    _hold(module, caches)
    expected, actual = fresh.run(example), eager.run(example)
    for name, array in expected.items():
        if not np.array_equal(array, actual[name], equal_nan=array.dtype.kind in "fc"):
            raise ParityError(
                f"the model returns different '{name}' for the same input once its buffers {', '.join(caches)} are "
                "filled; compute them when it is built, or at each call"
            )
    return fresh


def remedy(eager: Eager, examples: Examples) -> str:
    """Return the dynamic dimensions that the caches depend on, with a remedy, for a capture that failed; or ''."""
    default = examples.default_sizes
    filled = _at(eager, examples, default)
    found = []
    for sizes in examples.cases():
        differing = [dim for dim, size in sizes.items() if size != default[dim]]
        if len(differing) != 1 or differing[0] in found:
            continue
        values = _at(eager, examples, sizes)
        if filled is not None and values is not None and not all(same(values[name], filled[name]) for name in filled):
            found += differing
    if not found:
        return ""
    dims = " and ".join(f"'{dim}'" for dim in found)
    return (
        f"the model keeps {', '.join(eager.caches)} between calls, computed for one size of {dims}: "
        f"declare {dims} as fixed, or let forward compute it at each call"
    )


def _at(eager: Eager, examples: Examples, sizes: Mapping[str, int]) -> Buffers | None:
    """Return the values of the caches after a first call at these sizes, or None if the model does not run there."""
    with unchanged(eager.module):
        _hold(eager.module, eager.caches)
        try:
            return {name: value for name, value in _after(eager, examples.make(sizes)).items() if name in eager.caches}
        except ExportError:
            return None


def _hold(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    for name, value in values.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], None if value is None else value.clone())


def _after(eager: Eager, inputs: Mapping[str, Array]) -> Buffers:
    """Call a model without resetting its caches, and return its buffers after the call."""
    Eager(eager.module, eager.arguments, eager.output_names).run(inputs)
    return {name: value.clone() for name, value in eager.module.named_buffers()}
