"""The text that a decoder writes, piece by piece, for the APIs of all protocols."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingot.errors import InvalidArgument, InvalidField
from ingot.model_store import Generation, Golden
from ingot.protocol.context import CONTEXT
from ingot.runtime.generation.requests import PROMPT, TOKENS, Finished, GenerationRequest, Stream, Token
from ingot.runtime.model import Model
from ingot.server.plane.counters import Counters
from ingot.serving import ServedModel
from ingot.steps.completion.detokenizer import Detokenizer
from ingot.steps.completion.stops import StopTexts
from ingot.steps.completion.texts import CompletionTexts

AT_ONCE = 1 << 11
"""Characters of prompts that the event loop tokenizes itself, in some 0.5 ms."""
OPENAI_TOKENS, TRANSFORMERS_TOKENS = 16, 20
"""New tokens where neither request nor model says: as OpenAI's completions, and as generate() of transformers."""


@dataclass(frozen=True)
class Decoder:
    """A model that writes text."""

    model: Model
    generation: Generation
    texts: CompletionTexts

    def refuse_prompt(self, field: str, *, wanted: bool) -> None:
        """Refuse that an answer begins with its prompt, if an encoder reads that.

        Raises:
            InvalidField: it is wanted.
        """
        if wanted and self.generation.encoder is not None:
            raise InvalidField(field, "is for models that continue their prompts; this one answers them: leave it out")


@dataclass(frozen=True)
class Wanted:
    """A prompt, as tokens, and texts that end the answer."""

    request: GenerationRequest
    stops: Sequence[str] = ()


@dataclass(frozen=True)
class Piece:
    """A piece of an answer; the last one has the ``reason`` why it is the last.

    Attributes:
        text: what is certain of the answer, without half characters.
        tokens: those since the piece before, some of which may have no text yet.
        reason: ``stop`` for a stop token or text, ``length`` where the most tokens are reached; empty before.
        count: tokens of the answer so far.
    """

    text: str
    tokens: Sequence[Token]
    reason: Literal["", "stop", "length"]
    count: int


def decoder_of(model: ServedModel) -> Decoder:
    """Return a model as one that writes text.

    Raises:
        InvalidField: it writes no text.
        Unavailable: it is still loading.
    """
    name = model.name
    if not isinstance(model, Model) or model.generation is None:
        raise InvalidField("model", f"is '{name}', which writes no text; GET /v2/models/{name} describes it")
    _ = model.signature  # of a model that still loads, nothing is known
    if model.texts is None:
        raise InvalidField("model", f"is '{name}', which has no tokenizer; send tokens to /v2/models/{name}/infer")
    return Decoder(model, model.generation, model.texts)


def prompt_ids(decoder: Decoder, text: str, field: str) -> list[int]:
    """Return the tokens of a prompt; those of an empty one are the token with which texts begin.

    Args:
        decoder: the model.
        text: the prompt.
        field: what has it, for messages.

    Raises:
        InvalidField: it is too long, or empty, and the model has no such token.
    """
    try:
        ids = decoder.texts.encode(text)
    except InvalidArgument as error:
        raise InvalidField(field, f"cannot be read: {error}") from error
    if not ids and decoder.generation.bos is None:
        raise InvalidField(field, "is empty, and the model has no token with which texts begin; send a text")
    return ids or [decoder.generation.bos or 0]


async def pieces(decoder: Decoder, wanted: Wanted, counters: Counters) -> AsyncGenerator[Piece]:
    """Yield the pieces of an answer; to close this frees the row at once.

    The answer is reported to the observer of the current request, if it has one; see :func:`note`.

    Args:
        decoder: the model.
        wanted: the prompt.
        counters: count the request.

    Raises:
        IngotError: the request is refused, or fails behind its first pieces.
    """
    with counters.request(), _observed(decoder.model):
        stream, tokens = decoder.model.generate(wanted.request), list[int]()
        async with contextlib.aclosing(stream):
            async for piece in _read(stream, Detokenizer(decoder.texts.tokens), StopTexts(wanted.stops)):
                tokens += [token.id for token in piece.tokens]
                yield piece
        counters.keep(Golden({PROMPT: wanted.request.prompt}, {TOKENS: np.array(tokens, np.int64)}))


def note(answers: int) -> None:
    """Note how many answers of a decoder the current request asks for, if it is observed."""
    context = CONTEXT.get()
    if context is not None and context.observer is not None:
        context.submitted = time.perf_counter()
        context.rows, context.inferences = context.rows + answers, context.inferences + answers


@contextlib.contextmanager
def _observed(model: Model) -> Iterator[None]:
    context = CONTEXT.get()
    if context is None or context.observer is None:
        yield
        return
    context.model, context.version, failed = model.name, model.version, True
    try:
        yield
        failed = False
    finally:
        if context.observer is not None:
            context.observer.answered(context, None, failed=failed)


async def merged(answers: Sequence[AsyncGenerator[Piece]]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield the pieces of several answers as they come, each with the index of its answer.

    Raises:
        IngotError: one of them fails, which ends the others.
    """
    note(len(answers))
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def read(index: int, answer: AsyncGenerator[Piece]) -> None:
        try:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    queue.put_nowait((index, piece))
            queue.put_nowait((index, None))
        except Exception as error:  # noqa: BLE001 - raised again below
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(read(index, answer)) for index, answer in enumerate(answers)]
    left = len(tasks)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(stream: Stream, text: Detokenizer, stops: StopTexts) -> AsyncGenerator[Piece]:
    tokens: list[Token] = []
    count = 0
    async for first in stream:
        ready = ""
        for item in (first, *stream.taken()):
            if isinstance(item, Finished):
                ready += stops.add(text.end()) + stops.end()
                yield Piece(ready, tokens, "stop" if stops.found else item.reason, count)
                return
            tokens.append(item)
            count += 1
            ready += stops.add(text.add(item.id))
            if stops.found:
                await stream.stop()  # a slow client reads this piece later
                yield Piece(ready, tokens, "stop", count)
                return
        if ready:
            yield Piece(ready, tokens, "", count)
            tokens = []
