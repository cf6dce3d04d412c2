"""Proof of the steps around the graph: equal tensors of hard raw inputs, and equal answers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ingot.errors import InvalidArchive, ParityError
from ingot.export.lower.packed import Packed
from ingot.export.stages.context import Context
from ingot.export.stages.prove import Proved, load_packed
from ingot.model_store import Golden
from ingot.model_store.format.evidence import StepsEvidence
from ingot.runtime import Engine
from ingot.steps import Described, OpenedSteps, Original, Values
from ingot.tensors import Array, arrays

# Items that are compared at once: padding is then compared too.
_AT_ONCE = 16
# Raw goldens, and items of each.
_GOLDENS, _ITEMS = 2, 3


def prove_steps(context: Context, packed: Packed, proved: Proved) -> Proved:
    """Prove the steps of an export, and add goldens and evidence.

    Raises:
        ParityError: the steps make other tensors or answers than the original.
        InvalidArgument: they do not fit the graph.
    """
    described = context.options.steps
    if described is None:
        return proved
    opened = described.steps.open(lambda name: _file(described, name), proved.signature)
    original = described.original
    if original is None:
        context.journal.note("the steps before and after the graph are as declared; no original confirms them")
        return proved
    with context.journal.stage("steps", "Proving the steps before and after the graph") as stage:
        items = _prove_tensors(opened, original)
        with contextlib.closing(load_packed(context, packed)) as engine:
            error, goldens = _prove_answers(context, opened, original, engine, proved.golden_tolerance)
        answers = len(next(iter(original.samples.values())))
        stage.detail = f"tensors of {items} items equal; answers of {answers} within {error:.1e}"
    evidence = StepsEvidence(
        reference=original.name, items=items, answers=answers, error=error, tolerance=proved.golden_tolerance / 10
    )
    return replace(
        proved,
        goldens=(*proved.goldens, *goldens),
        evidence=proved.evidence.model_copy(update={"steps": evidence}),
    )


def _prove_answers(
    context: Context, opened: OpenedSteps, original: Original, engine: Engine, golden_tolerance: float
) -> tuple[float, list[Golden]]:
    """Return the largest difference of answers, and goldens from raw inputs to answers.

    Raises:
        ParityError: an answer differs.
    """
    module = None if context.eager is None else context.eager.module
    error, goldens = 0.0, list[Golden]()
    for values in _chunks(original.samples):
        case = _run(opened, engine, values)
        error = max(error, _error(original.answer(module, values), case.answers, golden_tolerance / 10))
        if len(goldens) < _GOLDENS and _distinct(case.answers, golden_tolerance):
            goldens.append(_run(opened, engine, {name: array[:_ITEMS] for name, array in values.items()}))
    return error, goldens


def _file(described: Described, name: str) -> bytes:
    try:
        return described.files[name]
    except KeyError:
        raise InvalidArchive(f"the steps need the file '{name}', which was not described") from None


def _chunks(values: Values) -> Iterator[dict[str, Array]]:
    count = len(next(iter(values.values())))
    for start in range(0, count, _AT_ONCE):
        yield {name: array[start : start + _AT_ONCE] for name, array in values.items()}


def _prove_tensors(opened: OpenedSteps, original: Original) -> int:
    """Return the number of items of which the steps make the same tensors as the original.

    Raises:
        ParityError: a tensor differs.
    """
    count = 0
    for values in itertools.chain.from_iterable(map(_chunks, original.items)):
        count += len(next(iter(values.values())))
        found, expected = opened.tensors(opened.prepare(values)), original.prepare(values)
        for name in found.keys() & set(expected):
            if found[name].shape == expected[name].shape and np.array_equal(found[name], expected[name]):
                continue
            shown = [item.decode(errors="replace")[:40] for item in next(iter(values.values())).tolist()]
            raise ParityError(f"the steps make another '{name}' than {original.name} of one of these: {shown}")
    return count


def _error(expected: Values, answers: Values, tolerance: float) -> float:
    """Return the largest difference of answers.

    Raises:
        ParityError: it exceeds the tolerance.
    """
    given = _by_label({name: answers[name] for name in expected})
    name, error = arrays.worst_error(_by_label(expected), given)
    if error > tolerance:
        raise ParityError(
            f"the answers of the steps differ from the original's: '{name}' departs by {error:.2e}, tolerance "
            f"{tolerance:.0e}"
        )
    return error


def _by_label(values: Values) -> dict[str, Array]:
    """Return answers with the classes of each row in the order of their names: equal scores have no order."""
    found = dict(values)
    if "label" in found:
        order = np.argsort(found["label"].astype(bytes), axis=1, kind="stable")
        found = {name: np.take_along_axis(array, order, 1) for name, array in found.items()}
    return found


def _distinct(answers: Values, tolerance: float) -> bool:
    """Return whether rounding on another machine cannot change the order of classes."""
    scores = answers.get("score")
    if "label" not in answers or scores is None or scores.shape[1] < 2:
        return True
    return bool((-np.diff(scores[:_ITEMS], axis=1) > 2 * tolerance * np.abs(scores).max()).all())


def _run(opened: OpenedSteps, engine: Engine, raw: dict[str, Array]) -> Golden:
    prepared = opened.prepare(raw)
    inputs = opened.tensors(prepared)
    outputs = engine.run(inputs)
    return Golden(inputs, outputs, raw, opened.finish(prepared, outputs))
