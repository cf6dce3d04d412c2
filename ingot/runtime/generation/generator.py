"""Accepts requests for tokens, and runs the steps of a decoder, one after the other, as its dispatcher's requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ingot.errors import IngotError, Unavailable
from ingot.faults import attempt, public_error
from ingot.model_store import Generation
from ingot.runtime.dispatch.pending import Accepts, Expiry, Submitted
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.engines.decoder.step import CALL, Chosen, Step, grouped
from ingot.runtime.generation.policy import MOST_READ, Event, Policy
from ingot.runtime.generation.requests import (
    PROMPT,
    SIGNATURE,
    TOKENS,
    GenerationRequest,
    Sampling,
    Stream,
    TokenInputs,
    own_values,
)
from ingot.runtime.generation.row import Row
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Outcome, Request, ignore
from ingot.runtime.settings.settings import Settings
from ingot.tensors import check_inputs

# Fewest tokens of prompts that a step reads: fewer cost about as much.
_LEAST_READ = 16
# The weight of the latest step in the learned speed of reading.
_LATEST = 0.3


class Generator:
    """Accepts the requests of one decoder in front of its dispatcher; all of it belongs to the event loop.

    Args:
        name: the model's.
        version: the model's.
        generation: of the archive: defaults of sampling and stop tokens, for requests of tensors.
        options: the cache.
        settings: limits of the queue, and for how many seconds a step may read prompts while others are answered.
        steps: runs steps; it is this object's alone.
        statistics: counts of the model's requests.
        metrics: where tokens and their times are observed.

    Attributes:
        nbytes: of the cache, of all slots.
    """

    def __init__(
        self,
        name: str,
        version: str,
        generation: Generation,
        options: DecoderOptions,
        settings: Settings,
        steps: Accepts,
        *,
        statistics: Statistics,
        metrics: Metrics,
    ):
        self.nbytes = options["nbytes"]
        self._policy = Policy(options, settings.limits)
        self._steps = steps
        self._generation = generation
        self._delay = settings.prompt_delay
        self._statistics = statistics
        self._failure = f"a step of model '{name}' failed"
        self._expiry = Expiry(name)
        self._answers: dict[Row, _Answer] = {}
        self._running = False
        self._step_due = False
        self._speed = 0.0  # tokens of prompts per second
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet = asyncio.Event()
        self._read, self._made, self._reused = (
            metrics.tokens.labels(name, version, kind) for kind in ("prompt", "answer", "reused")
        )
        self._reading, self._extending, self._choosing = (
            metrics.decoding_seconds.labels(name, version, stage) for stage in ("read", "extend", "choose")
        )
        self._first, self._between = (
            each.labels(name, version) for each in (metrics.first_token, metrics.between_tokens)
        )

    @property
    def in_flight(self) -> int:
        """Number of requests that are accepted and not answered."""
        return len(self._answers)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return self._policy.waiting

    @property
    def queued_bytes(self) -> int:
        """Memory of the prompts that wait."""
        return self._policy.nbytes

    @property
    def slots(self) -> int:
        """Number of slots in use."""
        return len(self._policy.rows)

    def submit(self, request: Request) -> Submitted:
        """Accept a request: one for a stream, or one for all tokens at once, chosen as the archive says.

        Raises:
            InvalidArgument: the prompt is not valid, or does not fit a slot with the answer.
            Unavailable: too many requests wait, or another model has answered a part of it already.
        """
        loop = self._loop = asyncio.get_running_loop()
        if isinstance(request.inputs, TokenInputs):
            stream = request.inputs.stream
        else:
            check_inputs(SIGNATURE, request.inputs)
            stream = Stream(defaulted(self._generation, request))
        if stream.count:
            raise Unavailable("the model that answered the request has failed after its first tokens; send it again")
        try:
            row = self._policy.offer(stream.request, secrets.randbits(64))
        except IngotError:
            self._statistics.failed.count += 1
            raise
        answer = self._answers[row] = _Answer(self, row, stream, request)
        if request.timeout is not None:
            self._expiry.add(loop, answer, request.timeout)
        self._begin_step_soon()
        return answer

    def _begin_step_soon(self) -> None:
        if not self._step_due and self._loop is not None:
            self._step_due = True
            self._loop.call_soon(self._begin_step)

    def _begin_step(self) -> None:
        """Begin the next step, unless one runs."""
        self._step_due = False
        if self._running:
            return
        if (step := self._policy.plan()) is None:
            return
        self._running = True
        stepped = functools.partial(self._stepped, step)
        try:
            self._steps.submit(Request(step.arrays, stepped))
        except Exception as error:  # noqa: BLE001 - the boundary of a step: its requests get the error
            asyncio.get_running_loop().call_soon(stepped, public_error(error, self._failure))

    def _stepped(self, step: Step, outcome: Outcome) -> None:
        """Pass on the tokens of a step, or its failure, and begin the next."""
        self._running = False
        if isinstance(outcome, IngotError):
            for row in self._policy.fail():
                self._answers[row].fail(outcome)
        else:
            chosen, now = Chosen(**outcome), time.perf_counter()
            for event in self._policy.finish(chosen):
                self._answers[event.row].take(event, now)
            self._count(step, *chosen.seconds.tolist())
        self._begin_step()

    def _count(self, step: Step, reading: float, extending: float, choosing: float) -> None:
        """Observe the stages of a step."""
        policy = self._policy
        self._read.inc(policy.read)
        self._reused.inc(policy.reused)
        policy.read = policy.reused = 0
        sources = step.sources or ()
        if step.chunks or sources:
            self._reading.observe(reading)
            sizes = [text.tokens.size for texts in (step.chunks, sources) for text in texts]
            self._learn(sum(sizes), len(grouped(step.chunks)) + len(sources), reading)
        if step.tokens.size:
            self._extending.observe(extending)
        if step.choices:
            self._choosing.observe(choosing)

    def _learn(self, read: int, calls: int, seconds: float) -> None:
        """Adapt how much of prompts a step reads to the speed of reading, in which a call counts as some tokens."""
        if read < _LEAST_READ or seconds <= 0:
            return
        speed = (read + calls * CALL) / seconds
        self._speed = speed if not self._speed else self._speed + _LATEST * (speed - self._speed)
        self._policy.share = min(max(int(self._speed * self._delay) - CALL, _LEAST_READ), MOST_READ)

    def observe(self, since: float, now: float, *, first: bool) -> None:
        """Observe the time of a token: from the request to the first one, or from the one before."""
        self._made.inc()
        (self._first if first else self._between).observe(now - since)

    def over(self, answer: _Answer, outcome: Outcome | None) -> None:
        """Count a request that is over; a dropped one has no outcome."""
        del self._answers[answer.row]
        if outcome is not None:
            failed = isinstance(outcome, IngotError)
            (self._statistics.failed if failed else self._statistics.answered).add(time.perf_counter() - answer.began)
        if not answer.row.over:
            self._policy.cancel(answer.row)
            self._begin_step_soon()
        if not self._answers:
            self._quiet.set()

    def counted(self, statistics: Statistics) -> Statistics:
        """Return the counts of steps with those of requests instead."""
        counted = self._statistics
        return replace(statistics, answered=replace(counted.answered), failed=replace(counted.failed))

    def fail(self, error: IngotError) -> None:
        """Answer the requests that wait for a slot with an error: no step can run."""
        for answer in [*self._answers.values()]:
            if answer.waiting:
                answer.fail(error)

    async def wait_quiet(self) -> None:
        """Wait until no request is open; call it after submissions have stopped."""
        if self._answers:
            self._quiet.clear()
            await self._quiet.wait()

    def close(self, error: IngotError) -> None:
        """Answer all requests with an error, from any thread: the model is closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nothing awaits the answers
                self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: IngotError) -> None:
        for answer in [*self._answers.values()]:
            answer.fail(error)


class _Answer:
    """A request, from its submission to its answer.

    Attributes:
        row: its row, or its place in the queue.
        began: when it was submitted.
        done: whether it is answered or dropped.
    """

    __slots__ = ("_latest", "_owner", "_reply", "_stream", "_tokens", "began", "done", "row")

    def __init__(self, owner: Generator, row: Row, stream: Stream, request: Request):
        self.row = row
        self.began = self._latest = time.perf_counter()
        self.done = False
        self._owner = owner
        self._stream = stream
        self._reply: Callable[[Outcome], None] = request.reply
        self._tokens: list[int] = []

    @property
    def waiting(self) -> bool:
        """Whether nothing of it runs yet."""
        return self.row.waiting

    def take(self, event: Event, now: float) -> None:
        """Pass a token on, and end the answer with the last one."""
        if event.token is not None:
            self._tokens.append(event.token.id)
            self._stream.put(event.token)
            self._owner.observe(self._latest, now, first=len(self._tokens) == 1)
            self._latest = now
        if event.reason is not None:
            self._stream.finish(event.reason)
            self._settle({TOKENS: np.array(self._tokens, np.int64)})

    def fail(self, error: IngotError) -> None:
        """End the answer with an error."""
        if not self.done:
            self._settle(error)

    def cancel(self) -> None:
        """Drop the request, as its client left, or has the tokens that it wants."""
        if not self.done:
            self.done, self._reply = True, ignore
            self._owner.over(self, {} if self._stream.enough else None)

    def _settle(self, outcome: Outcome) -> None:
        self.done = True
        reply, self._reply = self._reply, ignore  # it leads back to its request, which would be a reference cycle
        self._owner.over(self, outcome)
        attempt("a reply failed", reply, outcome)


def defaulted(generation: Generation, request: Request) -> GenerationRequest:
    """Return the request for tokens of a request of tensors, which says nothing but the prompt."""
    return GenerationRequest(
        prompt=request.inputs[PROMPT],
        max_tokens=generation.defaults.max_new_tokens,
        sampling=Sampling(**own_values(generation, samples=generation.defaults.do_sample)),
        stop_ids=frozenset(generation.eos),
        client=request.client,
        priority=request.priority,
    )
