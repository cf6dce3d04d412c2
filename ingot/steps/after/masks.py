"""``masks``: from the classes of a semantic segmentation to a mask of the original picture for each label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Literal

import numpy as np
from pydantic import Field

from ingot.steps.after.classify import fit
from ingot.steps.after.pixels import bands, check_resized, png, shares_of
from ingot.steps.ragged import columns
from ingot.steps.step import Apply, Files, Shape, Step, Values
from ingot.tensors import Array, TensorSpec


class Masks(Step):
    """Resize logits to the original picture, choose the best class of each pixel, and return a mask for each class.

    Answers have k columns, as many as the picture of the request with the most classes has; behind a row's ``count``
    they are padded as :func:`~ingot.steps.ragged.padded` says.

    Attributes:
        logits: float[n, classes, height, width].
        size: height and width of the pictures, int64[n, 2].
        labels: the names of classes, in the order of the logits.
        label: the classes that a picture has, in the order of the logits, BYTES[n, k].
        mask: a PNG of the size of the upright picture for each: 255 where it has the class, 0 elsewhere. BYTES[n, k].
        count: int32[n].
    """

    kind: Literal["masks"] = "masks"
    logits: str = "logits"
    size: str = "original_size"
    labels: tuple[str, ...] = Field(min_length=1, max_length=1_000_000)
    label: str = "label"
    mask: str = "mask"
    count: str = "count"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.size)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.mask, self.count)

    @property
    def elements_at_once(self) -> int:
        return 0  # a large picture of few logits

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "classes", "height", "width")}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        super().check(known)
        spec = known[self.logits]
        if spec is not None and isinstance(classes := spec.shape[1], int):
            fit(self.kind, self.labels, self.logits, classes)

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            logits = values[self.logits].astype(np.float32, copy=False)
            fit(self.kind, self.labels, self.logits, logits.shape[1])
            check_resized(values[self.size], len(self.labels), "classes")
            rows = [[*self._row(*each)] for each in zip(logits, values[self.size].tolist(), strict=True)]
            parts = {self.label: (itemgetter(0), object), self.mask: (itemgetter(1), object)}
            return columns(rows, parts, self.count)

        return apply

    def _row(self, logits: Array, size: Sequence[int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the name and the mask of each class of a picture."""
        classes = best_classes(logits, size[0], size[1])
        for index in np.flatnonzero(np.bincount(classes.reshape(-1), minlength=len(self.labels))):
            yield self.labels[index].encode(), png(classes == index)

    def comparable(self, answers: Values) -> Values:
        """Return the part of the pixels that each class has in each cell of a grid; see :func:`shares_of`."""
        return {self.mask: shares_of(self.labels, self.label, self.mask, answers)}


def best_classes(logits: Array, height: int, width: int) -> Array:
    """Return the first best class of each pixel, int32[height, width], from float32[classes, h, w]."""
    found = np.zeros((height, width), np.int32)
    for place, planes in bands(logits, height, width):
        best = next(planes)
        for index, other in enumerate(planes, 1):
            np.copyto(found[place], index, where=other > best)
            np.maximum(best, other, out=best)
    return found
