"""How clients see a pipeline: as a model with the raw inputs of its first models and the answers of its last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ingot.config.pipelines import Ref
from ingot.serving.pipelines.pictures import DECODER
from ingot.serving.pipelines.plan import Plan
from ingot.steps import Step, Steps

S = TypeVar("S", bound=Step)

TASK = "pipeline"
"""The task of a pipeline whose answers are not those of one model."""


def described(plan: Plan) -> Steps:
    """Return the steps that describe a pipeline: its inputs and outputs, how files are decoded, what labels there are.

    They are not run. The APIs for texts and files read them, as those of a model, and find its form of answers.
    """
    before = tuple({step.reads: step for step in _readers(plan)}.values())
    last = _last(plan)
    return Steps(
        task=TASK if last is None else last.task,
        inputs=plan.signature.inputs,
        outputs=plan.signature.outputs,
        before=before,
        after=() if last is None else last.after,
        max_items=min((node.steps.max_items for node in plan.nodes if node.steps is not None), default=2048),
    )


def _readers(plan: Plan) -> Iterator[Step]:
    """Yield the steps that read the pipeline's inputs, with the names that these have."""
    for node in plan.nodes:
        names = {key: ref.name for key, refs in node.node.sources.items() for ref in refs if not ref.node}
        if node.level:
            continue
        if node.node.step in ("crop", "rotate") and "image" in names:
            yield _renamed(DECODER, "image", names["image"])
        for step in () if node.steps is None else node.steps.before:
            read = [name for name in step.reads if name in names]
            if len(read) == 1 and len(step.reads) == 1:
                yield _renamed(step, read[0], names[read[0]])


def _last(plan: Plan) -> Steps | None:
    """Return the steps of the model that makes all answers of the pipeline, name by name; None if there is none."""
    for node in plan.nodes:
        makes_all = all(refs == (Ref(node.name, name),) for name, refs in plan.outputs.items())
        if node.steps is not None and not node.level and makes_all:
            return node.steps
    return None


def _renamed(step: S, before: str, after: str) -> S:
    """Return a step that reads an input by another name."""
    if before == after:
        return step
    return step.model_copy(update={key: after for key, value in step if value == before and key != "kind"})
