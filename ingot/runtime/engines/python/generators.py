"""Answers in parts: generators of a model's code, one for each stream, which calls advance by one answer."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from ingot import foreign
from ingot.errors import EngineLost, ModelFailed
from ingot.tensors import Array

log = logging.getLogger(__name__)

# Streams that are over, whose first call may still arrive: it was being sent when the client left.
_MOST_OVER = 256

_Gather = Callable[[Sequence[Any]], Sequence[Any]]


class Ended(Exception):
    """Stands for the answer of a generator that has no more."""


class Generators:
    """The open generators.

    Args:
        begin: calls the model's code with a sample; returns its generator, or an exception.
        gather: returns the results, or the exceptions, of values of which some are awaitable.
    """

    def __init__(self, begin: Callable[[Any], Any], gather: _Gather):
        self._begin = begin
        self._gather = gather
        self._open: dict[int, _Generator] = {}
        self._over: deque[int] = deque(maxlen=_MOST_OVER)

    def __len__(self) -> int:
        """Return how many may have more answers."""
        return sum(not isinstance(each.answer, Exception) for each in self._open.values())

    def first(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Return the first answer of each sample: what a model is tested and timed with."""
        opened = [self._opened(sample) for sample in samples]
        answers = self._advanced([(each, 0) for each in opened])
        for each in opened:
            self._close(each)
        return [ModelFailed("it yields no answer") if isinstance(each, Ended) else each for each in answers]

    def advance(self, handles: Array, samples: Sequence[Any]) -> Sequence[Any]:
        """Return the next answer of each stream; :class:`Ended` behind the last, or an exception.

        The same answer can be asked for again: a batch that fails runs again in halves.

        Args:
            handles: the number of each stream, and the index of the answer, int64[batch, 2].
            samples: the arguments of the model's code, which begin the streams; or exceptions.
        """
        wanted = []
        for (number, index), sample in zip(handles.tolist(), samples, strict=True):
            if index == 0 and number not in self._open and number not in self._over:
                self._open[number] = self._opened(sample)
            wanted.append((self._open.get(number), index))
        return self._advanced(wanted)

    def end(self, numbers: Iterable[int]) -> None:
        """Close the generators of streams that are over; their ``finally`` blocks run."""
        for number in numbers:
            self._over.append(number)
            if (found := self._open.pop(number, None)) is not None:
                self._close(found)

    def _opened(self, sample: Any) -> _Generator:
        return _Generator(sample if isinstance(sample, Exception) else self._begin(sample))

    def _advanced(self, wanted: Sequence[tuple[_Generator | None, int]]) -> Sequence[Any]:
        answers = self._gather([_lost() if each is None else each.step(index) for each, index in wanted])
        for (each, index), answer in zip(wanted, answers, strict=True):
            if each is not None:
                each.index, each.answer = index, answer
        return answers

    def _close(self, generator: _Generator) -> None:
        for answer in self._gather([foreign.outcome(generator.close)]):
            if isinstance(answer, Exception):
                log.warning("a generator of the model failed while it was closed: %s", foreign.typed(answer))


class _Generator:
    """A generator, and its last answer with its index."""

    def __init__(self, found: Any):
        self.index, self.answer = -1, found
        self._found = found

    def step(self, index: int) -> Any:
        """Return the answer of an index, an awaitable of it, or an exception."""
        if isinstance(self.answer, Exception) or index == self.index:
            return self.answer
        if index != self.index + 1:
            return _lost()
        if isinstance(self._found, AsyncIterator):
            return _next(self._found)
        if isinstance(found := self._found, Iterator):
            return foreign.outcome(lambda: next(found, Ended()))
        return ModelFailed(f"it returned a {type(self._found).__name__}, not a generator of answers")

    def close(self) -> Any:
        close = getattr(self._found, "aclose", None) or getattr(self._found, "close", None)
        return None if close is None or inspect.isawaitable(self._found) else close()


async def _next(generator: AsyncIterator[Any]) -> Any:
    """Return the next answer. Python 3.11's anext with a default fails at the end of a generator that never waits."""
    try:
        return await anext(generator)
    except StopAsyncIteration:
        return Ended()


def _lost() -> EngineLost:
    return EngineLost("the rest of the stream is lost: the engine process that made it has ended")
