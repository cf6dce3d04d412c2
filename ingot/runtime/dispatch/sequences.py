"""Sequences: requests that follow each other, of a model whose state the server keeps between them.

Some of the model's outputs are inputs of the next request, such as the hidden state of a recurrent layer or a cache of
attention keys. Clients see neither.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Mapping

from ingot import tensors
from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument, TooLarge, Unavailable
from ingot.protocol.keys import Step
from ingot.report.units import size, written
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.dispatch.states import Arrays, States
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import OVER, Outcome, Reply, Request, size_of
from ingot.runtime.settings.settings import SequenceLimits
from ingot.tensors import Signature


class Sequences:
    """Keeps the states of a model's sequences. All of it belongs to one event loop.

    The requests of one sequence run one after the other; those of different ones share batches. A request that fails
    or is cancelled leaves the state as it was.

    Args:
        name: the model's name.
        version: the model's version.
        signature: the model's, with its states.
        states: the output that is each input's next value.
        model: accepts the requests, with the states among the inputs.
        limits: of the states.
        metrics: where sequences are counted.

    Attributes:
        signature: the model's without its states, as clients see it.

    Raises:
        InvalidArgument: ``states`` do not fit the signature.
    """

    def __init__(
        self,
        name: str,
        version: str,
        signature: Signature,
        states: Mapping[str, str],
        model: Accepts,
        limits: SequenceLimits,
        metrics: Metrics,
    ):
        self._states = States(signature, states)
        self.signature = self._states.signature
        self._name = f"model '{name}'"
        self._model = model
        self._limits = limits
        self._open: dict[bytes, _Sequence] = {}
        self._waiting = 0
        self._nbytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._earlier: list[Sequences] = []
        self._ended = functools.partial(metrics.sequences_ended.labels, name, version)
        self._gauges = metrics.sequences.labels(name, version), metrics.sequence_state_bytes.labels(name, version)

    def publish(self) -> None:
        """Let the metrics of the model's name and version show these sequences."""
        count, nbytes = self._gauges
        count.set_function(lambda: sum(len(each._open) for each in (self, *self._earlier)))
        nbytes.set_function(lambda: sum(each._nbytes for each in (self, *self._earlier)))

    def succeed(self, earlier: Sequences) -> None:
        """Let the model that was replaced keep its open sequences until they end; new ones begin here."""
        self._earlier = [each for each in (earlier, *earlier._earlier) if each]

    def __bool__(self) -> bool:
        """Return whether a sequence is open."""
        return bool(self._open)

    def submit(self, step: Step, request: Request) -> Submitted:
        """Accept a request and return at once; see :meth:`Dispatcher.submit`.

        Raises:
            InvalidArgument: the sequence is not open, or the inputs do not fit it.
            Unavailable: too many sequences are open, or too many requests wait.
            IngotError: what the model raises.
        """
        loop = asyncio.get_running_loop()
        if not request.inputs.keys().isdisjoint(self._states.hidden):
            tensors.check_inputs(self.signature, request.inputs)  # it refuses states, which clients do not send
        sequence = self._open.get(step.sequence)
        if sequence is None:
            keeper = self._keeper(step) if self._earlier else None
            if keeper is not None and not step.start:
                return keeper.submit(step, request)
            if keeper is not None:
                keeper.drop(step)
            sequence = self._begin(step)
        turn, timeout = _Turn(self, sequence, step, request), request.timeout
        if timeout is not None:
            turn.deadline = loop.time() + timeout
        if sequence.running is None:
            try:
                self._run(turn)
            except IngotError:
                self._forget_unstarted(sequence)
                raise
        elif self._waiting >= self._limits.waiting:
            raise Unavailable(
                f"{self._waiting} requests to {self._name} wait for earlier ones of their sequences; retry later"
            )
        else:
            self._waiting += 1
            sequence.turns.append(turn)
            if timeout is not None:
                turn.timer = loop.call_later(timeout, turn.expire)
        self._used(sequence)
        return turn

    def drop(self, step: Step) -> None:
        """End the sequence of a step; does nothing if it is not open."""
        sequence = self._open.get(step.sequence)
        if sequence is None and (keeper := self._keeper(step)) is not None:
            keeper.drop(step)
        elif sequence is not None and sequence.state is not None:
            self._keep(sequence, None)
            self._forget_unstarted(sequence)
            self._ended("ended").inc()

    def _keeper(self, step: Step) -> Sequences | None:
        """Return the sequences of a replaced model that have the one of a step."""
        self._earlier = [each for each in self._earlier if each]
        return next((each for each in self._earlier if step.sequence in each._open), None)

    def close(self) -> None:
        """Drop all sequences."""
        self._earlier = []
        if self._timer is not None:
            self._timer.cancel()
        self._open.clear()
        self._nbytes = 0

    def _begin(self, step: Step) -> _Sequence:
        if not step.start:
            raise InvalidArgument(
                f"the sequence is not open; send sequence_start with its first request to {self._name}. "
                f"A sequence ends with sequence_end, after {written(self._limits.idle)} without a request, and when "
                "the model is loaded again"
            )
        if len(self._open) >= self._limits.sequences:
            raise Unavailable(
                f"{len(self._open)} sequences are open, as many as {self._name} keeps (--max-sequences); end one, or "
                "retry later"
            )
        sequence = self._open[step.sequence] = _Sequence(step.sequence)
        return sequence

    def _run(self, turn: _Turn) -> None:
        sequence, request, loop = turn.sequence, turn.request, asyncio.get_running_loop()
        if turn.step.start:
            self._keep(sequence, None)
            state = self._states.first(request.inputs)
        elif sequence.state is None:
            raise InvalidArgument(f"the sequence has ended; send sequence_start with its first request to {self._name}")
        else:
            state = sequence.state
            self._states.check_sizes(request.inputs, state)
        timeout = None if turn.deadline is None else max(0.0, turn.deadline - loop.time())
        reply = functools.partial(self._answered, turn)
        step = turn.step
        controls = self._states.controls(request.inputs, step.name, start=step.start, end=step.end)
        inputs = {**request.inputs, **state, **controls}
        turn.work = self._model.submit(Request(inputs, reply, timeout, request.priority, None, request.client))
        sequence.running = turn

    def _answered(self, turn: _Turn, outcome: Outcome) -> None:
        sequence, step = turn.sequence, turn.step
        if not isinstance(outcome, IngotError):
            state = self._states.after(outcome)
            nbytes = sum(map(size_of, state.values()))
            if not step.end and self._nbytes - sequence.nbytes + nbytes > self._limits.nbytes:
                outcome = TooLarge(
                    f"the states of the sequences of {self._name} would take more than {size(self._limits.nbytes)} "
                    "(--max-state-mb); end sequences that are not used"
                )
            else:
                self._keep(sequence, None if step.end else state, nbytes)
        if not isinstance(outcome, IngotError):
            outcome = self._states.without(outcome)
            if step.end:
                self._ended("ended").inc()
        sequence.running = None
        reply = turn.finish()
        self._next(sequence)
        reply(outcome)

    def over(self, turn: _Turn) -> None:
        """Continue after a request that was cancelled or expired."""
        sequence = turn.sequence
        if sequence.running is turn:
            sequence.running = None
            self._next(sequence)
        else:
            sequence.turns.remove(turn)
            self._waiting -= 1

    def _next(self, sequence: _Sequence) -> None:
        """Run the next request of a sequence."""
        while sequence.turns and sequence.running is None:
            turn = sequence.turns.popleft()
            self._waiting -= 1
            try:
                self._run(turn)
            except IngotError as error:
                turn.finish()(error)
        self._forget_unstarted(sequence)

    def _forget_unstarted(self, sequence: _Sequence) -> None:
        """Close a sequence that has no state, nor a request that may give it one."""
        if sequence.state is None and sequence.running is None and self._open.get(sequence.key) is sequence:
            del self._open[sequence.key]

    def _keep(self, sequence: _Sequence, state: Arrays | None, nbytes: int = 0) -> None:
        nbytes = 0 if state is None else nbytes
        self._nbytes += nbytes - sequence.nbytes
        sequence.state, sequence.nbytes = state, nbytes

    def _used(self, sequence: _Sequence) -> None:
        """Note that a sequence is in use: the one that is idle for longest comes first."""
        loop = asyncio.get_running_loop()
        if self._open.pop(sequence.key, None) is None:
            return
        self._open[sequence.key] = sequence
        sequence.used = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limits.idle, self._expire)

    def _expire(self) -> None:
        """Drop sequences that are idle for too long."""
        self._timer = None
        loop = asyncio.get_running_loop()
        for sequence in list(self._open.values()):
            if sequence.running is not None:
                self._used(sequence)
                continue
            left = sequence.used + self._limits.idle - loop.time()
            if left > 0:
                self._timer = self._timer or loop.call_later(left, self._expire)
                return
            self._keep(sequence, None)
            self._forget_unstarted(sequence)
            self._ended("expired").inc()


class _Sequence:
    """An open sequence; ``state`` is None until its first request is answered."""

    __slots__ = ("key", "nbytes", "running", "state", "turns", "used")

    def __init__(self, key: bytes):
        self.key = key
        self.state: Arrays | None = None
        self.nbytes = 0
        self.running: _Turn | None = None
        self.turns: deque[_Turn] = deque()
        self.used = 0.0


class _Turn:
    """One request of a sequence, which waits for those before it; ``work`` is the model's part of it."""

    __slots__ = ("_owner", "deadline", "done", "request", "sequence", "step", "timer", "work")

    def __init__(self, owner: Sequences, sequence: _Sequence, step: Step, request: Request):
        self._owner = owner
        self.sequence = sequence
        self.step = step
        self.request = request
        self.deadline: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.work: Submitted | None = None
        self.done = False

    def finish(self) -> Reply:
        """Return the reply to call, once; it leads back to the request, so no reference to it is kept."""
        self.done = True
        if self.timer is not None:
            self.timer.cancel()
        reply, self.request = self.request.reply, OVER
        return reply

    def cancel(self) -> None:
        """Drop the request, as its client left."""
        if self.done:
            return
        self.finish()
        if self.work is not None:
            self.work.cancel()
        self._owner.over(self)

    def expire(self) -> None:
        """Fail while earlier requests of the sequence still run; one that runs is failed by the model."""
        if not self.done and self.work is None:
            reply = self.finish()
            self._owner.over(self)
            reply(DeadlineExceeded("earlier requests of the sequence were not answered within the timeout"))
