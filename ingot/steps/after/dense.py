"""``dense``: a linear layer with an activation after the graph, as sentence-transformers' Dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, Literal

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArchive
from ingot.steps.step import Apply, Files, Step, Values
from ingot.tensors import Array, TensorSpec

Activation = Literal["identity", "tanh", "relu", "sigmoid"]


class Dense(Step):
    """Apply a linear layer and an activation to each row.

    Attributes:
        weight: the ``.npy`` file of the weights, float32[out, in].
        bias: the ``.npy`` file of the biases, float32[out]; empty for none.
        value: the name of the vectors, which are replaced.
    """

    kind: Literal["dense"] = "dense"
    weight: str = "dense.weight.npy"
    bias: str = ""
    activation: Activation = "tanh"
    value: str = "embedding"

    @property
    def files(self) -> tuple[str, ...]:
        return (self.weight, self.bias) if self.bias else (self.weight,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.value,)

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        spec = known.get(self.value)
        if files is not None and spec is not None and isinstance(size := spec.shape[-1], int):
            self._fit(size, _array(self.weight, files, 2))

    def _fit(self, size: int, weight: Array) -> None:
        if size != weight.shape[1]:
            raise InvalidArchive(
                f"step 'dense' gets '{self.value}' of {size} values, but '{self.weight}' has {weight.shape[1]} "
                "columns; give the weight of this layer"
            )

    def open(self, files: Files) -> Apply:
        weight = _array(self.weight, files, 2)
        bias = _array(self.bias, files, 1) if self.bias else np.zeros(len(weight), np.float32)
        if len(bias) != len(weight):
            raise InvalidArchive(f"'{self.bias}' has {len(bias)} values, '{self.weight}' {len(weight)} rows")
        activate = ACTIVATIONS[self.activation]

        def apply(values: Values) -> Values:
            rows = values[self.value]
            self._fit(rows.shape[-1], weight)
            return {self.value: activate(rows @ weight.T + bias)}

        return apply


def _array(name: str, files: Files, rank: int) -> Array:
    content = files(name)
    with foreign.reported_as(InvalidArchive, f"'{name}' is not a .npy file of a plain array"):
        array: Any = np.load(BytesIO(content), allow_pickle=False)
    if not isinstance(array, np.ndarray):  # np.load opens .npz files too
        raise InvalidArchive(f"'{name}' is not a .npy file of a plain array")
    if array.dtype != np.float32 or array.ndim != rank:
        raise InvalidArchive(f"'{name}' holds {array.dtype} of {array.ndim} dimensions, not float32 of {rank}")
    found: Array = array
    return found


def sigmoid(values: Array) -> Array:
    """Return the logistic function, without overflow."""
    negative: Array = np.exp(-np.abs(values))
    found: Array = np.where(values >= 0, np.float32(1), negative) / (1 + negative)
    return found


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda values: values,
    "tanh": np.tanh,
    "relu": lambda values: np.maximum(values, np.float32(0)),
    "sigmoid": sigmoid,
}
"""The functions by name."""
