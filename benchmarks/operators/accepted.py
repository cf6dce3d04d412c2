"""Differences that are accepted, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np

from ingot.tensors import Array

Holds = Callable[[Array, Array, Array | None], Array | bool]
"""Returns where elements differ so, from those of eager, of the exported form and of eager's other kernel."""


@dataclass(frozen=True)
class Accepted:
    """A kind of difference that says nothing about the exported graph: for which operators, where, and why."""

    operators: tuple[str, ...]
    reason: str
    holds: Holds


def _near_overflow(expected: Array, actual: Array, other: Array | None) -> Array | bool:
    """Return where one of two numbers is infinite and the other within 100 times of the largest number."""
    if expected.dtype.kind != "f":
        return False
    most = float(np.finfo(expected.dtype).max) / 100
    left, right = np.abs(expected.astype(np.float64)), np.abs(actual.astype(np.float64))
    return (np.isinf(left) ^ np.isinf(right)) & (np.fmin(left, right) >= most)


def _tiny(expected: Array, actual: Array, other: Array | None) -> Array | bool:
    """Return where both numbers are about 0 or subnormal."""
    if expected.dtype.kind != "f":
        return False
    least = 100 * float(np.finfo(expected.dtype).smallest_normal)
    return (np.abs(expected.astype(np.float64)) <= least) & (np.abs(actual.astype(np.float64)) <= least)


def _eager_differs(expected: Array, actual: Array, other: Array | None) -> Array | bool:
    return False if other is None else ~_close(expected, other, 1e-6)


def _is_place(expected: Array, actual: Array, other: Array | None) -> Array | bool:
    return expected.dtype.kind == "i"


def _close(expected: Array, actual: Array, tolerance: float) -> Array:
    return np.isclose(actual.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=0, equal_nan=True)


ACCEPTED = (
    Accepted(("*",), "an intermediate result overflows within 100 times of the largest number", _near_overflow),
    Accepted(("*",), "a result is below 100 times the smallest normal number, where kernels flush to 0", _tiny),
    Accepted(("*",), "eager's vectorized and scalar kernels differ, so the answer depends on strides", _eager_differs),
    Accepted(
        ("argsort", "sort", "topk", "kthvalue", "median", "nanmedian"),
        "the order of equal values is unspecified without `stable`",
        _is_place,
    ),
    Accepted(
        ("linalg.qr", "linalg.svd", "linalg.eigh", "svd", "qr", "svd_lowrank", "pca_lowrank"),
        "the signs of factors are free, and LAPACK chooses them",
        lambda expected, actual, other: True,
    ),
)


def reasons(
    name: str, tolerance: float, expected: Array, actual: Array, other: Array | None = None
) -> tuple[tuple[str, ...], Array]:
    """Return why elements may differ, and the actual ones with these replaced: ``expected`` itself if all may."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return (), actual
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        good, found = _close(expected, actual, tolerance), []
        for item in ACCEPTED:
            if any(fnmatch(name, pattern) for pattern in item.operators):
                held = np.asarray(item.holds(expected, actual, other)) & ~good
                found += [item.reason] if held.any() else []
                good = good | held
    return tuple(found), expected if good.all() else np.where(good, expected, actual)


def worst(expected: Array, actual: Array) -> tuple[np.intp, ...]:
    """Return the place of the largest difference."""
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        gap = np.where(same, 0, np.nan_to_num(np.abs(left - right), nan=np.inf))
    return np.unravel_index(int(np.argmax(gap)), gap.shape)
