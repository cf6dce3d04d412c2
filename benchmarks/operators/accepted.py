"""Differences that are accepted, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import torch

from ingot.tensors import Array


@dataclass(frozen=True)
class Accepted:
    """A kind of difference that says nothing about the exported graph.

    Attributes:
        operators: patterns of names.
        reason: why it is accepted, for the page.
        holds: whether two elements may differ so; None for any difference.
        variants: the kinds of values, all if empty.
    """

    operators: tuple[str, ...]
    reason: str
    holds: Callable[[Array, Array], Array] | None = None
    variants: tuple[str, ...] = ()


def _near_overflow(expected: Array, actual: Array) -> Array:
    """Return where one of two numbers is infinite and the other within 100 of the largest number."""
    most = float(np.finfo(expected.dtype).max) / 100
    left, right = np.abs(expected.astype(np.float64)), np.abs(actual.astype(np.float64))
    return (np.isinf(left) ^ np.isinf(right)) & (np.fmin(left, right) >= most)


def _tiny(expected: Array, actual: Array) -> Array:
    """Return where both numbers are about 0 or subnormal."""
    least = 100 * float(np.finfo(expected.dtype).smallest_normal)
    return (np.abs(expected.astype(np.float64)) <= least) & (np.abs(actual.astype(np.float64)) <= least)


ACCEPTED = (
    Accepted(("*",), "an intermediate result overflows within 100 times of the largest number", _near_overflow),
    Accepted(("*",), "a result is below 100 times the smallest normal number, where kernels flush to 0", _tiny),
    Accepted(
        ("linalg.qr", "linalg.svd", "linalg.eigh", "svd", "qr", "svd_lowrank", "pca_lowrank"),
        "the signs of factors are free, and LAPACK chooses them",
    ),
)


def reason(name: str, dtype: torch.dtype, variant: str, expected: Array, actual: Array) -> str:
    """Return why a difference is accepted; empty if it is not."""
    for item in ACCEPTED:
        if not any(fnmatch(name, pattern) for pattern in item.operators) or (
            item.variants and variant not in item.variants
        ):
            continue
        if item.holds is None:
            return item.reason
        if expected.shape != actual.shape or expected.dtype != actual.dtype or expected.dtype.kind != "f":
            continue
        with np.errstate(invalid="ignore", divide="ignore"):
            close = np.isclose(
                actual, expected, rtol=1e-4 if expected.dtype.itemsize > 2 else 4e-2, equal_nan=True, atol=0
            )
            if (close | item.holds(expected, actual)).all():
                return item.reason
    return ""


def worst(expected: Array, actual: Array) -> tuple[np.intp, ...]:
    """Return the place of the largest difference."""
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        gap = np.where(same, 0, np.nan_to_num(np.abs(left - right), nan=np.inf))
    return np.unravel_index(int(np.argmax(gap)), gap.shape)
