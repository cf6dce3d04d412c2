"""``text_boxes``: from the probability that each pixel belongs to a text, to the box of each line of text."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from pydantic import Field

from ingot.errors import missing_package
from ingot.steps.ragged import columns
from ingot.steps.step import Apply, Files, Shape, Step, Values
from ingot.tensors import Array

# Pixels of the sides of a region before and after its expansion, and of a box in the picture.
_LEAST_REGION, _LEAST_EXPANDED, _LEAST_BOX = 3, 5, 4
# Lines whose tops are fewer pixels apart stand side by side.
_SAME_ROW = 10
_KERNEL = np.ones((2, 2), np.uint8)
_BOUNDS, _POLYGON = np.dtype((np.float32, 4)), np.dtype((np.int32, (4, 2)))


class TextBoxes(Step):
    """Find the regions of pixels above a threshold, and return a rotated box around each, expanded and in order.

    This is the decoding of differentiable binarization (Liao et al. 2020, https://arxiv.org/abs/1911.08947) as the
    class TextDetector of the package rapidocr does it, and the order of lines of its class RapidOCR: from top to
    bottom, and from left to right.

    The number of columns k is the largest number of boxes of a picture in the request; columns behind a row's ``count``
    are padded as by :func:`~ingot.steps.ragged.padded`.

    Attributes:
        probabilities: float[n, 1, height, width].
        size: height and width of the pictures, int64[n, 2].
        threshold: pixels above it belong to a text.
        least_score: regions with a lower mean probability are left out.
        expansion: a region is expanded by its area times this, divided by its perimeter.
        dilated: whether a region is extended by a pixel to the right and to the bottom first.
        max_regions: the most regions of a picture that are considered.
        name: the label of all boxes.
        label: ``name`` for each box, BYTES[n, k].
        score: the mean probability, float32[n, k].
        box: left, top, right and bottom of the polygon, float32[n, k, 4].
        polygon: the corners in pixels of the upright picture, clockwise from the top left, int32[n, k, 4, 2].
        count: the number of boxes, int32[n].
    """

    kind: Literal["text_boxes"] = "text_boxes"
    probabilities: str = "probabilities"
    size: str = "original_size"
    threshold: float = Field(0.3, ge=0, le=1)
    least_score: float = Field(0.5, ge=0, le=1)
    expansion: float = Field(1.6, ge=0, le=100)
    dilated: bool = True
    max_regions: int = Field(1000, ge=1, le=100_000)
    name: str = "text"
    label: str = "label"
    score: str = "score"
    box: str = "box"
    polygon: str = "polygon"
    count: str = "count"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.probabilities, self.size)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.score, self.box, self.polygon, self.count)

    @property
    def elements_at_once(self) -> int:
        return 0

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.probabilities: ("batch", 1, "height", "width")}

    def open(self, files: Files) -> Apply:
        regions = _Regions(self)

        def apply(values: Values) -> Values:
            maps = values[self.probabilities].astype(np.float32, copy=False)
            self.check_shape(self.probabilities, maps.shape)
            pairs = zip(maps[:, 0], values[self.size].tolist(), strict=True)
            rows = [_in_order([*regions.boxes(picture, height, width)]) for picture, (height, width) in pairs]
            parts: Mapping[str, tuple[Callable[[_Box], Any], DTypeLike]] = {
                self.label: (lambda box: self.name.encode(), object),
                self.score: (attrgetter("score"), np.float32),
                self.box: (attrgetter("bounds"), _BOUNDS),
                self.polygon: (attrgetter("polygon"), _POLYGON),
            }
            return columns(rows, parts, self.count)

        return apply


class _Box(NamedTuple):
    """A line of text: its corners, int32[4, 2], clockwise from the top left, and its score."""

    polygon: Array
    score: float

    @property
    def bounds(self) -> Array:
        bounds: Array = np.concatenate([self.polygon.min(0), self.polygon.max(0)])
        return bounds


class _Regions:
    """Finds boxes of texts with OpenCV and Clipper.

    Raises:
        Unsupported: one of the packages is not installed.
    """

    def __init__(self, step: TextBoxes):
        self._step = step
        try:
            # Imported by name, as the types that these packages declare are those of other versions.
            self._cv2: Any = importlib.import_module("cv2")
            self._clipper: Any = importlib.import_module("pyclipper")
        except ModuleNotFoundError as error:
            package = {"cv2": "opencv-python-headless"}.get(str(error.name), str(error.name))
            raise missing_package(package, "finding texts in pictures", "ocr") from error

    def boxes(self, probabilities: Array, height: int, width: int) -> Iterator[_Box]:
        """Yield the boxes of one picture of ``height`` and ``width`` pixels, from float32[rows, columns]."""
        cv2, step = self._cv2, self._step
        mask = (probabilities > step.threshold).astype(np.uint8)
        mask = cv2.dilate(mask, _KERNEL) if step.dilated else mask
        contours, _ = cv2.findContours(mask * np.uint8(255), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
        size, map_size = np.array([width, height]), np.array(probabilities.shape[::-1], np.float32)
        for contour in contours[: step.max_regions]:
            corners, side = self._smallest_rectangle(contour)
            if side < _LEAST_REGION or (score := self._mean(probabilities, corners)) < step.least_score:
                continue
            corners, side = self._smallest_rectangle(self._expanded(corners))
            if side < _LEAST_EXPANDED:
                continue
            corners = np.round(corners / map_size * size.astype(np.float32)).clip(0, size)
            polygon = _from_top_left(corners.astype(np.int32)).clip(0, size - 1)
            if min(_length(polygon[0], polygon[1]), _length(polygon[0], polygon[3])) >= _LEAST_BOX:
                yield _Box(polygon, score)

    def _smallest_rectangle(self, points: Array) -> tuple[Array, float]:
        """Return the corners of the smallest rectangle around points, float32[4, 2], and its shorter side."""
        rectangle = self._cv2.minAreaRect(points)
        return _from_top_left(self._cv2.boxPoints(rectangle)), min(rectangle[1])

    def _mean(self, probabilities: Array, corners: Array) -> float:
        """Return the mean probability of the pixels within corners."""
        most = np.array(probabilities.shape[::-1]) - 1
        low = np.floor(corners.min(0)).astype(np.int32).clip(0, most)
        high = np.ceil(corners.max(0)).astype(np.int32).clip(0, most)
        width, height = high - low + 1
        mask = np.zeros((height, width), np.uint8)
        self._cv2.fillPoly(mask, (corners - low.astype(np.float32)).reshape(1, -1, 2).astype(np.int32), 1)
        part = probabilities[low[1] : high[1] + 1, low[0] : high[0] + 1]
        return float(self._cv2.mean(part, mask)[0])

    def _expanded(self, corners: Array) -> Array:
        """Return the outline of a region whose sides are moved outwards, int32[points, 1, 2]."""
        exact = corners.astype(np.float64)
        sides = np.roll(exact, -1, axis=0) - exact
        area = abs(np.linalg.det(exact[[2, 3]] - exact[[0, 1]])) / 2  # half the cross product of the diagonals
        distance = area * self._step.expansion / np.hypot(*sides.T).sum()
        offset = self._clipper.PyclipperOffset()
        offset.AddPath(corners, self._clipper.JT_ROUND, self._clipper.ET_CLOSEDPOLYGON)
        [outline] = offset.Execute(distance)
        return np.array(outline, np.int32)[:, None]


def _from_top_left(corners: Array) -> Array:
    """Return corners clockwise from the top left; the two with the least x are the left ones."""
    by_x = corners[np.argsort(corners[:, 0])]
    (top_left, bottom_left), (top_right, bottom_right) = (side[np.argsort(side[:, 1])] for side in (by_x[:2], by_x[2:]))
    return np.stack([top_left, top_right, bottom_right, bottom_left])


def _length(start: Array, end: Array) -> float:
    return float(np.hypot(*(end - start)))


def _in_order(boxes: Sequence[_Box]) -> list[_Box]:
    """Return boxes from top to bottom; each is then moved before those of its row that begin more to the right."""
    found: list[_Box] = []
    for box in sorted(boxes, key=lambda each: (each.polygon[0, 1], each.polygon[0, 0])):
        place = len(found)
        while place and _precedes(box, found[place - 1]):
            place -= 1
        found.insert(place, box)
    return found


def _precedes(box: _Box, other: _Box) -> bool:
    right, below = box.polygon[0] - other.polygon[0]
    return bool(abs(below) < _SAME_ROW and right < 0)
