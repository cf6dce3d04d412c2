"""Mel filters: from frequencies to bands that are as far apart as they sound, with transformers' arithmetic."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ingot.errors import InvalidArgument
from ingot.tensors import Array

# Slaney's scale is linear up to 1,000 Hz, which is 15 mel, and logarithmic from there on.
_LOG_FROM_HZ, _LOG_FROM_MEL = 1000.0, 15.0

Scale = Literal["htk", "kaldi", "slaney"]


class Mel(BaseModel):
    """Triangular filters, as ``transformers.audio_utils.mel_filter_bank`` computes them.

    Attributes:
        bands: how many.
        lowest: Hz where the first band begins.
        highest: Hz where the last one ends.
        scale: from Hz to mel.
        triangles_in_mel: whether the sides of the triangles are straight over mel, not over Hz.
        equal_area: whether each filter is divided by its width.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bands: int = Field(ge=1, le=1 << 12)
    lowest: float = 0
    highest: float
    scale: Scale
    triangles_in_mel: bool = False
    equal_area: bool = False


@functools.lru_cache(16)
def filters(mel: Mel, bins: int, rate: int) -> Array:
    """Return the weight of each of ``bins`` frequencies from 0 to ``rate`` / 2 Hz in each band, float64[bins, bands].

    Raises:
        InvalidArgument: the bands have no width.
    """
    if not 0 <= mel.lowest < mel.highest:
        raise InvalidArgument(f"the bands of mel are from {mel.lowest} to {mel.highest} Hz; they need a width")
    edges = np.linspace(_to_mel(mel.lowest, mel.scale), _to_mel(mel.highest, mel.scale), mel.bands + 2)
    corners = _to_hertz(edges, mel.scale)
    if mel.triangles_in_mel:
        hertz = rate / ((bins - 1) * 2) * np.arange(bins)
        weights = _triangles(_to_mel(hertz, mel.scale), edges)
    else:
        weights = _triangles(np.linspace(0, rate // 2, bins), corners)
    if mel.equal_area:
        weights *= (2.0 / (corners[2:] - corners[:-2]))[None]
    return weights


def _triangles(frequencies: Array, corners: Array) -> Array:
    width = np.diff(corners)
    slopes = corners[None] - frequencies[:, None]
    rising, falling = -slopes[:, :-2] / width[:-1], slopes[:, 2:] / width[1:]
    found: Array = np.maximum(np.zeros(1), np.minimum(rising, falling))
    return found


def _to_mel(hertz: Any, scale: Scale) -> Any:
    if scale == "htk":
        return 2595.0 * np.log10(1.0 + (hertz / 700.0))
    if scale == "kaldi":
        return 1127.0 * np.log(1.0 + (hertz / 700.0))
    above = _LOG_FROM_MEL + np.log(np.maximum(hertz, _LOG_FROM_HZ) / _LOG_FROM_HZ) * (27.0 / np.log(6.4))
    return np.where(hertz >= _LOG_FROM_HZ, above, 3.0 * hertz / 200.0)


def _to_hertz(mel: Array, scale: Scale) -> Array:
    if scale == "htk":
        return 700.0 * (np.power(10, mel / 2595.0) - 1.0)
    if scale == "kaldi":
        return 700.0 * (np.exp(mel / 1127.0) - 1.0)
    above = _LOG_FROM_HZ * np.exp(np.log(6.4) / 27.0 * (np.maximum(mel, _LOG_FROM_MEL) - _LOG_FROM_MEL))
    return np.where(mel >= _LOG_FROM_MEL, above, 200.0 * mel / 3.0)
