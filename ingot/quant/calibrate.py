"""Calibration data: checked against the signature, and read in batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ingot import arrays, tensors
from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, Signature

Data = Mapping[str, Array] | str | Path


class Calibration:
    """Real inputs of a model.

    Args:
        signature: the model's.
        data: arrays by input name with all samples along the batch dimension, or the path of such an ``.npz``. Other
            arrays in it, such as labels, are not used.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: an input is missing, empty, of another type or shape, or holds NaN or infinity.
    """

    def __init__(self, signature: Signature, data: Data):
        loaded = arrays.load_npz(data) if isinstance(data, str | Path) else data
        where = f" in {data}" if isinstance(data, str | Path) else ""
        names = [spec.name for spec in signature.inputs]
        missing = [name for name in names if name not in loaded]
        if missing:
            found = ", ".join(loaded) or "nothing"
            raise InvalidArgument(f"the calibration data{where} lacks the input '{missing[0]}'; it holds: {found}")
        self.inputs = {name: np.asarray(loaded[name]) for name in names}
        self._signature = signature
        for name, array in self.inputs.items():
            if array.size == 0:
                raise InvalidArgument(f"the calibration data{where} is empty: '{name}' has shape {list(array.shape)}")
            if DType.of(array).is_float and not np.isfinite(array.astype(np.float64)).all():
                raise InvalidArgument(f"the calibration data{where} holds NaN or infinity in '{name}'")
        sizes = tensors.check_inputs(signature, self.inputs)
        self.rows = sizes[signature.batch] if signature.batch else 1

    def batches(self, rows: int = 32) -> Iterator[dict[str, Array]]:
        """Yield the data in batches of at most ``rows``; whole where the model takes no batch."""
        if self._signature.batch is None:
            yield self.inputs
            return
        rows = self._signature.max_rows(rows)
        axes = self._signature.batch_axes(self._signature.inputs)
        for part in range(math.ceil(self.rows / rows)):
            index = np.arange(part * rows, min((part + 1) * rows, self.rows))
            yield {
                name: array.take(index, axes[name]) if name in axes else array for name, array in self.inputs.items()
            }
