"""Requests for tokens, and the stream of the tokens of each."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ingot.errors import IngotError, InvalidArgument, quoted
from ingot.model_store import Generation
from ingot.runtime.dispatch.pending import Submitted
from ingot.runtime.scheduling.entry import Outcome
from ingot.tensors import Array, DType, Signature, TensorSpec

PROMPT = "prompt"
"""The input of a request for tokens, INT64[length]; goldens of a decoder have it, too."""
TOKENS = "tokens"
"""The output of a request that is not streamed, INT64[new]: the tokens without the prompt's."""
SIGNATURE = Signature((TensorSpec(PROMPT, DType.INT64, ("length",)),), (TensorSpec(TOKENS, DType.INT64, ("new",)),))
"""The inputs and outputs of a decoder as clients of tensors see them."""
MOST_LOGPROBS = 20
"""Most tokens per step whose probabilities a request may ask for besides the chosen one's."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each token is chosen; the defaults choose the most likely one.

    The order is that of ``transformers``: penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: logits are divided by it; 0 chooses the most likely token, and the four below have no effect.
        top_k: the choice is among so many of the most likely tokens; 0 is all.
        top_p: the choice is among the fewest tokens whose probabilities sum to this.
        min_p: tokens are left out whose probability is below this share of the most likely one's.
        seed: equal seeds give equal tokens, whatever else the engine runs; None is random.
        repetition_penalty: divides positive logits of tokens that are in the prompt or were chosen, and multiplies
            negative ones (Keskar et al. 2019, https://arxiv.org/abs/1909.05858).
        presence_penalty: is subtracted from the logits of tokens that were chosen before.
        frequency_penalty: the same, as often as the token was chosen.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidArgument: one is outside of its range.
        """
        for each in fields(self):
            value, (least, most) = getattr(self, each.name), _RANGES.get(each.name, (-math.inf, math.inf))
            if each.name != "seed" and not (least <= value <= most and math.isfinite(value)):
                bounds = f"from {least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
                raise InvalidArgument(f"'{each.name}' is {quoted(value)}; it must be {bounds}")


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, math.inf),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}
GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt, and how it is to be continued.

    Attributes:
        prompt: INT64[length], at least one token; of an encoder-decoder, what its encoder reads.
        max_tokens: most tokens of the answer; None is as many as fit behind the prompt.
        sampling: how tokens are chosen.
        stop_ids: tokens that end the answer, and are not part of it.
        logprobs: None for none; 0 for that of each token; more for as many of the most likely tokens too.
        client: who sent it; clients share the engine.
        timeout: seconds until the rest of the answer is useless; None is unlimited.
        priority: requests of higher priority begin first.
    """

    prompt: Array
    max_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    client: Hashable = None
    timeout: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        """Check what does not depend on the model.

        Raises:
            InvalidArgument: the prompt is empty, or a number is outside of its range.
        """
        if self.prompt.ndim != 1 or not self.prompt.size:
            raise InvalidArgument("the prompt has no tokens; a request for tokens needs at least one")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidArgument(f"'max_tokens' is {quoted(self.max_tokens)}; it must be at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InvalidArgument(f"'logprobs' is {quoted(self.logprobs)}; it must be from 0 to {MOST_LOGPROBS}")


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
        id: the token.
        logprob: the natural logarithm of its probability by the model's own logits, before penalties and temperature;
            NaN if the request did not ask for it.
        top: the same of the most likely tokens, most likely first, if the request asked for them.
    """

    id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end of an answer: ``stop`` for a stop token, ``length`` where the most tokens are reached."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class TokenInputs(dict[str, Array]):
    """The inputs of a request for tokens, which carry its stream through all components that pass requests on."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream):
        super().__init__({PROMPT: stream.request.prompt})
        self.stream = stream

    def again(self, priority: int) -> TokenInputs | None:
        """Return the inputs of the same request with another stream; None if another answer may be another one."""
        asked = self.stream.request
        if asked.sampling.temperature:
            return None
        return TokenInputs(Stream(replace(asked, prompt=asked.prompt.copy(), priority=priority)))


@dataclass(eq=False)
class Stream:
    """The answer to a request: an iterator of each :class:`Token`, then :class:`Finished`; it belongs to an event loop.

    An error of the request is raised after the tokens before it. Tokens that are not read wait here, at most those of
    the answer, so that a slow reader delays no other.

    Attributes:
        request: the request.
        pending: what the model has accepted.
        count: tokens so far.
        enough: whether its reader has dropped the rest, as the answer is complete without it.
    """

    request: GenerationRequest
    pending: Submitted | None = None
    count: int = 0
    enough: bool = False
    _ready: deque[Token | Finished] = field(default_factory=deque)
    _ended: bool = False
    _error: IngotError | None = None
    _waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Token | Finished:
        while not self._ready:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._ready.popleft()

    def taken(self) -> list[Token | Finished]:
        """Return the items that are ready after one, without waiting: they may share a message to a slow client."""
        ready, self._ready = [*self._ready], deque()
        return ready

    async def aclose(self) -> None:
        """Drop the request, if it is not answered: its row is free for others in the next step."""
        self._ended = True
        if self.pending is not None:
            self.pending.cancel()

    async def stop(self) -> None:
        """Drop the rest of the answer, which is complete without it: the request counts as answered."""
        self.enough = True
        await self.aclose()

    def put(self, token: Token) -> None:
        """Add a token."""
        self.count += 1
        self._ready.append(token)
        self._wake()

    def finish(self, reason: Literal["stop", "length"]) -> None:
        """End the answer."""
        self._ready.append(Finished(reason, self.request.prompt.size, self.count))
        self._ended = True
        self._wake()

    def settle(self, outcome: Outcome) -> None:
        """End the answer with an error; it is the reply of the model."""
        if isinstance(outcome, IngotError) and not self._ended:
            self._ended, self._error = True, outcome
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def own_values(generation: Generation, *, samples: bool) -> dict[str, Any]:
    """Return the arguments of :class:`Sampling` by which ``generate()`` chooses the model's tokens.

    Args:
        generation: the archive's declaration.
        samples: whether tokens are drawn; otherwise the most likely one is taken.
    """
    own = generation.defaults
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if samples else ("repetition_penalty",)
    return {name: getattr(own, name) for name in names}
