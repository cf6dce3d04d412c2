"""Arrays in ``.npz`` and ``.npy`` files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ingot.errors import InvalidArgument
from ingot.tensors import Array
from ingot.tensors.arrays import load_npz, not_an_array, open_regular

__all__ = ["load_npy", "load_npz"]


def load_npy(path: Path) -> Array:
    """Read the array of an ``.npy`` file; pickled objects are refused.

    Raises:
        InvalidArgument: it is not an ``.npy`` file, or contains Python objects.
    """
    try:
        with open_regular(path) as file:
            loaded = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise not_an_array(path, "an .npy file of a plain array", error) from error
    if not isinstance(loaded, np.ndarray):
        raise InvalidArgument(f"{path} contains several arrays; rename it to .npz")
    return loaded
