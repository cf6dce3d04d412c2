"""The final answers of two variants with steps, to the raw goldens of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from ingot.errors import IngotError, InvalidArgument
from ingot.model_store.diff.records import AnswerChange, ChangedInput
from ingot.model_store.format.goldens import Golden
from ingot.model_store.format.variant import Variant
from ingot.steps import Values
from ingot.tensors import Array, DType, arrays

Run = Callable[[Values], Values]
"""Runs a graph: its outputs from its inputs."""
OpenGraph = Callable[[Variant], AbstractContextManager[Run]]
"""Opens the graph of a variant, whose blobs are files."""
# Inputs whose answers changed most that are listed.
_LISTED = 5
# Characters of a text that are shown.
_SHOWN = 60


class Answered:
    """A variant's answers to raw inputs: recorded ones, others by its graph.

    Args:
        variant: with steps.
        open_graph: opens its graph.
    """

    def __init__(self, variant: Variant, open_graph: Callable[[Variant], Run]):
        self.cases = [case for case in variant.goldens() if case.raw]
        self._recorded = {_key(case.raw): case.answers for case in self.cases}
        self._variant, self._open = variant, open_graph
        self._run: Run | None = None

    def answer(self, raw: dict[str, Array]) -> Values:
        """Return the answers to raw inputs, in a form that machines reproduce but for rounding.

        Raises:
            InvalidArgument: they are not recorded, and the variant cannot be run here, or does not accept them.
            IngotError: the graph cannot be run.
        """
        steps, answers = self._variant.serving.steps, self._answer(raw)
        return answers if steps is None else steps.comparable(answers)

    def _answer(self, raw: dict[str, Array]) -> Values:
        if (found := self._recorded.get(_key(raw))) is not None:
            return found
        steps = self._variant.opened_steps()
        if steps is None or self._variant.executable:
            raise InvalidArgument(f"variant '{self._variant.name}' is not run: its format can run its author's code")
        self._run = self._run or self._open(self._variant.unpacked())
        return steps.run(raw, self._run)


def compare_answers(before: Answered, after: Answered) -> tuple[list[AnswerChange], list[ChangedInput], list[str]]:
    """Return how each answer differs over the raw goldens of both, the inputs that changed most, and remarks."""
    items: list[_Item] = []
    notes: list[str] = []
    for case in {_key(case.raw): case for case in (*before.cases, *after.cases)}.values():
        try:
            one, other = before.answer(case.raw), after.answer(case.raw)
        except IngotError as error:
            notes.append(f"the answers to a raw golden are not compared: {error}")
            continue
        items += _items(case.raw, one, other)
    changed = sorted((item.changed for item in items if any(item.changed.rank)), key=lambda item: item.rank)
    return _totals(items), changed[: -_LISTED - 1 : -1], [*dict.fromkeys(notes)]


def agreement(before: Sequence[Golden], after: Sequence[Golden]) -> tuple[str, ...]:
    """Return how the final answers to the raw goldens agree, as a note; none without raw goldens."""
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one.raw]
    totals = _totals(item for one, other in pairs for item in _items(one.raw, one.answers, other.answers))
    parts = [
        f"'{item.answer}' differs by up to {item.largest:.1e}"
        if item.largest
        else f"'{item.answer}' is the same for {item.items - item.differ} of {item.items} items"
        for item in totals
    ]
    return (f"final answers to the raw goldens, compared with the original's: {'; '.join(parts)}",) if parts else ()


@dataclass(frozen=True)
class _Item:
    """One item of a request: whether each of its answers differs, and by how much."""

    differences: Mapping[str, tuple[bool, float | None]]
    changed: ChangedInput


def _totals(items: Iterable[_Item]) -> list[AnswerChange]:
    totals: dict[str, AnswerChange] = {}
    for item in items:
        for name, difference in item.differences.items():
            totals[name] = _added(totals.get(name, AnswerChange(answer=name)), *difference)
    return [totals[name] for name in sorted(totals)]


def _items(raw: Values, one: Values, other: Values) -> Iterator[_Item]:
    count = len(next(iter(raw.values())))
    for index in range(count):
        pairs = {name: _unpadded(one, other, name, index) for name in one if name in other}
        differences = {name: _difference(*pair) for name, pair in pairs.items()}
        words = [(_best(one[name][index]), _best(other[name][index])) for name in differences if _is_text(one, name)]
        before, after = next((pair for pair in words if pair[0] != pair[1]), ("", ""))
        largest = max((value for _, value in differences.values() if value is not None), default=0.0)
        shown = ", ".join(_shown(array[index]) for array in raw.values() if len(array) == count)
        yield _Item(differences, ChangedInput(input=shown, before=before, after=after, difference=largest))


def _unpadded(one: Values, other: Values, name: str, index: int) -> tuple[Array, Array]:
    """Return an answer to an item from both: other items of a request may pad the two to different lengths."""
    left, right = one[name][index], other[name][index]
    if np.shape(left) != np.shape(right) and _is_padded(one, name) and _is_padded(other, name):
        return left[: one["count"][index]], right[: other["count"][index]]
    return left, right


def _is_padded(values: Values, name: str) -> bool:
    array, counts = values[name], values.get("count")
    return counts is not None and array.ndim > 1 and array.shape[1] == counts.max()


def _is_text(values: Values, name: str) -> bool:
    return DType.of(values[name]) is DType.BYTES


def _best(value: object) -> str:
    """Return an answer of text: of several, the first, which is the best."""
    first = np.asarray(value, object).reshape(-1)
    return _shown(first[0]) if first.size else ""


def _difference(one: Array, other: Array) -> tuple[bool, float | None]:
    """Return whether an item's answer differs, and the largest difference of numbers; None for text and shapes."""
    left, right = np.asarray(one), np.asarray(other)
    if left.dtype == object or right.dtype == object:
        return _best(one) != _best(other), None
    if left.shape != right.shape:
        return True, None
    largest = float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max(initial=0.0))
    return largest > 0, largest


def _added(total: AnswerChange, differs: bool, difference: float | None) -> AnswerChange:
    largest = total.largest
    return AnswerChange(
        answer=total.answer,
        items=total.items + 1,
        differ=total.differ + differs,
        largest=None if difference is None or largest is None else max(largest, difference),
    )


def _shown(item: object) -> str:
    text = " ".join((_decoded(item) if isinstance(item, bytes) else str(item)).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _decoded(content: bytes) -> str:
    """Return a text; of a file, its size and the beginning of its digest."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"a file of {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def _key(raw: Values) -> bytes:
    sha = hashlib.sha256()
    for name in sorted(raw):
        sha.update(repr((name, raw[name].shape)).encode() + arrays.to_bytes(raw[name]))
    return sha.digest()
