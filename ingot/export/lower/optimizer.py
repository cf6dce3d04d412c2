"""onnxscript's optimizer, applied as a whole, or step by step where it breaks a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions

from ingot import foreign
from ingot.model_store.format import onnx_graph

# Folding and the rules enable each other; onnxscript repeats them as often.
_ROUNDS = 2


@dataclass(frozen=True)
class Step:
    """A part of the optimizer that can be left out. ``run`` changes a model in place, and returns whether it did."""

    name: str
    run: Callable[[ir.Model], bool]


def optimize(model: ir.Model) -> None:
    """Do what PyTorch's exporter does with ``optimize=True``, but match the constants of rules exactly."""
    onnx_graph.inline(model)
    for _ in range(_ROUNDS):
        changed = _fold(model)
        if not (_rewrite(_rules(), model) or changed):
            break
    _finish(model)
    _fuse(model)


def optimize_gradually(
    model: ir.Model, accept: Callable[[ir.Model], object] = lambda model: None
) -> tuple[ir.Model, dict[str, Exception]]:
    """Apply the steps of :func:`optimize` one at a time, without those that fail.

    Args:
        model: a model without functions of the exporter; it stays as it is.
        accept: called with the model after each step that changed it; raises an error to reject the step.

    Returns:
        The optimized model, and the error of each step that was left out, by the step's name.
    """
    rejected: dict[str, Exception] = {}
    for step in _steps():
        if step.name in rejected:
            continue
        candidate = model.clone()
        outcome = foreign.outcome(functools.partial(_tried, step, candidate, accept))
        if isinstance(outcome, Exception):
            rejected[step.name] = outcome
        elif outcome:
            model = candidate
    return model, rejected


def _tried(step: Step, model: ir.Model, accept: Callable[[ir.Model], object]) -> bool:
    changed = step.run(model)
    if changed:
        accept(model)
    return changed


def _steps() -> Iterator[Step]:
    for _ in range(_ROUNDS):
        yield Step("constant folding", _fold)
        for rule in _rules():
            yield Step(_name(rule), functools.partial(_rewrite, [rule]))
    yield Step("removal of duplicates", _finish)
    yield Step("fusions", _fuse)


def _of_integers(x: ir.Value) -> bool:
    return x.dtype is not None and x.dtype.is_integer()


# Rules that are wrong for some values: clamp(0, 1) and then clamp(2, 3) is 2, not 1; relu after clamp(max=-1) is 0,
# not -1; and a Clip with one bound replaces infinities. Then rules that name the constants of two results alike.
_LEFT_OUT = frozenset(
    (
        *("FuseSuccessiveClip", "FuseSuccessiveClipRelu", "FuseSuccessiveReluClip"),
        *("FuseSuccessiveMin", "FuseSuccessiveMax", "FuseMinMaxToClip", "FuseMaxMinToClip"),
    )
)
# Conditions on the values of a pattern's variables that onnxscript's own conditions lack.
_PRECONDITIONS: dict[str, Callable[..., bool]] = {
    # -0.0 + 0 is 0.0
    "the rule for Add": lambda x, **_: _of_integers(x),
    # One rounding instead of two.
    "CastCast": lambda x, **_: x.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16),
    # Split makes the first of two unequal parts the larger one.
    "SlicesSplit": lambda x, **_: x.shape is not None and isinstance(x.shape[-1], int) and x.shape[-1] % 2 == 0,
}


@functools.cache
def _rules() -> tuple[Any, ...]:
    """Return the default rules of onnxscript that change no value for any input, under their preconditions.

    Their patterns match constants within 1e-5 of a number, or 1e-8 of zero, so ``x + 1e-8`` would become ``x``.
    """
    rules = tuple(rule for rule in rewriter._DEFAULT_REWRITE_RULES if _name(rule) not in _LEFT_OUT)
    for rule in rules:
        for node in rule._target_pattern:
            for value in filter(lambda value: hasattr(value, "_rel_tol"), node.inputs):
                vars(value).update(_rel_tol=0.0, _abs_tol=0.0)
        if (precondition := _PRECONDITIONS.get(_name(rule))) is not None:
            rule._condition_function = _both(rule._condition_function, precondition)
    return rules


def _both(own: Callable[..., Any], precondition: Callable[..., bool]) -> Callable[..., Any]:
    return lambda context, **values: precondition(**values) and own(context, **values)


def _name(rule: Any) -> str:
    if rule.name:
        return str(rule.name)
    return f"the rule for {' and '.join(str(node.op) for node in rule._target_pattern)}"


def _fold(model: ir.Model) -> bool:
    return bool(optimizer.fold_constants_ir(model, onnx_shape_inference=True).modified)


def _rewrite(rules: Sequence[Any], model: ir.Model) -> bool:
    changed = bool(rewriter.RewritePass(rules)(model).modified)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return changed


def _finish(model: ir.Model) -> bool:
    results = [
        finish(model)
        for finish in (
            passes.RemoveUnusedNodesPass(),
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.LiftSubgraphInitializersToMainGraphPass(),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
            passes.NameFixPass(),
        )
    ]
    return any(result.modified for result in results)


def _fuse(model: ir.Model) -> bool:
    return any(onnx_fusions.fuse(model).values())
