"""A candidate gets a share of the requests of a model, and the answers of both are compared."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ingot.errors import DeadlineExceeded, IngotError
from ingot.runtime.dispatch.pending import Submitted
from ingot.runtime.generation.requests import TokenInputs
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.scheduling.entry import OVER, Outcome, Request, ignore, size_of
from ingot.runtime.settings.canary import Plan
from ingot.serving.comparison import Drift, Side, error_of
from ingot.tensors import Array

# Comparisons at once, and the largest request that is compared: their inputs and outputs are copied.
_COMPARING = 4
_COMPARED_BYTES = 16 << 20
# Elements that are compared in the event loop; more are compared in a thread.
_AT_ONCE = 1 << 14
# Requests have priorities from 0; comparisons run after all of them.
_LAST = -1

_threads = ThreadPoolExecutor(1, "ingot-compare")


class TrafficSplit:
    """Shares the requests of a model with a candidate. All of it belongs to the event loop.

    A request that the candidate fails is answered by the current model, so a bad candidate costs no answer.

    Args:
        current: the model that answers; it must accept requests.
        candidate: loaded, with the same signature.
        plan: its tolerance, stickiness and share of comparisons.
        metrics: where to count.
    """

    def __init__(self, current: Model, candidate: Model, plan: Plan, metrics: Metrics):
        self.current = current
        self.candidate = candidate
        self.plan = plan
        self.weight = 0.0
        self.sides = {current: Side(), candidate: Side()}
        self.drift = Drift()
        self._comparing = 0
        labels = (current.name, current.version)
        self._counts = {
            (model, ok): metrics.canary_requests.labels(*labels, to, "ok" if ok else "failed")
            for model, to in ((current, "current"), (candidate, "candidate"))
            for ok in (True, False)
        }
        self._compared = {
            result: metrics.canary_comparisons.labels(*labels, result) for result in ("agreed", "differed", "dropped")
        }
        for counter in (*self._counts.values(), *self._compared.values()):
            counter.reset()  # from the previous candidate

    def submit(self, request: Request) -> Submitted:
        """Accept a request for one of the models; errors as for :meth:`Model.submit`."""
        shared = _SharedRequest(self, request)
        if random.random() * 100 < self.plan.compare:
            shared.copy()
        chosen = self.candidate if self.weight and self._chooses_candidate(request.client) else self.current
        shared.submit(chosen)
        return shared

    def _chooses_candidate(self, client: Hashable) -> bool:
        if not self.candidate.ready:
            return False
        if self.plan.sticky and client is not None:
            named = hashlib.blake2b(f"{self.candidate.digest} {client}".encode(), digest_size=4)
            return int.from_bytes(named.digest()) / (1 << 32) * 100 < self.weight
        return random.random() * 100 < self.weight

    def count(self, model: Model, ok: bool, seconds: float) -> None:
        """Count a request that a model has answered, or not."""
        side = self.sides[model]
        if ok:
            side.answered += 1
            side.seconds.append(seconds)
        else:
            side.failed += 1
        self._counts[model, ok].inc()

    def compare(self, request: Request, model: Model, kept: Mapping[str, Array]) -> None:
        """Let the other model answer a request as well, if it is idle, and compare.

        Args:
            request: a copy of the one that was answered.
            model: answered it.
            kept: a copy of its outputs.
        """
        other = self.current if model is self.candidate else self.candidate
        if self._comparing >= _COMPARING or other.waiting or not other.ready:
            self._drop()
            return
        began = time.perf_counter()

        def answered(outcome: Outcome) -> None:
            self._comparing -= 1
            if isinstance(outcome, IngotError):
                self._drop()
                if other is self.candidate:
                    self.count(other, False, 0.0)
                return
            if other is self.candidate and not self.weight:
                self.count(other, True, time.perf_counter() - began)
            pair = (outcome, kept) if other is self.current else (kept, outcome)
            if sum(array.size for array in kept.values()) <= _AT_ONCE:
                self._add(error_of(*pair))
            else:
                reference, found = ({name: np.array(value) for name, value in each.items()} for each in pair)
                done = asyncio.get_running_loop().run_in_executor(_threads, lambda: error_of(reference, found))
                done.add_done_callback(lambda done: self._add(done.result()))

        self._comparing += 1
        try:
            other.submit_alone(request.passed_on(answered, None))
        except IngotError:
            self._comparing -= 1
            self._drop()

    @property
    def content(self) -> dict[str, Any]:
        """The counts of both models so far, as JSON has them."""
        current, candidate, drift = self.sides[self.current], self.sides[self.candidate], self.drift

        def ratio(share: float) -> float | None:
            found = candidate.latency(share) / current.latency(share)
            return round(found, 3) if math.isfinite(found) else None

        return {
            "requests": {
                "current": {"answered": current.answered, "failed": current.failed},
                "candidate": {"answered": candidate.answered, "failed": candidate.failed},
            },
            "answers": {
                "compared": drift.compared,
                "dropped": drift.dropped,
                "agreement": 1 - drift.differed / drift.compared if drift.compared else None,
                "worst_error": drift.worst if math.isfinite(drift.worst) else "infinite",
                "mean_error": drift.total / drift.compared if drift.compared else None,
                "tolerance": self.plan.tolerance,
            },
            "latency": {"p50_ratio": ratio(0.5), "p99_ratio": ratio(0.99)},
        }

    def _add(self, error: float) -> None:
        agreed = self.drift.add(error, self.plan.tolerance)
        self._compared["agreed" if agreed else "differed"].inc()

    def _drop(self) -> None:
        self.drift.dropped += 1
        self._compared["dropped"].inc()


class _SharedRequest:
    """A request of either model, which the current one answers if the candidate cannot."""

    __slots__ = (
        "_began",
        "_fell_back",
        "_model",
        "_pending",
        "_request",
        "_split",
        "_timeout",
        "copied",
        "done",
    )

    def __init__(self, split: TrafficSplit, request: Request):
        self._split = split
        self._request = request
        self._timeout = request.timeout
        self._began = time.perf_counter()
        self.copied: Request | None = None
        self.done = False
        self._fell_back = False

    def copy(self) -> None:
        """Keep the inputs, whose memory may be used again once the request is answered, unless they are large.

        Answers of tokens that are drawn cannot be compared.
        """
        inputs = self._request.inputs
        copied: Mapping[str, Array] | None = None
        if isinstance(inputs, TokenInputs):
            copied = inputs.again(_LAST)
        elif sum(size_of(array) for array in inputs.values()) <= _COMPARED_BYTES:
            copied = {name: np.array(array) for name, array in inputs.items()}
        if copied is not None:
            self.copied = Request(copied, ignore, None, _LAST, self._request.key, lengths=self._request.lengths)

    def submit(self, model: Model) -> None:
        """Submit it to a model."""
        self._model = model
        try:
            self._pending = model.submit_alone(self._request.passed_on(self._settle, self._timeout))
        except IngotError:
            if model is self._split.current:
                raise
            self._instead()

    def cancel(self) -> None:
        """Drop the request, as its client left."""
        if not self.done:
            self.done = True
            self._pending.cancel()

    def _settle(self, outcome: Outcome) -> None:
        split, model = self._split, self._model
        failed = isinstance(outcome, IngotError)
        if failed and model is split.candidate and not isinstance(outcome, DeadlineExceeded):
            try:
                self._instead()
            except IngotError as error:  # the request itself may be at fault
                self._finish(error)
            return
        split.count(model, not failed, time.perf_counter() - self._began)
        if self._fell_back and not failed:
            split.count(split.candidate, False, 0.0)
        if self.copied is not None and not isinstance(outcome, IngotError):
            kept = {name: np.array(value) for name, value in outcome.items()}
            self._finish(outcome)
            split.compare(self.copied, model, kept)
        else:
            self._finish(outcome)

    def _instead(self) -> None:
        """Let the current model answer what the candidate did not."""
        self.copied, self._fell_back = None, True
        if self._timeout is not None:
            self._timeout = max(0.0, self._timeout - (time.perf_counter() - self._began))
        self.submit(self._split.current)

    def _finish(self, outcome: Outcome) -> None:
        self.done = True
        reply, self._request = self._request.reply, OVER  # the reply refers back to this object
        reply(outcome)
