"""How well a quantized model agrees with the one that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.tensors import Array, DType

Outputs = Mapping[str, Array]


def agreement(expected: Sequence[Outputs], actual: Sequence[Outputs]) -> dict[str, float]:
    """Compare two models' answers to the same batches by their first floating-point output.

    Returns:
        ``cosine``: the mean cosine similarity by row; ``top1``: the share of rows with the same largest element.
        Empty when there is no floating-point output.
    """
    name = next((key for key, array in expected[0].items() if DType.of(array).is_float), None)
    if name is None:
        return {}
    left, right = _rows(expected, name), _rows(actual, name)  # [rows, values]
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    result = {"cosine": float(((left * right).sum(axis=1) / np.maximum(norms, 1e-12)).mean())}
    if left.shape[1] > 1:
        result["top1"] = float((left.argmax(axis=1) == right.argmax(axis=1)).mean())
    return result


def _rows(batches: Sequence[Outputs], name: str) -> Array:
    rows = [np.atleast_1d(batch[name]) for batch in batches]
    return np.concatenate([array.reshape(len(array), -1) for array in rows]).astype(np.float64)
