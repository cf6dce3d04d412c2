"""What identifies requests: the form of their inputs, and the sequence that they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from ingot.tensors import Array

InputKey = tuple[Any, ...]
"""The names, types and shapes of a request's inputs; requests with equal keys match a signature alike."""


def key_of(inputs: Mapping[str, Array]) -> InputKey:
    """Return the names, types and shapes of inputs."""
    return tuple((name, array.dtype, array.shape) for name, array in inputs.items())


class Step(NamedTuple):
    """What a request says about its sequence.

    Attributes:
        sequence: 16 bytes that identify it.
        start: whether it is the first of the sequence; a sequence of this name that is open is dropped.
        end: whether it is the last.
        name: what the client calls it, for models that have it as an input.
    """

    sequence: bytes
    start: bool
    end: bool
    name: int | str = ""

    @classmethod
    def of(cls, name: int | str, start: bool, end: bool) -> Step:
        """Return a step of the sequence that clients call ``name``; the number 1 and the text "1" are different."""
        return cls(_digest(f"{type(name).__name__}:{name}".encode()), start, end, name)

    def owned_by(self, client: Hashable) -> Step:
        """Return the step of the client's own sequence of this name.

        Clients with a key or certificate cannot reach each other's sequences. Others are known by their connection
        only, and a sequence may use several.
        """
        if not isinstance(client, str):
            return self
        return self._replace(sequence=_digest(self.sequence + client.encode()))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
