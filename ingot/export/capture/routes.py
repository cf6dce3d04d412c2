"""The capture routes, tried in order until one returns a graph that is proved equal to the module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument
from ingot.export.capture import constants, exported, functions, numbers, torchscript
from ingot.export.explain import explain
from ingot.export.program import Eager, Program, quiet
from ingot.export.proof.examples import Examples
from ingot.export.proof.probe import output_specs
from ingot.export.report import Attempt
from ingot.export.torch_internals import violates_constraints
from ingot.tensors import Array, Range, Signature, TensorSpec


@dataclass(frozen=True)
class Legacy:
    """An ONNX model converted directly from TorchScript."""

    model: ir.Model
    signature: Signature
    log: tuple[str, ...]


Captured = Program | Legacy
"""The result of a capture: a program, or an ONNX model for the TorchScript routes."""


@dataclass(frozen=True)
class Task:
    """A module to capture, with its inputs and their ranges, one example of them, and the names of its outputs."""

    eager: Eager
    inputs: tuple[TensorSpec, ...]
    ranges: Mapping[str, Range]
    example: Mapping[str, Array]
    output_names: tuple[str, ...]
    opset: int | None = None

    def program(self, module: nn.Module, route: str, **options: bool) -> Program:
        """Trace a flat module with options of :func:`ingot.export.capture.exported.trace`."""
        with functions.dynamic(module, strict=options.get("strict", False)):
            traced = exported.trace(module, self.inputs, self.ranges, self.eager.tensors(self.example), **options)
        exported.check_scratch(traced, self.eager.scratch)
        log = f"captured by {route}, torch {torch.__version__}"
        found = exported.program(traced, self.inputs, self.ranges, self.output_names, (log,))
        return replace(found, options=options)


EXPORTS: dict[str, dict[str, bool]] = {
    "export": {},
    "strict": {"strict": True},
    "inferred": {"inferred": True},
    "deferred": {"deferred": True},
    "oblivious": {"oblivious": True},
}
"""The routes by ``torch.export``, with options of :func:`ingot.export.capture.exported.trace`."""

CROSSED = "crossed"
"""The route that is tried last, with examples at sizes that break a condition of another route's graph."""
_OPTIONS = {**EXPORTS, CROSSED: {"oblivious": True, "crossed": True}}


def _export(route: str, task: Task) -> Captured:
    """Capture by ``torch.export``; then with sizes that ``float`` keeps dynamic, and then with known constants."""
    options = _OPTIONS[route]
    with numbers.watched() as converting:
        found = foreign.outcome(lambda: task.program(task.eager.flat(), _TITLES[route], **options))
    if not isinstance(found, Exception):
        return found
    if converting:
        with numbers.dynamic(converting):
            again = foreign.attempt(lambda: task.program(task.eager.flat(), _TITLES[route], **options))
        if again is not None:
            return again
    buffers = constants.of(task.eager)
    if not buffers or not constants.decides(found):
        raise found
    with constants.known():
        program = foreign.attempt(lambda: task.program(task.eager.flat(buffers), _TITLES[route], **options))
    if program is None:
        raise found
    return program


def _fx(task: Task) -> Captured:
    with quiet():
        traced = fx.symbolic_trace(task.eager.module, concrete_args=task.eager.arguments.fixed)
    return task.program(_like(task.eager, traced).flat(), "torch.fx.symbolic_trace")


def _script(task: Task) -> Captured:
    module = task.eager.module
    if not isinstance(module, torch.jit.ScriptModule):
        with quiet():
            module = torch.jit.script(module)
    args, kwargs = task.eager.arguments.bind(task.eager.tensors(task.example))
    return _older(task, module, args, kwargs, task.eager.arguments.order, "torch.jit.script")


def _trace(task: Task) -> Captured:
    tensors = task.eager.tensors(task.example)
    with quiet(), torch.no_grad():
        traced = torch.jit.trace(task.eager.flat(), tensors, check_trace=False)  # type: ignore[no-untyped-call]
    return _older(task, traced, task.eager.tensors(task.example), {}, task.eager.names, "torch.jit.trace")


def _older(
    task: Task,
    module: torch.jit.ScriptModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    route: str,
) -> Captured:
    outputs = output_specs(task.eager, Examples(task.inputs, task.ranges, task.example))
    signature = Signature(task.inputs, outputs, ranges=dict(task.ranges))
    log = f"captured by {route} and torch's older ONNX exporter, torch {torch.__version__}"
    return Legacy(torchscript.lower(module, args, kwargs, names, signature, task.opset), signature, (log,))


def _like(eager: Eager, module: nn.Module) -> Eager:
    return Eager(module, eager.arguments, states=eager.states, scratch=eager.scratch)


ROUTES: dict[str, Callable[[Task], Captured]] = {
    **{route: partial(_export, route) for route in _OPTIONS},
    "fx": _fx,
    "script": _script,
    "trace": _trace,
}
AUTO = tuple(EXPORTS)
"""Without TorchScript: a trace records only the branches that the example takes, and both routes are deprecated."""


class _Failed(Exception):
    """A route failed to capture the module; ``__cause__`` is the reason."""


def capture(
    task: Task,
    route: str,
    prove: Callable[[Captured], None],
    progress: Callable[[str], None] = lambda step: None,
    tried: Collection[str] = (),
) -> tuple[Captured, tuple[Attempt, ...]]:
    """Capture a module by the first route that succeeds and is proved equal.

    Args:
        task: the module and its inputs.
        route: one of :data:`ROUTES`, or ``auto`` to try those of :data:`AUTO`.
        prove: compares a captured model with the original; raises ``ExportError``.
        progress: called with the name of each step.
        tried: routes to leave out.

    Returns:
        The captured model, and all attempts including the successful one.

    Raises:
        ExportError: no route succeeds; the message explains the failure of the one that got farthest.
        InvalidArgument: the route does not exist.
    """
    attempts: list[Attempt] = []
    failures: list[Exception] = []
    routes = [name for name in _routes(task, route) if name not in tried]
    if not routes:
        raise ExportError(f"all routes were tried: {', '.join(tried)}")
    while routes:
        name = routes.pop(0)
        progress("Capturing the graph" if not attempts else f"Capturing the graph another way: {name}")
        try:
            with foreign.reported_as(_Failed, str), task.eager.filled(task.example):
                captured = ROUTES[name](task)
            prove(captured)
        except (_Failed, ExportError) as failure:
            cause = failure.__cause__ if isinstance(failure, _Failed) else failure
            failures.append(cause if isinstance(cause, Exception) else failure)
            attempts.append(Attempt(route=name, failure=str(_explained(failures[-1:], task, name))))
            # The route ``strict`` meets the same conditions on sizes, so the others are tried first.
            if violates_constraints(cause) and "strict" in routes:
                routes.remove("strict")
                routes.append("strict")
            continue
        return captured, (*attempts, Attempt(route=name))
    farthest = next((index for index, failure in enumerate(failures) if _ran_to_end(failure)), 0)
    first = failures[farthest]
    others = [failure for failure in failures if failure is not first]
    raise _explained([first, *others], task, attempts[farthest].route) from first


def _ran_to_end(failure: Exception) -> bool:
    """Return whether a route traced all of the model's code before it failed."""
    return isinstance(failure, ExportError) or "Constraints violated" in str(failure)


def _routes(task: Task, route: str) -> Sequence[str]:
    if route not in ("auto", *ROUTES):
        raise InvalidArgument(f"there is no capture route '{route}'; there are: auto, {', '.join(ROUTES)}")
    if isinstance(task.eager.module, torch.jit.ScriptModule):
        if route not in ("auto", "script"):
            raise InvalidArgument(f"a TorchScript model cannot be captured by '{route}'; leave --capture out")
        return ("script",)
    return AUTO if route == "auto" else (route,)


def _explained(failures: Sequence[Exception], task: Task, route: str) -> ExportError:
    """Explain the first of some failures; the others may contain the line of code that the first lacks."""
    first, *others = failures
    if isinstance(first, ExportError):
        return first
    explanation = explain(first, task.eager.module, others)
    headline = f"{_TITLES[route]} cannot capture the model"
    return ExportError(f"{headline}: {explanation}", explanation.text(), headline)


_TITLES = {
    "export": "torch.export",
    "strict": "torch.export, strict",
    "inferred": "torch.export, dimensions inferred",
    "deferred": "torch.export, conditions deferred",
    "oblivious": "torch.export, size-oblivious",
    CROSSED: "torch.export, one side of conditions on sizes",
    "fx": "torch.fx.symbolic_trace",
    "script": "torch.jit.script",
    "trace": "torch.jit.trace",
}
