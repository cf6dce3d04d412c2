"""One tensor of every datatype, with extreme values, [3, 2]."""

from __future__ import annotations

import numpy as np

from ingot.tensors import Array, DType


def sample(dtype: DType) -> Array:
    if dtype is DType.BYTES:
        out = np.empty(6, dtype=object)
        out[:] = [b"", b"plain", "\u00e9\u4e2d".encode(), b"a\x00b", b'"quoted"', b"x" * 300]
        return out.reshape(3, 2)
    if dtype is DType.BOOL:
        return np.array([[True, False], [False, False], [True, True]])
    if dtype.is_float:
        return np.array([[0.5, -1.25], [0, 96], [-3, 0.0078125]]).astype(dtype.numpy)
    bounds = np.iinfo(dtype.numpy)
    return np.array([[bounds.min, bounds.max], [0, 1], [2, 3]], dtype=dtype.numpy)
