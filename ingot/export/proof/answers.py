"""The difference of answers that are not plain arrays: classes by name, boxes, and masks."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from operator import itemgetter
from typing import Any

import numpy as np

from ingot.steps import Values
from ingot.tensors import Array, arrays

# The part of all pixels whose class may differ: where the logits of two classes are equal but for rounding. One request
# may have a larger part, of which a pixel of a small picture is one.
MASKS, OF_REQUEST = 1e-4, 1e-3
# The unit of depths is a model's own: only those whose largest is below this count as 0.
_LEAST_DEPTH = 1e-6
# The difference that scores of segments may have: they are means over pixels that may differ.
_SCORES = 1e-3


def error(expected: Values, given: Values, tolerance: float) -> tuple[str, float]:
    """Return the answer that differs most, and its difference.

    That is relative to an answer's largest value; for masks it is the part of all pixels whose class differs.

    Args:
        expected: the original's.
        given: at least the same names.
        tolerance: the difference of scores below which boxes have no order.
    """
    given = {name: given[name] for name in expected}
    if "mask" in expected:
        score = _of_scores(expected, given)
        return ("score", score) if score > _SCORES else ("mask", _of_masks(expected, given))
    if "depth" in expected:
        errors = {
            name: arrays.departure(expected[name], given[name], _LEAST_DEPTH) for name in expected.keys() - {"depth"}
        }
        return max((*errors.items(), ("depth", _of_levels(expected, given))), key=itemgetter(1))
    if "box" in expected:
        return _of_boxes(expected, given, tolerance)
    return arrays.worst_error(_by_label(expected), _by_label(given))


def _by_label(values: Values) -> dict[str, Array]:
    """Return answers with the classes of each row in the order of their names: equal scores have no order."""
    found = dict(values)
    if "label" in found:
        order = np.argsort(found["label"].astype(bytes), axis=1, kind="stable")
        found = {name: np.take_along_axis(array, order, 1) for name, array in found.items()}
    return found


def _of_masks(expected: Values, given: Values) -> float:
    different = pixels = 0
    for one, other in zip(_masks(expected), _masks(given), strict=True):
        if not (sizes := {mask.shape for mask in (*one.values(), *other.values())}):
            continue  # neither has a segment
        [size, *others] = sizes
        if others:
            return np.inf
        nothing = np.zeros(size, bool)
        names = one.keys() | other.keys()
        different += sum(int((one.get(name, nothing) != other.get(name, nothing)).sum()) for name in names)
        pixels += nothing.size
    return different / 2 / max(pixels, 1)  # each differs in two masks


def _masks(values: Values) -> list[Mapping[tuple[bytes, int], Array]]:
    """Return the masks of each picture by their label and their number among those of the label."""
    rows = zip(values["label"].tolist(), values["mask"].tolist(), values["count"].tolist(), strict=True)
    return [
        {
            (label, labels[:index].count(label)): _decoded(file) > 0
            for index, (label, file) in enumerate(zip(labels[:count], files[:count], strict=True))
        }
        for labels, files, count in rows
    ]


def _of_scores(expected: Values, given: Values) -> float:
    """Return the largest difference of the scores of segments, if they have scores, and are as many."""
    if "score" not in expected or expected["score"].shape != given["score"].shape:
        return 0.0
    return float(np.abs(expected["score"] - given["score"]).max(initial=0))


def _of_levels(expected: Values, given: Values) -> float:
    """Return how much the brightness of drawn depths differs, from 0 to 1, by more than one level of rounding."""
    pairs = zip(expected["depth"], given["depth"], strict=True)
    levels = (int(np.abs(_decoded(one).astype(int) - _decoded(other)).max()) for one, other in pairs)
    return max(0, *(level - 1 for level in levels)) / 255


def _decoded(file: bytes) -> Array:
    from PIL import Image

    return np.asarray(Image.open(BytesIO(file)))


def _of_boxes(expected: Values, given: Values, tolerance: float) -> tuple[str, float]:
    """Return the largest difference of boxes: each expected one is paired with the nearest of its label."""
    if not np.array_equal(expected["count"], given["count"]):
        return "count", np.inf
    worst = "score", 0.0
    for index, count in enumerate(expected["count"].tolist()):
        place = index, slice(count)
        one, other = ({name: values[name][place] for name in ("label", "score", "box")} for values in (expected, given))
        worst = max(worst, _of_picture(one, other, tolerance), key=lambda each: each[1])
    return worst


def _of_picture(expected: Values, given: Values, tolerance: float) -> tuple[str, float]:
    if not len(expected["label"]):
        return "score", 0.0
    scales = {name: max(float(np.abs(expected[name]).max()), arrays.SCALE_FLOOR) for name in ("score", "box")}
    worst, left, alone = ("score", 0.0), [*range(len(given["label"]))], list[Any]()
    for index, label in enumerate(expected["label"]):
        errors = {
            other: max(_apart(name, expected, given, (index, other)) / scale for name, scale in scales.items())
            for other in left
            if given["label"][other] == label
        }
        nearest = min(errors, key=errors.__getitem__, default=None)
        if nearest is None or errors[nearest] > tolerance:
            alone.append(index)
            continue
        left.remove(nearest)
        worst = max(worst, ("box", errors[nearest]), key=lambda each: each[1])
    alone, left = sorted(alone, key=expected["score"].__getitem__), sorted(left, key=given["score"].__getitem__)
    least = min(expected["score"]) if len(expected["label"]) > 1 else -np.inf
    for place, pair in enumerate(zip(alone, left, strict=True)):
        score, box = (_apart(name, expected, given, pair) / scale for name, scale in scales.items())
        # Of equal scores, rounding decides which class of a box is named, and which box is kept as the last.
        last = place == 0 and (expected["score"][pair[0]] - least) / scales["score"] <= tolerance
        found = ("score", score) if box <= tolerance or last else ("box", box)
        worst = max(worst, found, key=lambda each: each[1])
    return worst


def _apart(name: str, expected: Values, given: Values, pair: tuple[int, int]) -> float:
    return float(np.abs(expected[name][pair[0]] - given[name][pair[1]]).max())
