"""``masks``: from the classes of a semantic segmentation to a mask of the original picture for each label."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Literal

import numpy as np
from pydantic import Field

from ingot.errors import TooLarge
from ingot.steps.after.classify import fit
from ingot.steps.ragged import columns
from ingot.steps.step import Apply, Files, Step, Values
from ingot.tensors import Array, TensorSpec

# Logits of the pictures of a request, once they have their sizes: some seconds.
MOST_LOGITS = 1 << 31
# Pixels whose classes are chosen at once.
_AT_ONCE = 1 << 16
# Rows and columns of cells in which masks are compared, and bytes of one.
_CELLS = 4
_MOST_BYTES = 1 << 28
_PNG = b"\x89PNG\r\n\x1a\n"
_GREY = 8, 0, 0, 0, 0  # bits, and that a pixel is one byte of grey, without interlacing


class Masks(Step):
    """Resize logits to the original picture, choose the best class of each pixel, and return a mask for each class.

    Answers have k columns, as many as the picture of the request with the most classes has; behind a row's ``count``
    they are padded as :func:`~ingot.steps.ragged.padded` says.

    Attributes:
        logits: float[n, classes, height, width].
        size: height and width of the pictures, int64[n, 2].
        labels: the names of classes, in the order of the logits.
        label: the classes that a picture has, in the order of the logits, BYTES[n, k].
        mask: a PNG of the size of the upright picture for each: 255 where it has the class, 0 elsewhere. BYTES[n, k].
        count: int32[n].
    """

    kind: Literal["masks"] = "masks"
    logits: str = "logits"
    size: str = "original_size"
    labels: tuple[str, ...] = Field(min_length=1, max_length=1_000_000)
    label: str = "label"
    mask: str = "mask"
    count: str = "count"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.size)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.mask, self.count)

    @property
    def quick(self) -> bool:
        return False  # a large picture of few logits

    def check(self, known: Mapping[str, TensorSpec | None]) -> None:
        spec = known[self.logits]
        if spec is not None and len(spec.shape) == 4 and isinstance(classes := spec.shape[1], int):
            fit(self.kind, self.labels, self.logits, classes)

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            logits = values[self.logits].astype(np.float32, copy=False)
            fit(self.kind, self.labels, self.logits, logits.shape[1])
            if (total := int(values[self.size].prod(axis=1).sum()) * len(self.labels)) > MOST_LOGITS:
                raise TooLarge(
                    f"the pictures of the request have {total} pixels times classes, over the limit of {MOST_LOGITS}; "
                    "divide the request, or send smaller pictures"
                )
            rows = [[*self._row(*each)] for each in zip(logits, values[self.size].tolist(), strict=True)]
            parts = {self.label: (itemgetter(0), object), self.mask: (itemgetter(1), object)}
            return columns(rows, parts, self.count)

        return apply

    def _row(self, logits: Array, size: Sequence[int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the name and the mask of each class of a picture."""
        classes = best_classes(logits, size[0], size[1])
        for index in np.flatnonzero(np.bincount(classes.reshape(-1), minlength=len(self.labels))):
            yield self.labels[index].encode(), png(classes == index)

    def comparable(self, answers: Values) -> Values:
        """Return the part of the pixels that each class has in each cell of a grid, float32[n, classes, 4, 4].

        Libraries compress the same pixels to other bytes, and rounding moves the border of a class by a pixel.
        """
        names = {label.encode(): index for index, label in enumerate(self.labels)}
        shares = np.zeros((len(answers[self.mask]), len(names), _CELLS, _CELLS), np.float32)
        for place, file in np.ndenumerate(answers[self.mask]):
            if file and (label := names.get(bytes(answers[self.label].item(place)))) is not None:
                shares[place[0], label] += _shares(file)
        return {self.mask: shares}


def best_classes(logits: Array, height: int, width: int) -> Array:
    """Return the best class of each pixel, [height, width], from logits that are resized to it as PyTorch does.

    This is ``torch.nn.functional.interpolate(..., mode="bilinear")`` of float32[classes, h, w], in bands of rows: all
    resized logits at once would take hundreds of times the picture's memory.
    """
    columns, rows = _neighbours(logits.shape[2], width), _neighbours(logits.shape[1], height)
    step = max(1, _AT_ONCE // width)
    found = np.zeros((height, width), np.int32)
    for start in range(0, height, step):
        first, second, part = (each[start : start + step] for each in rows)
        near = slice(first[0], second[-1] + 1)
        values = _mixed(logits[:, near], columns, 2)
        _choose(values, (first - near.start, second - near.start, part[:, None]), found[start : start + step])
    return found


def _choose(values: Array, rows: tuple[Array, Array, Array], found: Array) -> None:
    """Write the first best class of each pixel of a band to ``found``, one class at a time: a band fits the cache."""
    best = _mixed(values[0], rows, 0)
    for index in range(1, len(values)):
        other = _mixed(values[index], rows, 0)
        np.copyto(found, index, where=other > best)
        np.maximum(best, other, out=best)


def _mixed(values: Array, neighbours: tuple[Array, Array, Array], axis: int) -> Array:
    first, second, part = neighbours
    mixed, other = np.take(values, first, axis), np.take(values, second, axis)
    mixed *= 1 - part
    other *= part
    mixed += other
    return mixed


def _neighbours(before: int, after: int) -> tuple[Array, Array, Array]:
    """Return the two elements that each element of a resized axis lies between, and how near the second is."""
    scale = np.float32(before) / np.float32(after)
    place = np.maximum(scale * (np.arange(after, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    first = np.minimum(place.astype(np.intp), before - 1)
    part = np.clip(place - first.astype(np.float32), 0, 1)
    return first, np.minimum(first + 1, before - 1), part


def png(mask: Array) -> bytes:
    """Return a mask, bool[height, width], as a PNG of one byte for each pixel: 255 where it is true."""
    height, width = mask.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with the number of its filter
    rows[:, 1:] = mask * np.uint8(255)
    head = struct.pack(">2I5B", width, height, *_GREY)
    return _PNG + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _shares(file: bytes) -> Array:
    """Return the part of true pixels in each cell of a mask that :func:`png` made; NaN for another file."""
    start = len(_PNG) + 8 + 13 + 4 + 8  # of the content of IDAT, behind IHDR
    shares = np.full((_CELLS, _CELLS), np.nan, np.float32)
    try:
        width, height = struct.unpack_from(">2I", file, 16)
        pixels = zlib.decompressobj().decompress(file[start:-16], min(height * (width + 1), _MOST_BYTES))
        rows = np.frombuffer(pixels, np.uint8).reshape(height, width + 1)[:, 1:]
    except (struct.error, zlib.error, ValueError):
        return shares
    for place, _ in np.ndenumerate(shares):
        bands = (
            slice(size * at // _CELLS, size * (at + 1) // _CELLS) for at, size in zip(place, rows.shape, strict=True)
        )
        cell = rows[*bands]
        shares[place] = cell.mean() / 255 if cell.size else 0
    return shares
