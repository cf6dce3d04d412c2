"""Operations on the samples of a sound, as data: one class for each, with the arithmetic of its origin.

Arrays are float32 with time first: samples[n], or frames[n, bands] after a spectrogram.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.errors import InvalidArgument
from ingot.steps.sounds.mel import Mel, filters
from ingot.tensors import Array


class _Operation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Normalize(_Operation):
    """Subtract the mean and divide by the deviation: of all values, or of each band.

    ``correction`` is subtracted from the count in the variance; ``epsilon`` is added to the variance.
    """

    operation: Literal["normalize"] = "normalize"
    each_band: bool = False
    correction: Literal[0, 1] = 0
    epsilon: float = 1e-7

    def apply(self, values: Array, rate: int) -> Array:
        axis = 0 if self.each_band else None
        deviation = np.sqrt(values.var(axis, ddof=self.correction) + self.epsilon)
        normalized: Array = (values - values.mean(axis)) / deviation
        return normalized


class Standardize(_Operation):
    """Subtract a constant and divide by another one."""

    operation: Literal["standardize"] = "standardize"
    mean: float = 0
    std: float = 1

    def apply(self, values: Array, rate: int) -> Array:
        return (values - self.mean) / self.std


class Fit(_Operation):
    """Cut the end off, or extend it with a value, to a number of samples or frames."""

    operation: Literal["fit"] = "fit"
    size: int = Field(ge=1, le=1 << 24)
    value: float = 0

    def apply(self, values: Array, rate: int) -> Array:
        if len(values) >= self.size:
            return values[: self.size]
        found = np.full((self.size, *values.shape[1:]), self.value, values.dtype)
        found[: len(values)] = values
        return found


class Spectrogram(_Operation):
    """The energy of bands of frequencies in each frame, as ``transformers.audio_utils.spectrogram`` computes it.

    Attributes:
        frame: samples of a frame.
        hop: samples from a frame to the next.
        fft: samples of the Fourier transform; what exceeds the frame is 0.
        window: by which samples of a frame are multiplied.
        periodic: whether the window would repeat without its first sample twice.
        centered: whether the sound is mirrored at both ends, so that the centre of the first frame is its first sample.
        without_last: whether the last frame is left out, as Whisper does it.
        remove_offset: whether the mean of a frame is subtracted first.
        preemphasis: the part of the previous sample that is subtracted then.
        mel: the bands.
        floor: the least energy.
        log: of the energy.
    """

    operation: Literal["spectrogram"] = "spectrogram"
    frame: int = Field(ge=1, le=1 << 16)
    hop: int = Field(ge=1, le=1 << 16)
    fft: int = Field(ge=1, le=1 << 16)
    window: Literal["hann", "povey"] = "hann"
    periodic: bool = True
    centered: bool = True
    without_last: bool = False
    remove_offset: bool = False
    preemphasis: float = Field(0, ge=0, le=1)
    mel: Mel
    floor: float = Field(1e-10, gt=0)
    log: Literal["log10", "log"]

    @model_validator(mode="after")
    def _fits(self) -> Spectrogram:
        if self.fft < self.frame:
            raise ValueError(f"a Fourier transform of {self.fft} samples is shorter than a frame of {self.frame}")
        return self

    @property
    def least(self) -> int:
        """The fewest samples of a sound."""
        return self.frame // 2 + 1 if self.centered else self.frame

    def apply(self, values: Array, rate: int) -> Array:
        if self.centered:
            values = np.pad(values, self.frame // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(values.astype(np.float64), self.frame)[:: self.hop]
        energy = np.abs(np.fft.rfft(self._weighted(frames), self.fft).astype(np.complex64), dtype=np.float64) ** 2.0
        bands = np.maximum(self.floor, np.dot(filters(self.mel, self.fft // 2 + 1, rate).T, energy.T))
        found: Array = np.asarray((np.log10 if self.log == "log10" else np.log)(bands), np.float32).T
        return found[:-1] if self.without_last else found

    def _weighted(self, frames: Array) -> Array:
        if self.remove_offset:
            frames = frames - frames.mean(-1, keepdims=True)
        if self.preemphasis:
            before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
            frames = frames - self.preemphasis * before
            # The first sample of a frame has none before it.
            frames[:, 0] = before[:, 0] * (1 - self.preemphasis)
        size = self.frame + 1 if self.periodic else self.frame
        window = np.hanning(size)[: self.frame]
        weighted: Array = frames * (np.power(window, 0.85) if self.window == "povey" else window)
        return weighted


class Floor(_Operation):
    """Raise values that are more than ``below`` under the largest one."""

    operation: Literal["floor"] = "floor"
    below: float

    def apply(self, values: Array, rate: int) -> Array:
        raised: Array = np.maximum(values, values.max() - self.below)
        return raised


class Stack(_Operation):
    """Put ``count`` frames next to each other into one; frames that remain at the end are extended with ``value``."""

    operation: Literal["stack"] = "stack"
    count: int = Field(ge=1, le=1 << 10)
    value: float = 0

    def apply(self, values: Array, rate: int) -> Array:
        size = -(-len(values) // self.count) * self.count
        return Fit(size=size, value=self.value).apply(values, rate).reshape(size // self.count, -1)


class Transpose(_Operation):
    """Put the bands before time; the last operation, if there is one."""

    operation: Literal["transpose"] = "transpose"

    def apply(self, values: Array, rate: int) -> Array:
        return values.T


Operation = Annotated[
    Normalize | Standardize | Fit | Spectrogram | Floor | Stack | Transpose, Field(discriminator="operation")
]


def applied(operations: tuple[Operation, ...], samples: Array, rate: int) -> tuple[Array, int]:
    """Return the values of a sound, and how many of its samples or frames are whole: stacking may extend the last.

    Raises:
        InvalidArgument: it is too short for an operation; the text completes "the sound ...".
    """
    values, whole = samples, len(samples)
    for each in operations:
        if isinstance(each, Spectrogram) and len(values) < each.least:
            raise InvalidArgument(f"has {len(values)} samples at {rate} Hz; the model needs {each.least} or more")
        before, values = len(values), each.apply(values, rate)
        whole = before // each.count if isinstance(each, Stack) else len(values)
    return np.ascontiguousarray(values, np.float32), whole


def kept(operations: tuple[Operation, ...], count: int) -> int:
    """Return how many of ``count`` samples the operations use: fitting cuts samples or frames off."""
    hop = 1
    for each in operations:
        if isinstance(each, Spectrogram):
            hop = each.hop
        elif isinstance(each, Fit):
            count = min(count, each.size * hop)
    return count
