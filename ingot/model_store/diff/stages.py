"""The steps of two variants side by side: tokens and pixels of the same raw inputs, labels, and final answers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ingot.errors import IngotError
from ingot.model_store.diff.answers import Answered, OpenGraph, compare_answers
from ingot.model_store.diff.records import LabelsChange, StepChange, StepsDiff
from ingot.model_store.format import manifest
from ingot.model_store.format.goldens import Golden
from ingot.model_store.format.variant import Variant
from ingot.steps import Apply, ItemStep, Steps
from ingot.steps.images.image import Image
from ingot.steps.images.operations import Normalize, Rescale
from ingot.steps.images.pictures import drawn
from ingot.steps.samples import texts
from ingot.steps.tokenize import Tokenize
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes

# Pictures that both image steps process.
_PICTURES = 60
_Outcome = list[Array] | None
"""What a step makes of an item; None if it refuses the item."""


def compare_steps(before: Variant, after: Variant, open_graph: OpenGraph) -> StepsDiff | None:
    """Compare the steps of two variants, and their answers to the raw goldens of both; None unless both have steps.

    An answer that a variant has not recorded is computed by its graph, if that is ONNX.

    Raises:
        InvalidArchive: a file of the steps, or the goldens, are damaged.
        Unsupported: a package that a step needs is not installed.
    """
    one, other = before.serving.steps, after.serving.steps
    if one is None or other is None:
        return None
    with contextlib.ExitStack() as stack:
        sides = (Answered(variant, lambda found: stack.enter_context(open_graph(found))) for variant in (before, after))
        answers, most, notes = compare_answers(*sides)
    return StepsDiff(
        steps=tuple(_steps(before, after)),
        labels=_labels(one, other),
        answers=tuple(answers),
        most=tuple(most),
        notes=tuple(notes),
    )


def _steps(before: Variant, after: Variant) -> Iterator[StepChange]:
    """Yield how steps before the graph that are not the same differ from those of the same kind."""
    one, other = before.serving.steps, after.serving.steps
    for step in one.before if one is not None else ():
        for partner in [each for each in other.before if each.kind == step.kind][:1] if other is not None else ():
            if step == partner and all(_digest(before, name) == _digest(after, name) for name in step.files):
                continue
            cases = [*before.goldens(), *after.goldens()]
            sides = (step, step.open(before.step_file)), (partner, partner.open(after.step_file))
            yield _step(sides[0], sides[1], *_items(step, cases))


def _digest(variant: Variant, name: str) -> str:
    """Return the digest of a file of the steps."""
    layers = variant.manifest.layers
    held = (layer.digest for layer in layers if layer.annotations.get(manifest.FILEPATH) == name)
    return next(held, "")


def _items(step: Any, cases: Sequence[Golden]) -> tuple[str, list[bytes]]:
    """Return the items that a step is compared on, and their name."""
    if isinstance(step, Tokenize):
        return "ids of hard texts", [text.encode() for text in texts.hard()]
    if isinstance(step, Image):
        return "pixels of drawn pictures", [*drawn(_PICTURES)]
    [name] = step.reads
    recorded = [item for case in cases if name in case.raw for item in case.raw[name].tolist()]
    return "values of recorded files", [*dict.fromkeys(recorded)]


def _step(before: tuple[Any, Apply], after: tuple[Any, Apply], what: str, items: Sequence[bytes]) -> StepChange:
    differ, largest, refused = 0, 0.0, 0
    for item in items:
        one, other = _outcome(*before, item), _outcome(*after, item)
        if one is None or other is None:
            refused += (one is None) != (other is None)
            differ += (one is None) != (other is None)
            continue
        difference = _difference(one, other)
        differ += difference > 0
        largest = max(largest, difference)
    tokens = isinstance(before[0], Tokenize)
    levels = None if tokens else _levels(before[0], after[0], largest)
    return StepChange(
        step=before[0].kind,
        what=what,
        items=len(items),
        differ=differ,
        refused=refused,
        largest=None if tokens or not math.isfinite(largest) else largest,
        levels=levels,
    )


def _outcome(step: Any, apply: Apply, item: bytes) -> _Outcome:
    """Return the values that a step makes of one item, without those that do not depend on the item."""
    try:
        made = apply({step.reads[0]: as_bytes([item])})
    except IngotError:
        return None
    names = (step.ids,) if isinstance(step, Tokenize) else step.writes if isinstance(step, ItemStep) else ()
    return [made[name] for name in names]


def _difference(one: Sequence[Array], other: Sequence[Array]) -> float:
    """Return the largest absolute difference; infinity for other shapes, or other texts."""
    if [array.shape for array in one] != [array.shape for array in other]:
        return math.inf
    both = [*zip(one, other, strict=True)]
    if any(a.dtype == object and not np.array_equal(a, b) for a, b in both):
        return math.inf
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in both if a.dtype != object]
    return max((float(np.abs(a - b).max(initial=0.0)) for a, b in pairs), default=0.0)


def _levels(before: Any, after: Any, largest: float) -> float | None:
    """Return a difference of pixels in levels of a channel of bytes; None if the two scale pixels differently."""
    if not isinstance(before, Image) or not isinstance(after, Image) or not math.isfinite(largest):
        return None
    scales = [[item for item in step.operations if isinstance(item, Rescale | Normalize)] for step in (before, after)]
    if scales[0] != scales[1]:
        return None
    slope = 1.0
    for item in scales[0]:
        slope *= item.factor if isinstance(item, Rescale) else 1 / min(item.std)
    return largest / abs(slope) if slope else None


def _labels(one: Steps, other: Steps) -> LabelsChange | None:
    """Return how the names of classes differ; None if they do not."""
    before, after = one.labels, other.labels
    if before == after:
        return None
    kept, left = set(before) & set(after), {name: index for index, name in enumerate(after)}
    return LabelsChange(
        added=tuple(name for name in after if name not in kept),
        removed=tuple(name for name in before if name not in kept),
        moved=tuple(name for index, name in enumerate(before) if name in kept and left[name] != index),
    )
