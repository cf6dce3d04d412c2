"""What the functions of tasks return, and how they make it of their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec

from pydantic import ValidationError

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.steps.after.classify import Classify
from ingot.steps.pipeline import AnyStep, Steps
from ingot.steps.step import Step, Values
from ingot.tensors import DType, TensorSpec

BATCH = "batch"

_P = ParamSpec("_P")


@dataclass(frozen=True)
class Original:
    """What steps must equal: another library's own work before and after the model.

    Attributes:
        name: of the library, with its version.
        prepare: returns the graph's inputs of raw ones.
        answer: returns the answers to raw inputs, given the module that is exported.
        items: sets of raw inputs for which the graph's inputs are compared: hard cases.
        samples: sets of raw inputs for which the answers are compared.
        answers: whether they are compared: a module from elsewhere is not one that ``answer`` takes.
        bound: the largest difference of the graph's inputs; 0 if they must be equal to the last bit.
    """

    name: str
    prepare: Callable[[Values], Values]
    answer: Callable[[Any, Values], Values]
    items: Sequence[Values]
    samples: Sequence[Values]
    bound: float = 0
    answers: bool = True


@dataclass(frozen=True)
class Described:
    """Steps for an export, with the files that they need; without an ``original`` there is nothing to compare with.

    ``inputs`` describes the tensors that they make, as the graph's inputs of an export that declares none.
    """

    steps: Steps
    files: Mapping[str, bytes] = field(default_factory=dict)
    original: Original | None = None
    inputs: tuple[str, ...] = ()


def options_checked(function: Callable[_P, Described]) -> Callable[_P, Described]:
    """Let a function that describes a task report a wrong option by an InvalidArgument that names it."""

    @wraps(function)
    def describe(*args: _P.args, **options: _P.kwargs) -> Described:
        try:
            return function(*args, **options)
        except ValidationError as error:
            raise InvalidArgument(foreign.first_fault(error)) from error

    return describe


def split(
    task: str, options: Mapping[str, Any], before: type[Step], after: type[Step] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the step before the graph, and of the one after it, which are fields of these kinds.

    Raises:
        InvalidArgument: an option is a field of neither.
    """
    known = dict.fromkeys((*before.model_fields, *(after.model_fields if after else ())))
    if unknown := options.keys() - known.keys():
        raise InvalidArgument(f"'{min(unknown)}' is not an option of the task {task}: {', '.join(known)}")
    first = {name: value for name, value in options.items() if name in before.model_fields}
    return first, {name: value for name, value in options.items() if name not in first}


def best_classes(step: Classify) -> tuple[TensorSpec, ...]:
    """Return the answers of a classifier with labels."""
    shape = (BATCH, step.count)
    return TensorSpec(step.label, DType.BYTES, shape), TensorSpec(step.score, DType.FP32, shape)


def described(
    task: str,
    inputs: Sequence[TensorSpec],
    before: AnyStep,
    after: Sequence[AnyStep],
    answers: Sequence[TensorSpec],
    *,
    optional: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
    max_items: int = Steps.model_fields["max_items"].default,
) -> Described:
    """Describe the steps of a task; see :class:`~ingot.steps.pipeline.Steps` for the arguments."""
    steps = Steps(
        task=task,
        inputs=tuple(inputs),
        optional=tuple(optional),
        outputs=tuple(answers),
        before=(before,),
        after=tuple(after),
        max_items=max_items,
    )
    return Described(steps, files or {})
