"""``bytes``: from files of any kind to the bytes at their ends, and a name for those that are too short for a model."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from ingot.steps.item import Item, ItemStep
from ingot.steps.step import Values
from ingot.tensors import Array


class Bytes(ItemStep):
    """Take the first and the last bytes of each file, without white space at its ends, as magika does.

    Files are raw: base64 is a text like any other.

    Attributes:
        file: the input with the files, BYTES[n].
        values: the first and then the last bytes, int32[n, first + last].
        decided: the name of a file that has fewer than ``least`` bytes behind the white space at its start; empty for
            others. BYTES[n].
        first: bytes from the start.
        last: bytes from the end.
        block: bytes at each end of the file in which these are looked for.
        padding: the value behind the first bytes, and before the last ones, of a short file.
        least: bytes that a model needs.
        empty: the name of a file without bytes.
        text: the name of a short file whose block is valid UTF-8.
        binary: the name of others.
    """

    kind: Literal["bytes"] = "bytes"
    confined: ClassVar[bool] = False
    accepts_empty: ClassVar[bool] = True
    file: str = "file"
    values: str = "bytes"
    decided: str = "decided"
    first: int = Field(1024, ge=0, le=1 << 24)
    last: int = Field(1024, ge=0, le=1 << 24)
    block: int = Field(4096, ge=1, le=1 << 24)
    padding: int = 256
    least: int = Field(8, ge=0)
    empty: str = "empty"
    text: str = "txt"
    binary: str = "unknown"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.file,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.values, self.decided)

    def item(self) -> Item:
        return self._item

    def _item(self, content: bytes) -> Values:
        start, end = content[: self.block].lstrip(), content[-self.block :].rstrip()
        values = np.full(self.first + self.last, self.padding, np.int32)
        first, last = start[: self.first], end[max(0, len(end) - self.last) :]
        values[: len(first)] = np.frombuffer(first, np.uint8)
        values[len(values) - len(last) :] = np.frombuffer(last, np.uint8)
        decided = b"" if len(start) >= self.least else self._named(content).encode()
        return {self.values: values, self.decided: _element(decided)}

    def _named(self, content: bytes) -> str:
        if not content:
            return self.empty
        try:
            content[: self.block].decode()
        except UnicodeDecodeError:
            return self.binary
        return self.text


def _element(value: bytes) -> Array:
    found = np.empty((), object)
    found[()] = value
    return found
