"""The replay of a pipeline's goldens, which finds the first node that answers otherwise.

A golden has the inputs of the pipeline as raw inputs, its outputs as answers, and what each node returned, as
``NODE.OUTPUT``, as outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ingot.errors import IngotError
from ingot.model_store import Golden
from ingot.protocol.context import CONTEXT
from ingot.runtime import Model, Outcome, Request
from ingot.serving.pipelines.pictures import Work
from ingot.serving.pipelines.plan import Plan, PlannedNode
from ingot.serving.pipelines.run import Owner, Run
from ingot.tensors import Array, check_inputs
from ingot.tensors.arrays import worst_error

TOLERANCE = 1e-3
"""Of floats, relative to the largest of a tensor, as in archives; texts and integers must be equal."""
_SECONDS = 60.0


async def fault(owner: Owner, plan: Plan, goldens: Sequence[Golden]) -> str:
    """Return which node, or which output, departs from the goldens; empty if none does."""
    for case, golden in enumerate(goldens):
        try:
            found = await _departure(owner, plan, golden)
        except (IngotError, TimeoutError) as error:
            found = str(error) or f"no answer within {_SECONDS:g} s"
        if found:
            return (
                f"pipeline '{owner.name}' does not reproduce its golden case {case}: {found}; repair its models, or "
                "record the goldens again if the change is meant"
            )
    return ""


async def _departure(owner: Owner, plan: Plan, golden: Golden) -> str:
    check_inputs(plan.signature, golden.raw)
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    CONTEXT.set(None)
    run = Run(_Uncounted(owner), plan, Request(golden.raw, future.set_result, _SECONDS), 0)
    run.between = {}
    run.start()
    try:
        answers = await asyncio.wait_for(future, _SECONDS)
    finally:
        run.cancel()
    if isinstance(answers, IngotError):
        raise answers
    for node in plan.nodes:
        names = [spec.name for spec in node.outputs if f"{node.name}.{spec.name}" in golden.outputs]
        expected = {name: golden.outputs[f"{node.name}.{name}"] for name in names}
        actual = {name: run.between[f"{node.name}.{name}"] for name in names}
        if names and (text := _differing(expected, actual)):
            return f"node '{node.name}' answers otherwise: {text}"
    if golden.answers.keys() != answers.keys():
        return f"it has the outputs {', '.join(golden.answers)}, but the pipeline has {', '.join(answers)}"
    return _differing(golden.answers, answers)


def _differing(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> str:
    name, error = worst_error(expected, actual)
    return f"'{name}' departs by {error:.2e}, tolerance {TOLERANCE:.0e}" if error > TOLERANCE else ""


class _Uncounted:
    """A pipeline whose statistics do not count a run."""

    def __init__(self, owner: Owner):
        self.name = owner.name
        self._owner = owner

    def model_of(self, node: PlannedNode) -> Model:
        return self._owner.model_of(node)

    def work_of(self, node: PlannedNode) -> Work:
        return self._owner.work_of(node)

    def spent(self, node: PlannedNode, seconds: float, items: int) -> None:
        pass

    def over(self, run: Run, outcome: Outcome | None) -> None:
        pass
