from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.quant.schemes.rounding import Affine, as_kept, channel_scales, to_int8
from tests.quant.graphs import random

INTEGERS = {ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127), ir.DataType.UINT16: (0, 65535)}
SIZES = st.floats(-1e38, 1e38)


@given(SIZES, SIZES, st.sampled_from(list(INTEGERS)), st.floats(0, 1))
def test_any_real_of_the_range_is_restored_within_half_a_step(
    first: float, second: float, dtype: ir.DataType, share: float
) -> None:
    low, high = min(first, second), max(first, second)
    affine = Affine.of(low, high, dtype)
    least, most = INTEGERS[dtype]
    assert affine.scale > 0
    assert np.isfinite(affine.scale)
    assert least <= affine.zero <= most
    real = low + share * (high - low)
    integer = np.clip(np.rint(real / affine.scale) + affine.zero, least, most)
    # Zero is represented exactly, which moves the range by at most half a step.
    assert abs((integer - affine.zero) * affine.scale - real) <= affine.scale * 1.01
    assert (np.clip(np.rint(0 / affine.scale) + affine.zero, least, most) - affine.zero) == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_all_zero_values_have_a_nonzero_scale(dtype: ir.DataType) -> None:
    for kept in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        affine = Affine.of(0, 0, dtype, kept)
        assert np.array(affine.scale, kept.numpy()) > 0


@pytest.mark.parametrize("low", [0.0, -3.0, 5.0])
def test_half_precision_keeps_the_scale_that_is_computed_with(low: float) -> None:
    affine = Affine.of(low, 1e-3, ir.DataType.UINT16, ir.DataType.FLOAT16)
    assert affine.scale == float(np.float16(affine.scale))
    assert affine.zero == np.clip(round(-min(low, 0) / affine.scale), 0, 65535)


def test_one_scale_per_channel_or_one_for_all() -> None:
    array = np.array([[1.0, -2.0], [0.0, 0.0], [63.5, 127.0]], np.float32)
    np.testing.assert_allclose(channel_scales(array, 0), [2 / 127, 1e-12 / 127, 1])
    np.testing.assert_allclose(channel_scales(array, 1), [0.5, 1])
    np.testing.assert_allclose(channel_scales(array, None), 1)
    assert to_int8(array, channel_scales(array, None), None).tolist() == [[1, -2], [0, 0], [64, 127]]
    assert to_int8(array, channel_scales(array, 0), 0).tolist() == [[64, -127], [0, 0], [64, 127]]


@given(st.integers(0, 99), st.sampled_from([0, 1, 2, None]), st.floats(-30, 30))
def test_weights_come_back_within_half_a_step(seed: int, axis: int | None, size: float) -> None:
    array = random(3, 4, 5, seed=seed) * np.float32(10**size)
    scales = channel_scales(array, axis)
    integers = to_int8(array, scales, axis)
    assert integers.dtype == np.int8
    by = scales if axis is None else np.expand_dims(scales, [other for other in range(3) if other != axis])
    assert (np.abs(integers * by.astype(np.float64) - array) <= by * 0.5001).all()
    if size > -10:
        assert np.abs(integers).max() == 127


def test_scales_as_they_are_kept() -> None:
    scales = np.array([1e-12, -1e-12, 0.1, 1e-6], np.float32)
    assert np.array_equal(as_kept(scales, ir.DataType.FLOAT), scales)
    kept = as_kept(scales, ir.DataType.FLOAT16)
    assert kept.dtype == np.float32
    assert np.array_equal(kept, kept.astype(np.float16).astype(np.float32))
    assert (kept != 0).all()
    assert np.array_equal(np.sign(kept), np.sign(scales))
