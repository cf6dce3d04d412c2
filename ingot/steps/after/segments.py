"""``segments``: from the classes and masks of queries to the segments of a picture, each with its mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, FiniteFloat, PositiveInt

from ingot.errors import InvalidArgument
from ingot.steps.after.classify import fit, softmax
from ingot.steps.after.dense import sigmoid
from ingot.steps.after.masks import best_classes
from ingot.steps.after.pixels import bands, check_resized, png, resized, resized_nearest, shares_of
from ingot.steps.ragged import columns
from ingot.steps.step import Apply, Files, Shape, Step, Values, choices_of
from ingot.tensors import Array, TensorSpec

Subtask = Literal["panoptic", "instance", "semantic"]
SUBTASKS: tuple[Subtask, ...] = ("panoptic", "instance", "semantic")
_SUBTASK, _THRESHOLDS = "subtask", ("threshold", "mask_threshold", "overlap_mask_area_threshold")


class Segments(Step):
    """Choose the segments of each picture by the rules of transformers' processors, source of the names.

    ``panoptic`` gives each pixel to one query, of those whose best class has a score above ``threshold``; a query is
    kept if the pixels that it gets are more than ``overlap_mask_area_threshold`` of those where its score times the
    mask is at least ``mask_threshold``. ``instance`` does the same, or, with ``pairs``, keeps the best pairs of query
    and class, where a later one covers those before it. ``semantic`` adds the masks of all queries to one for each
    class. Requests may choose in inputs of these names.

    Answers have k columns, as many as the picture of the request with the most segments has; behind a row's ``count``
    they are padded as :func:`~ingot.steps.ragged.padded` says.

    Attributes:
        logits: the classes of each query and, last, no object: float[n, queries, classes + 1].
        masks: the logits of the pixels of each query, float[n, queries, height, width].
        size: height and width of the pictures, int64[n, 2].
        labels: the names of classes, in the order of the logits.
        resized: height and width to which masks are resized first, as Mask2Former's processor does.
        pairs: whether instances are pairs of query and class, as those of MaskFormer.
        subtask: of requests that name none.
        threshold: of requests without one; the other two likewise.
        label: the class of each segment, BYTES[n, k].
        score: float32[n, k]; 0 with ``semantic``, which has no scores.
        mask: a PNG of the size of the upright picture for each: 255 where it is, 0 elsewhere. BYTES[n, k].
        count: int32[n].
    """

    kind: Literal["segments"] = "segments"
    logits: str = "class_queries_logits"
    masks: str = "masks_queries_logits"
    size: str = "original_size"
    labels: tuple[str, ...] = Field(min_length=1, max_length=1_000_000)
    resized: tuple[PositiveInt, PositiveInt] | None = None
    pairs: bool = False
    subtask: Subtask = "panoptic"
    threshold: FiniteFloat = 0.9
    mask_threshold: FiniteFloat = 0.5
    overlap_mask_area_threshold: FiniteFloat = 0.5
    label: str = "label"
    score: str = "score"
    mask: str = "mask"
    count: str = "count"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.masks, self.size)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.score, self.mask, self.count)

    @property
    def shared(self) -> tuple[str, ...]:
        return (_SUBTASK, *_THRESHOLDS)

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {_SUBTASK: SUBTASKS}

    @property
    def elements_at_once(self) -> int:
        return 0

    @property
    def shapes(self) -> Mapping[str, Shape]:
        queries: Shape = ("batch", "queries")
        return {self.logits: (*queries, "classes"), self.masks: (*queries, "height", "width")}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        super().check(known)
        spec = known[self.logits]
        if spec is not None and isinstance(classes := spec.shape[2], int):
            fit(self.kind, self.labels, self.logits, classes - 1)

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            logits, masks = (values[name].astype(np.float32, copy=False) for name in (self.logits, self.masks))
            fit(self.kind, self.labels, self.logits, logits.shape[2] - 1)
            check_resized(values[self.size], max(logits.shape[1], len(self.labels)), "queries or classes")
            subtasks = choices_of(_SUBTASK, values, self.subtask, SUBTASKS, len(logits))
            limits = zip(*(self._thresholds(name, values, len(logits)) for name in _THRESHOLDS), strict=True)
            rows = []
            for each in zip(softmax(logits), masks, values[self.size].tolist(), subtasks, limits, strict=True):
                rows.append([*self._segments_of(*each)])
            parts: dict[str, Any] = {self.mask: (attrgetter("mask"), object), self.score: (attrgetter("score"), "f4")}
            return columns(rows, {self.label: (attrgetter("label"), object), **parts}, self.count)

        return apply

    def _thresholds(self, name: str, values: Values, count: int) -> Array:
        given = values.get(name)
        if given is None:
            given = np.array([getattr(self, name)], np.float32)
        if np.isnan(given).any():
            raise InvalidArgument(f"input '{name}' is not a number; send one such as 0.5")
        return np.broadcast_to(given, count)

    def _segments_of(
        self, scores: Array, masks: Array, size: Sequence[int], subtask: str, thresholds: Sequence[float]
    ) -> Iterator[_Segment]:
        """Yield the segments of one picture, from float32[queries, classes + 1] and float32[queries, h, w]."""
        if subtask == "semantic":
            yield from self._semantic(scores[:, :-1], self._resized(masks), size)
        elif subtask == "instance" and self.pairs:
            yield from self._instances(scores[:, :-1], masks, size, thresholds[0])
        else:
            kept = (scores.argmax(1) < len(self.labels)) & (scores.max(1) > thresholds[0])
            yield from self._panoptic(scores[kept], masks[kept], size, thresholds)

    def _resized(self, masks: Array) -> Array:
        return resized(masks, *self.resized) if self.resized and len(masks) else masks

    def _semantic(self, scores: Array, masks: Array, size: Sequence[int]) -> Iterator[_Segment]:
        logits = np.tensordot(scores, sigmoid(masks), axes=(0, 0))
        classes = best_classes(logits, size[0], size[1])
        for index in np.flatnonzero(np.bincount(classes.reshape(-1), minlength=len(self.labels))):
            yield self._segment(index, 0, classes == index)

    def _panoptic(
        self, scores: Array, masks: Array, size: Sequence[int], thresholds: Sequence[float]
    ) -> Iterator[_Segment]:
        """Yield the queries that get enough pixels."""
        if not len(scores):
            return
        best, labels, least = scores.max(1), scores.argmax(1), np.float32(thresholds[1])
        owner, areas = np.zeros(size, np.int32), np.zeros(len(best), np.int64)
        for place, planes in bands(sigmoid(self._resized(masks)), size[0], size[1]):
            highest = np.full(owner[place].shape, -1, np.float32)
            for index, plane in enumerate(planes):
                plane *= best[index]
                areas[index] += (plane >= least).sum()
                np.copyto(owner[place], index, where=plane > highest)
                np.maximum(highest, plane, out=highest)
        owned = np.bincount(owner.reshape(-1), minlength=len(best))
        shares = owned.astype(np.float32) / np.maximum(areas, 1).astype(np.float32)
        for query in np.flatnonzero((owned > 0) & (areas > 0) & (shares > thresholds[2])):
            yield self._segment(labels[query], best[query], owner == query)

    def _instances(self, scores: Array, masks: Array, size: Sequence[int], threshold: float) -> Iterator[_Segment]:
        """Yield the best pairs of query and class, as many as there are queries, if they have pixels."""
        flat = scores.reshape(-1)
        best = np.argsort(-flat, kind="stable")[: len(scores)]
        planes = self._resized(masks)
        inside = planes > 0
        certain = (sigmoid(planes) * inside).sum((1, 2)) / (inside.sum((1, 2)) + np.float32(1e-6))
        found, owner = list[_Segment](), np.full(size, -1, np.int32)
        for query, label, class_score in zip(*np.divmod(best, scores.shape[1]), flat[best], strict=True):
            score = float(class_score * certain[query])
            if score >= threshold:
                [mask] = resized_nearest(inside[query : query + 1], size[0], size[1])
                if mask.any():
                    owner[mask] = len(found)
                    found.append(_Segment(self.labels[label].encode(), round(score, 6), b""))
        for index, segment in enumerate(found):
            yield segment._replace(mask=png(owner == index))

    def _segment(self, label: Any, score: Any, mask: Array) -> _Segment:
        return _Segment(self.labels[label].encode(), round(float(score), 6), png(mask))

    def comparable(self, answers: Values) -> Values:
        """Return the count, and the part of the pixels that each class has in each cell; see :func:`shares_of`."""
        return {self.mask: shares_of(self.labels, self.label, self.mask, answers), self.count: answers[self.count]}


class _Segment(NamedTuple):
    """A segment: its class, its score with 6 decimals as transformers rounds it, and the PNG of its mask."""

    label: bytes
    score: float
    mask: bytes
