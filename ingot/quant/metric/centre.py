"""The origin for the directions of an output's rows: 0, or their mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ingot.tensors import Array

# Of the squared distance from 0: below the first, rows of several values have nearly the same direction (a constant
# output would have a cosine of 0.99); below the second, the variation is rounding.
_ALIKE = 0.02
_ROUNDING = 1e-12


def find_centre(parts: Sequence[Array]) -> Array | None:
    """Return the mean row [values] as the origin for the cosine of an output, or None for 0.

    It is the mean for outputs of one value per row, and for those that hardly vary: seen from 0, all their rows have
    one direction, and a model with constant output would seem to agree. A constant original has only its direction from
    0, and rows of several sizes have no mean.

    Args:
        parts: the original's outputs, rows first; values that are not finite do not count.
    """
    width = parts[0].size // max(len(parts[0]), 1)
    if not width or any(part.size != width * len(part) for part in parts):
        return None
    count, total = np.zeros(width), np.zeros(width)
    for values, sound in map(_finite, parts):
        count += sound.sum(0)
        total += values.sum(0)
    mean: Array = total / np.maximum(count, 1)
    spread = sum(float((_from(values, sound, mean) ** 2).sum()) for values, sound in map(_finite, parts))
    size = sum(float((values**2).sum()) for values, _ in map(_finite, parts))
    alike = width == 1 or spread < _ALIKE * size
    return mean if alike and spread > _ROUNDING * size else None


def move(original: Array, other: Array, centre: Array | None) -> tuple[Array, Array]:
    """Return both as float64 [rows, values] relative to a centre; 0 where the original is not finite."""
    left, sound = _finite(original)
    right = np.where(sound, other.reshape(left.shape).astype(np.float64), 0.0)
    return (left, right) if centre is None else (_from(left, sound, centre), _from(right, sound, centre))


def _from(values: Array, sound: Array, centre: Array) -> Array:
    moved: Array = np.where(sound, values - centre, 0.0)
    return moved


def _finite(part: Array) -> tuple[Array, Array]:
    """Return [rows, values] in float64 with 0 for values that are not finite, and a mask of the finite ones."""
    values = part.reshape(len(part), -1).astype(np.float64)
    sound = np.isfinite(values)
    return np.where(sound, values, 0.0), sound
