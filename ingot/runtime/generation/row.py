"""A request that waits for a row of the cache, or has one."""

from __future__ import annotations

import numpy as np

from ingot.runtime.engines.decoder.step import KNOBS, Choice
from ingot.runtime.generation.requests import GenerationRequest
from ingot.runtime.scheduling.entry import Entry, ignore
from ingot.tensors import Array


class Row:
    """A request that waits, or a row of the cache.

    Attributes:
        request: the prompt, and how it is continued.
        prompt: tokens before the answer, INT64[n].
        source: what an encoder reads, of the request; None without an encoder.
        most: most tokens of the answer.
        seed: of its random numbers.
        read: tokens of the prompt in the cache, without the last one.
        answer: the tokens so far.
        over: whether its row is to be freed before the next step.
        waiting: whether it has no row yet.
        entry: its place in the queue, and its client.
    """

    __slots__ = (
        "answer",
        "encoded",
        "entry",
        "knobs",
        "most",
        "over",
        "prompt",
        "read",
        "request",
        "seed",
        "source",
        "waiting",
    )

    def __init__(self, request: GenerationRequest, prompt: Array, source: Array | None, most: int, seed: int):
        self.request = request
        self.prompt, self.source = prompt, source
        self.encoded = source is None
        self.most = most
        self.seed = seed
        self.knobs = tuple(float(getattr(request.sampling, name)) for name in KNOBS)
        self.read = 0
        self.answer: list[int] = []
        self.over = False
        self.waiting = True
        nbytes = prompt.nbytes + (0 if source is None else source.nbytes)
        self.entry = Entry({}, 1, ignore, 0.0, (), priority=request.priority, nbytes=nbytes, client=request.client)

    @property
    def entering(self) -> bool:
        """Whether more than the last token of its prompt is not in the cache."""
        return self.read < self.prompt.size - 1

    @property
    def latest(self) -> int:
        """The last token, which is not in the cache."""
        return self.answer[-1] if self.answer else int(self.prompt[-1])

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.read + len(self.answer)

    @property
    def held(self) -> Array:
        """The tokens in the cache."""
        return np.concatenate([self.prompt, np.array(self.answer, np.int64)])[: self.length]

    @property
    def choice(self) -> Choice:
        drawn = len(self.answer)
        return Choice(self.knobs, self.seed, drawn, self.prompt.size, self.most - drawn)
