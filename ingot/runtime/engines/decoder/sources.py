"""What the decoder of an encoder-decoder attends to: the encoder's keys and values for each row of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.engines.decoder.step import Chunk
from ingot.tensors import Array

Bind = Callable[[Any, str, Array], None]


class Sources:
    """The keys and values of all rows, and the encoder that makes them.

    Args:
        session: the encoder's graph in ONNX Runtime.
        options: their sizes.
    """

    def __init__(self, session: Any, options: DecoderOptions):
        self.session = session
        shape = options["slots"], options["kv_heads"], options["source"], options["head_size"]
        names = [f"cross.{layer}.{part}" for layer in range(options["layers"]) for part in ("key", "value")]
        self._values = {name: np.zeros(shape, np.float32) for name in names}
        self._lengths = np.zeros(options["slots"], np.int32)  # minus one
        self._total = np.zeros(1, np.int32)

    def encode(self, row: int, tokens: Array, run: Callable[[Any, Mapping[str, Array]], list[Array]]) -> None:
        """Read a source into a row; ``run`` calls the session."""
        found = run(self.session, {"input_ids": tokens[None]})
        for buffer, made in zip(self._values.values(), found, strict=True):
            buffer[row, :, : made.shape[2]] = made[0]
        self._lengths[row] = found[0].shape[2] - 1

    def parts(self, chunk: Chunk) -> list[Chunk]:
        """Divide a chunk: GroupQueryAttention refuses a call with more tokens than their source has."""
        size = int(self._lengths[chunk.row]) + 1
        cuts = range(0, chunk.tokens.size, size)
        return [Chunk(chunk.row, chunk.start + at, chunk.tokens[at : at + size]) for at in cuts]

    def move(self, source: int, target: int) -> None:
        """Copy a row."""
        length = self._lengths[target] = self._lengths[source]
        for buffer in self._values.values():
            buffer[target, :, : length + 1] = buffer[source, :, : length + 1]

    def bind(self, io: Any, first: int, rows: int, bind: Bind) -> None:
        """Bind rows as inputs of the decoder's graph."""
        for name, buffer in self._values.items():
            bind(io, name, buffer[first : first + rows])
        bind(io, "sources", self._lengths[first : first + rows])
        bind(io, "source_total", self._total)

    def prepare(self, first: int, rows: int) -> None:
        """Prepare a call for rows that are bound."""
        self._total[0] = self._lengths[first : first + rows].max() + 1
