"""Sounds on which the steps of an export are proved: odd lengths, rates, channels, levels and formats, as files."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import numpy as np

from ingot.tensors import Array

_SECONDS = (1.0, 0.2501, 0.05, 1.7, 0.4, 0.999, 2.3, 0.1, 0.73)
_RATES = (16_000, 8_000, 44_100, 16_000, 22_050, 48_000, 11_025, 16_000)
_FORMATS = (
    ("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("WAV", "PCM_U8"), ("OGG", "VORBIS"), ("WAV", "PCM_24"), ("WAV", "FLOAT"),
    ("FLAC", "PCM_24"), ("WAV", "PCM_32"), ("OGG", "OPUS"), ("WAV", "ULAW"), ("WAVEX", "PCM_16"), ("WAV", "DOUBLE"),
)  # fmt: skip
# Those of Opus.
_OPUS_RATES = {8_000, 12_000, 16_000, 24_000, 48_000}
_KINDS = 6


def synthesized(
    count: int, seed: int = 0, *, least: float = 0, seconds: float | None = None, rate: int | None = None
) -> Iterator[bytes]:
    """Yield the files of ``count`` sounds, the same for each seed.

    Args:
        count: of files.
        seed: of their contents.
        least: seconds of each.
        seconds: of all, instead of several lengths; then the formats are those that keep the number of samples.
        rate: of all in Hz, instead of several rates.
    """
    random = np.random.default_rng(seed)
    for index in range(count):
        format_, subtype = ("WAV", "PCM_16") if seconds else _FORMATS[index % len(_FORMATS)]
        own = rate or _RATES[(index + index // len(_RATES)) % len(_RATES)]
        if subtype == "OPUS" and own not in _OPUS_RATES:
            own = 48_000
        size = round((seconds or max(_SECONDS[index % len(_SECONDS)], least)) * own)
        channels = [_wave(random, (index + each) % _KINDS, size, own) for each in range(1 + index % 2)]
        yield _file(np.stack(channels, axis=1), own, format_, subtype)


def _wave(random: np.random.Generator, kind: int, size: int, rate: int) -> Array:
    """Return a sound of one channel: a tone, noise, silence, a clipped one, steps between tones, or a faint one."""
    time = np.arange(size) / rate
    pitch = random.uniform(80, 3000)
    tone = np.sin(2 * np.pi * pitch * time) * random.uniform(0.2, 0.9)
    noise = random.normal(0, 0.1, size)
    steps = np.sin(2 * np.pi * pitch * (1 + np.floor(time * 8) % 4) * time)
    sounds = (tone + 0.1 * noise, noise, np.zeros(size), 4 * tone + noise, 0.5 * steps + 0.05 * noise, 1e-4 * noise)
    return np.clip(sounds[kind], -1, 1)


def _file(samples: Array, rate: int, format_: str, subtype: str) -> bytes:
    import soundfile

    file = BytesIO()
    soundfile.write(file, samples, rate, format=format_, subtype=subtype)
    return file.getvalue()
