"""``boxes``: from the outputs of a detector to boxes in the original picture, with labels and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, PositiveFloat

from ingot.errors import InvalidArgument
from ingot.steps.after.classify import FUNCTIONS, Function, fit
from ingot.steps.ragged import counts, padded
from ingot.steps.step import Apply, Files, Shape, Step, Values
from ingot.tensors import Array, TensorSpec

# Boxes of each picture of a golden case, at most.
_BEST = 5
_CORNERS = np.dtype((np.float32, 4))


class Boxes(Step):
    """Choose the boxes of each picture whose scores are above a threshold, and move them to the original picture.

    Answers have k columns, as many as the picture of the request with the most boxes has; behind a row's ``count``
    they are padded as :func:`~ingot.steps.ragged.padded` says.

    Attributes:
        logits: the classes of each query, float[n, queries, classes].
        boxes: the box of each query, float[n, queries, 4].
        size: height and width of the pictures, int64[n, 2].
        labels: the names of classes, in the order of the logits.
        function: what makes scores of logits: ``softmax``, ``sigmoid`` or ``none``.
        background: whether a last class, without a name, stands for no object, as in DETR.
        top_k: pairs of query and class of a picture, best first, as Deformable DETR chooses them; 0 for the best class
            of each query, in the order of the queries, as DETR does.
        form: what a box holds: centre, width and height, or its left, top, right and bottom.
        extent: height and width of the whole picture in the units of ``boxes``: 1 and 1 for fractions, or the size of
            the graph's input for its pixels.
        threshold: scores above it are kept.
        given: the optional input with another threshold for each picture or for all, float32[n] or [1].
        overlap: a box is dropped if its intersection with a better one of its class, divided by their union, is above
            this (non-maximum suppression); 0 keeps all.
        max_boxes: of a picture, best first, if there is an ``overlap``.
        label: BYTES[n, k].
        score: float32[n, k].
        box: left, top, right and bottom in pixels of the upright picture, float32[n, k, 4].
        count: int32[n].
    """

    kind: Literal["boxes"] = "boxes"
    logits: str = "logits"
    boxes: str = "pred_boxes"
    size: str = "original_size"
    labels: tuple[str, ...] = Field(min_length=1, max_length=1_000_000)
    function: Function = "softmax"
    background: bool = False
    top_k: int = Field(0, ge=0)
    form: Literal["cxcywh", "xyxy"] = "cxcywh"
    extent: tuple[PositiveFloat, PositiveFloat] = (1, 1)
    threshold: float = 0.5
    given: str = "threshold"
    overlap: float = Field(0, ge=0, le=1)
    max_boxes: int = Field(300, ge=1)
    label: str = "label"
    score: str = "score"
    box: str = "box"
    count: str = "count"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.boxes, self.size)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.score, self.box, self.count)

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.given,)

    @property
    def elements_at_once(self) -> int:
        return 0 if self.overlap else super().elements_at_once

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "queries", "classes"), self.boxes: ("batch", "queries", 4)}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        super().check(known)
        spec = known[self.logits]
        if spec is not None and isinstance(classes := spec.shape[2], int):
            fit(self.kind, self.labels, self.logits, classes - self.background)

    def steadied(self, raw: Values, answers: Values) -> Values:
        """Return thresholds in the widest gap of each picture's best scores, if the case has thresholds."""
        if self.given not in raw:
            return {}
        best = -np.sort(-answers[self.score], axis=1)[:, : _BEST + 1]
        gaps = best[:, :-1] - best[:, 1:]
        if not gaps.size:
            return {}
        place = gaps.argmax(1)[:, None] + [0, 1]
        return {self.given: np.take_along_axis(best, place, 1).mean(1)}

    def open(self, files: Files) -> Apply:
        names = np.array([*(label.encode() for label in self.labels), b""], object)

        def apply(values: Values) -> Values:
            scores = FUNCTIONS[self.function](values[self.logits].astype(np.float32, copy=False))
            scores = scores[..., :-1] if self.background else scores
            fit(self.kind, self.labels, self.logits, scores.shape[2])
            boxes = self._corners(values[self.boxes].astype(np.float32, copy=False), values[self.size])
            thresholds = self._thresholds(len(scores), values)
            rows = [self._row(*each) for each in zip(scores, boxes, thresholds, strict=True)]
            return {
                self.label: names[padded([row.label for row in rows], np.intp)],  # the last name is that of padding
                self.score: padded([row.score for row in rows], np.float32),
                self.box: padded([row.box for row in rows], _CORNERS),
                self.count: counts([row.label for row in rows]),
            }

        return apply

    def _thresholds(self, count: int, values: Values) -> Array:
        given = values.get(self.given)
        if given is None:
            return np.full(count, self.threshold, np.float32)
        if np.isnan(given).any():
            raise InvalidArgument(f"input '{self.given}' is not a number; send one such as 0.5")
        return np.broadcast_to(given, count)

    def _corners(self, boxes: Array, size: Array) -> Array:
        """Return left, top, right and bottom in pixels of the original pictures, float32[n, queries, 4]."""
        self.check_shape(self.boxes, boxes.shape)
        if self.form == "cxcywh":
            centre, half = boxes[..., :2], np.float32(0.5) * boxes[..., 2:]
            boxes = np.concatenate([centre - half, centre + half], axis=-1)
        unit = (size.astype(np.float64) / self.extent).astype(np.float32)[:, [1, 0, 1, 0]]
        scaled: Array = boxes * unit[:, None]
        return scaled

    def _row(self, scores: Array, boxes: Array, threshold: float) -> _Row:
        """Return the boxes of one picture, from float32[queries, classes] and float32[queries, 4]."""
        if self.top_k:
            best = np.argsort(-scores, axis=None, kind="stable")[: self.top_k]
            query, label = np.divmod(best, scores.shape[1])
        else:
            query, label = np.arange(len(scores)), scores.argmax(1)
        row = _Row(label, scores[query, label], boxes[query])
        row = row.at(row.score > threshold)
        return row.at(kept(row, self.overlap, self.max_boxes)) if self.overlap else row


class _Row(NamedTuple):
    """The boxes of one picture: the numbers of their classes, their scores, and their corners [k, 4]."""

    label: Array
    score: Array
    box: Array

    def at(self, which: Array) -> _Row:
        return _Row(self.label[which], self.score[which], self.box[which])


def kept(row: _Row, overlap: float, most: int) -> Array:
    """Return the indices of boxes that non-maximum suppression keeps in each class, best first, ``most`` at most."""
    left, top, right, bottom = row.box.T
    area = (right - left) * (bottom - top)
    order, found = np.argsort(-row.score, kind="stable"), list[int]()
    while len(order) and len(found) < most:
        best, order = order[0], order[1:]
        found.append(int(best))
        width = np.minimum(right[best], right[order]) - np.maximum(left[best], left[order])
        height = np.minimum(bottom[best], bottom[order]) - np.maximum(top[best], top[order])
        shared = width.clip(0) * height.clip(0)
        over = shared > overlap * (area[best] + area[order] - shared)
        order = order[~(over & (row.label[order] == row.label[best]))]
    return np.array(found, np.intp)
