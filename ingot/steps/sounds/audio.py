"""``audio``: from the bytes of sounds to the values that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from ingot.errors import InvalidArgument, TooLarge
from ingot.steps.item import Item, ItemStep
from ingot.steps.sounds.decoding import Limits, Mix, Quality, decode, prepare, resample
from ingot.steps.sounds.operations import Operation, Transpose, applied, kept
from ingot.steps.step import Values
from ingot.tensors import Array

# Bytes that are needed for each sample of a file, and for each of the model's rate; and MiB of the process itself.
_FILE_BYTES, _MODEL_BYTES = 12, 250
_PROCESS_MB = 256


class Audio(ItemStep):
    """Decode sounds, mix their channels, resample them, and apply operations in order.

    Attributes:
        audio: the input with the files, BYTES[n]: WAV, FLAC, or OGG with Vorbis or Opus.
        values: samples, float32[n, samples], or what operations make of them, such as float32[n, frames, bands].
        attention_mask: 1 for each sample or frame that is not padding, int32[n, samples or frames]. With this name,
            sounds of several lengths are extended at the end; without it they are refused, as padding would change
            answers.
        padding: the value with which they are extended.
        sizes: the samples or frames of each sound before that, int32[n]; a stacked frame that is not whole counts.
        seconds: the length of each sound, float32[n].
        cut: the seconds at the end that operations cut off, float32[n].
        rate: of the samples that operations get, in Hz. A file with another rate is resampled.
        quality: of soxr's resampling.
        mix: how several channels become one: their mean, or the first.
        least: samples at ``rate`` that the model needs.
        operations: in their order.
        limits: of what is decoded.
        reference: whose results the operations have, such as ``transformers 5.24.0 Wav2Vec2FeatureExtractor``.
    """

    kind: Literal["audio"] = "audio"
    media_type: ClassVar[str] = "audio/*"
    audio: str = "audio"
    values: str = "input_values"
    attention_mask: str = ""
    padding: float = 0
    sizes: str = ""
    seconds: str = "seconds"
    cut: str = "cut_seconds"
    rate: int = Field(ge=1_000, le=768_000)
    quality: Quality = "HQ"
    mix: Mix = "mean"
    least: int = Field(1, ge=1, le=1 << 24)
    operations: tuple[Operation, ...] = Field((), max_length=32)
    limits: Limits = Limits()
    reference: str = ""

    @model_validator(mode="after")
    def _time_comes_first(self) -> Audio:
        turned = [isinstance(each, Transpose) for each in self.operations]
        if any(turned[:-1]) or (any(turned) and self.attention_mask):
            raise ValueError("transpose must be the last operation, without a mask: others need time first")
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.audio,)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(name for name in (self.values, self.attention_mask, self.sizes, self.seconds, self.cut) if name)

    @property
    def cuts(self) -> Mapping[str, str]:
        return {"seconds": self.cut}

    @property
    def memory_mb(self) -> int:
        samples = self.limits.samples * _FILE_BYTES + round(self.limits.seconds * self.rate) * _MODEL_BYTES
        return _PROCESS_MB + ((2 * self.limits.nbytes + samples) >> 20)

    def item(self) -> Item:
        prepare()
        # A confined process cannot import what the operations import when they run, such as numpy.fft.
        applied(self.operations, np.zeros(max(self.least, self.rate // 10), np.float32), self.rate)
        return self._item

    def _item(self, content: bytes) -> Values:
        samples = self.samples(content)
        if len(samples) < self.least:
            raise InvalidArgument(
                f"has {len(samples)} samples at {self.rate} Hz; the model needs {self.least} or more: send a longer one"
            )
        lost = len(samples) - kept(self.operations, len(samples))
        values, whole = applied(self.operations, samples, self.rate)
        counts = {self.attention_mask: np.array(whole)} if self.attention_mask else {}
        counts |= {self.sizes: np.array(len(values), np.int32)} if self.sizes else {}
        return {
            self.values: values,
            self.seconds: np.array(len(samples) / self.rate, np.float32),
            self.cut: np.array(lost / self.rate, np.float32),
            **counts,
        }

    def samples(self, content: bytes) -> Array:
        """Return the samples of a file at the model's rate, float32[n]; call :meth:`item` once before.

        Raises:
            InvalidArgument: as for :func:`ingot.steps.sounds.decoding.decode`.
        """
        samples, rate = decode(content, self.limits, self.mix)
        return resample(samples, rate, self.rate, self.quality)

    def joined(self, found: Sequence[Values]) -> Values:
        if self.attention_mask:
            names = [name for name in (self.seconds, self.cut, self.sizes) if name]
            lengths = [{name: each[name] for name in names} for each in found]
            values, counts = zip(*((each[self.values], int(each[self.attention_mask])) for each in found), strict=True)
            return {**super().joined(lengths), **self._extended(values, counts)}
        if len({each[self.values].shape for each in found}) > 1:
            seconds = sorted(float(each[self.seconds]) for each in found)
            raise InvalidArgument(
                f"the sounds of input '{self.audio}' have from {seconds[0]:.3f} to {seconds[-1]:.3f} seconds; the "
                "model has no mask of their lengths, so that padding would change its answers: send one in each request"
            )
        return super().joined(found)

    def _extended(self, rows: Sequence[Array], counts: Sequence[int]) -> Values:
        """Return sounds of one length, and a mask with ones for the count of each."""
        longest = max(map(len, rows))
        size = len(rows) * longest * int(np.prod(rows[0].shape[1:]))
        if size > self.limits.samples:
            raise TooLarge(
                f"the sounds of input '{self.audio}' have {size} values once they have one length; the most are "
                f"{self.limits.samples}: divide the request"
            )
        values = np.full((len(rows), longest, *rows[0].shape[1:]), self.padding, np.float32)
        mask = np.zeros((len(rows), longest), np.int32)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            values[index, : len(row)], mask[index, :count] = row, 1
        return {self.values: values, self.attention_mask: mask}
