"""``depth``: from the depths that a graph predicts to those of each pixel of the original picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ingot.errors import TooLarge
from ingot.steps.after.pixels import cells_of, png, resized_cubic
from ingot.steps.step import Apply, Files, Shape, Step, Values
from ingot.tensors import Array

# Depths of the pictures of a request, once they have one size.
_MOST_DEPTHS = 1 << 26
# The part of a depth that resizing equal ones adds.
_FLAT = 1e-5


class Depth(Step):
    """Resize depths to the original picture, and draw them.

    Attributes:
        depths: the graph's output, float[n, h, w].
        size: height and width of the pictures, int64[n, 2].
        resized: depths of the size of the upright picture in the model's unit, float32[n, height, width]; those of a
            smaller picture have zeros at the right and at the bottom.
        drawn: a PNG of the size of the upright picture for each: 0 for the least depth, 255 for the largest. BYTES[n].
    """

    kind: Literal["depth"] = "depth"
    depths: str = "predicted_depth"
    size: str = "original_size"
    resized: str = "predicted_depth"
    drawn: str = "depth"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.depths, self.size)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.resized, self.drawn)

    @property
    def elements_at_once(self) -> int:
        return 0  # a large picture of few depths

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.depths: ("batch", "height", "width")}

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            depths, sizes = values[self.depths].astype(np.float32, copy=False), values[self.size]
            found = np.zeros((len(depths), *_largest(sizes)), np.float32)
            drawn = np.empty(len(depths), object)
            for index, (height, width) in enumerate(sizes.tolist()):
                own = resized_cubic(depths[index], height, width)
                found[index, :height, :width], drawn[index] = own, png(_levels(own))
            return {self.resized: found, self.drawn: drawn}

        return apply

    def comparable(self, answers: Values) -> Values:
        """Return the depths, and the mean brightness of each cell of the drawn ones, float32[n, 4, 4].

        Libraries compress the same pixels to other bytes, and rounding moves a brightness by 1 of 255.
        """
        return {**answers, self.drawn: np.array([cells_of(file) for file in answers[self.drawn]])}


def _largest(sizes: Array) -> Sequence[int]:
    height, width = sizes.max(axis=0).tolist()
    if len(sizes) * height * width > _MOST_DEPTHS:
        raise TooLarge(
            f"the depths of {len(sizes)} pictures have {len(sizes)} x {width} x {height} pixels once they have one size"
            f"; the most are {_MOST_DEPTHS}: divide the request"
        )
    return height, width


def _levels(depths: Array) -> Array:
    """Return depths from 0 for the least to 255 for the largest, cut to whole numbers.

    Depths that are equal but for noise become 0; transformers draws the noise, and divides by 0 without any.
    """
    least, most = depths.min(), depths.max()
    if most - least <= _FLAT * max(abs(least), abs(most)):
        return np.zeros(depths.shape, np.uint8)
    levels: Array = ((depths - least) / (most - least) * np.float32(255)).astype(np.uint8)
    return levels
