"""The state of one model, and which component accepts its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from threading import RLock

from ingot.errors import InternalError, Unavailable
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.scheduling.entry import Request


class State(Enum):
    """The lifecycle of a model.

    A model is STUCK while one of its engine calls does not end, RESTARTING while its engine processes are started
    again, and FAILED if they end too often; it may become READY again.
    """

    LOADING = "loading"
    TESTING = "testing"
    WARMING = "warming"
    READY = "ready"
    STUCK = "stuck"
    RESTARTING = "restarting"
    DRAINING = "draining"
    UNLOADED = "unloaded"
    FAILED = "failed"


_END = frozenset((State.DRAINING, State.UNLOADED, State.FAILED))
_NEXT: Mapping[State, Collection[State]] = {
    # A new model is LOADING before its first load; Model.load refuses a second load while one runs.
    State.LOADING: {State.LOADING, State.TESTING, State.UNLOADED, State.FAILED},
    State.TESTING: {State.WARMING, State.UNLOADED, State.FAILED},
    State.WARMING: {State.READY, State.UNLOADED, State.FAILED},
    State.READY: {State.STUCK, State.RESTARTING, *_END},
    State.STUCK: {State.READY, *_END},
    State.RESTARTING: {State.READY, State.RESTARTING, *_END},
    State.DRAINING: {State.DRAINING, State.UNLOADED},
    State.UNLOADED: {State.LOADING},
    State.FAILED: {State.LOADING, State.READY, State.RESTARTING, State.DRAINING, State.FAILED},
}
"""The states that may follow each state."""


class Acceptor:
    """The state of a model, and the component that accepts its requests; nothing else changes either.

    ======  ==============================================================================
    open    the model is READY, and its dispatcher or response cache accepts requests
    split   the model is READY, and a canary's traffic split accepts them
    parked  the model is not in memory: requests wait until it is loaded again
    closed  requests are refused
    ======  ==============================================================================

    All methods may be called in any thread. ``lock`` is held during a change; hold it for several changes at once.

    Attributes:
        accepting: accepts the requests that arrive now.
        lock: reentrant.
    """

    def __init__(self, name: str, version: str):
        self.lock = RLock()
        self._model = f"model '{name}' version {version}"
        self._state = State.LOADING
        self._reason = ""
        self._closed = _Closed(self)
        self._served: Accepts | None = None
        self._restarts = False
        self._split: Accepts | None = None
        self._parked: Accepts | None = None
        self.accepting: Accepts = self._closed

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str:
        """Why the model is in its state, for users; may be empty."""
        return self._reason

    @property
    def parked(self) -> bool:
        """Whether requests wait until the model is loaded again."""
        return self._parked is not None

    @property
    def split_up(self) -> bool:
        """Whether a canary's traffic split accepts the requests while the model is ready."""
        return self._split is not None

    @property
    def ready(self) -> bool:
        """Whether requests are accepted: those for a parked model wait until it is loaded."""
        return self._state is State.READY or (self.parked and self._state is not State.FAILED)

    @property
    def loaded(self) -> bool:
        """Whether it is ready, or becomes ready when an engine process runs again."""
        restarts = self._state is State.FAILED and self._served is not None and self._restarts
        return restarts or self.ready or self._state is State.RESTARTING

    def unavailable(self) -> Unavailable:
        """Return the error of requests while the model is not ready."""
        why = f": {self._reason}" if self._reason and (self.loaded or self._state is State.STUCK) else ""
        return Unavailable(f"{self._model} is {self._state.value}{why}")

    def move(self, state: State, reason: str = "", *, after: Collection[State] = tuple(State)) -> bool:
        """Change the state; return whether it changed.

        Args:
            state: the next one.
            reason: why, for users.
            after: the states in which to do so; in others, nothing happens.

        Raises:
            InternalError: the model may not change from its state to this one; it stays as it is.
        """
        with self.lock:
            if self._state not in after:
                return False
            if state not in _NEXT[self._state] or (state is State.READY and self._served is None):
                raise InternalError(f"{self._model} cannot become {state.value}: it is {self._state.value}")
            self._state, self._reason = state, reason
            self._choose()
            return True

    def open(self, served: Accepts, *, restarts: bool) -> None:
        """Let the model accept requests from now on, after it has warmed up.

        Args:
            served: the model's dispatcher or response cache.
            restarts: whether the model becomes ready again if its engine processes end too often.

        Raises:
            InternalError: the model may not become ready: it was closed while it was loaded, say.
        """
        with self.lock:
            self._served, before = served, self._served
            try:
                self.move(State.READY)
            except InternalError:
                self._served = before
                raise
            self._restarts, self._parked = restarts, None
            self._choose()

    def split(self, split: Accepts | None) -> None:
        """Let a canary's traffic split accept the requests while the model is ready; None ends that."""
        with self.lock:
            self._split = split
            self._choose()

    def drain(self, parked: Accepts | None = None, reason: str = "") -> None:
        """Refuse new requests.

        Args:
            parked: accepts them instead, until the model is loaded again.
            reason: why it is parked, for users.
        """
        with self.lock:
            self._parked = parked
            # Also a model that is stuck, or failed while it was served: it must not become ready again.
            if self._served is not None:
                self.move(State.DRAINING, reason)
            self._choose()

    def close(self) -> None:
        """Refuse new requests unless the model is parked; a failed model stays failed."""
        with self.lock:
            self._served = None
            after = [state for state, following in _NEXT.items() if State.UNLOADED in following]
            self.move(State.UNLOADED, self._reason if self.parked else "", after=after)
            self._choose()

    def _choose(self) -> None:
        """Decide who accepts requests."""
        if self._parked is not None:
            self.accepting = self._parked
        elif self._state is State.READY and self._served is not None:
            self.accepting = self._split if self._split is not None else self._served
        else:
            self.accepting = self._closed


class _Closed:
    """Refuses requests."""

    def __init__(self, acceptor: Acceptor):
        self._acceptor = acceptor

    def submit(self, request: Request) -> Submitted:
        """Refuse a request.

        Raises:
            Unavailable: always.
        """
        raise self._acceptor.unavailable()
