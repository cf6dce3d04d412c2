"""Sounds as bytes to samples, by libsndfile and libsoxr: limits are checked before anything is decoded."""

from __future__ import annotations

import importlib
import re
from io import BytesIO
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ingot import foreign
from ingot.errors import InvalidArgument, TooLarge, missing_package
from ingot.steps.item import binary
from ingot.tensors import Array

FORMATS = "WAV, FLAC or OGG (Vorbis or Opus)"
# How a file of each format begins, and its base64: libsndfile would try its other decoders on other files.
_STARTS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS")
_BASE64 = (b"UklGR", b"UklGW", b"UkY2N", b"ZkxhQ", b"T2dnU")
# Hz; beyond are damaged headers, not recordings.
_RATES = 1_000, 768_000
# Frames of a file that does not state how many it has.
_UNKNOWN = 1 << 62
# libsndfile's remarks on files that end early. The size of all ones is that of a WAV which was written to a pipe.
_SHORT = re.compile(
    r"^\s*data : (?!4294967295)\d+ \(should be|does not match value from 'ds64'"
    "|end-of-stream bit|Junk after the last page",
    re.MULTILINE,
)

Mix = Literal["mean", "first"]
Quality = Literal["QQ", "LQ", "MQ", "HQ", "VHQ"]


class Limits(BaseModel):
    """The most bytes, seconds, samples of all channels, and channels of a sound that is sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nbytes: int = Field(50 << 20, ge=1, le=1 << 30)
    seconds: float = Field(60, gt=0, le=86_400)
    samples: int = Field(25_000_000, ge=1, le=1 << 31)
    channels: int = Field(8, ge=1, le=256)


def prepare() -> None:
    """Import what decoding needs.

    Raises:
        Unsupported: soundfile or soxr is not installed.
    """
    for name in ("soundfile", "soxr"):
        try:
            importlib.import_module(name)
        except (ModuleNotFoundError, OSError) as error:  # OSError: soundfile has no libsndfile for this machine
            raise missing_package(name, "decoding sounds", "audio") from error


def decode(content: bytes, limits: Limits, mix: Mix) -> tuple[Array, int]:
    """Return the samples of a sound, float32[n] from -1 to 1, and their rate in Hz.

    The file may be in base64. Integers are divided by their largest magnitude, as libsndfile does it, and several
    channels become one. Call :func:`prepare` once before. The text of errors completes "the sound ...".

    Raises:
        InvalidArgument: it is not a sound in one of :data:`FORMATS`, is damaged or empty, or has values that are not
            finite.
        TooLarge: it has more bytes, seconds, samples or channels than the limits.
    """
    if len(content) > limits.nbytes:
        raise TooLarge(f"has {len(content)} bytes; the most are {limits.nbytes}: send a shorter one")
    content = binary(content, _BASE64)
    if not content.startswith(_STARTS):
        raise InvalidArgument(f"is not a {FORMATS} file; its first bytes are {content[:8]!r}")
    if content[12:16] == b"fmt " and not any(content[24:28]):
        raise InvalidArgument("has a rate of 0 Hz: write the file again with its rate")
    with foreign.reported_as(InvalidArgument, _damaged, keep=(MemoryError, InvalidArgument, TooLarge)):
        import soundfile

        with soundfile.SoundFile(BytesIO(content)) as file:
            _check(file, limits)
            samples: Array = file.read(file.frames, dtype="float32", always_2d=True)  # [frames, channels]
            rate = int(file.samplerate)
    if not np.isfinite(samples).all():
        raise InvalidArgument("has samples that are NaN or infinite: write the file again without them")
    return samples[:, 0].copy() if mix == "first" or samples.shape[1] == 1 else samples.mean(axis=1), rate


def _damaged(error: Exception) -> str:
    # The text of the exception itself has the address of an object.
    return f"is damaged or truncated: {getattr(error, 'error_string', foreign.typed(error))}"


def _check(file: Any, limits: Limits) -> None:
    frames, rate, channels = file.frames, file.samplerate, file.channels
    if not _RATES[0] <= rate <= _RATES[1]:
        raise InvalidArgument(f"has a rate of {rate} Hz; those of sounds are from {_RATES[0]} to {_RATES[1]} Hz")
    if channels > limits.channels:
        raise TooLarge(f"has {channels} channels; the most are {limits.channels}: send fewer")
    if frames >= _UNKNOWN:
        raise InvalidArgument("does not state its length, as a FLAC that was written to a pipe: write it to a file")
    if frames > limits.seconds * rate:
        raise TooLarge(f"has {frames / rate:.1f} seconds; the most are {limits.seconds:g}: send a shorter part")
    if frames * channels > limits.samples:
        raise TooLarge(f"has {frames * channels} samples in all channels; the most are {limits.samples}: send fewer")
    if _SHORT.search(file.extra_info):
        raise InvalidArgument(f"is a truncated {file.format}: its end is missing")
    if not frames:
        raise InvalidArgument("has no samples: send a sound")


def resample(samples: Array, rate: int, wanted: int, quality: Quality) -> Array:
    """Return samples of another rate, float32[n]; the same ones if the rate is the wanted one."""
    if rate == wanted:
        return samples
    import soxr

    found: Array = soxr.resample(samples, rate, wanted, quality=quality)
    return found
