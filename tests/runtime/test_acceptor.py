"""Every transition of a model's state, and who accepts its requests after it."""

from __future__ import annotations

import itertools

import pytest

from ingot.errors import InternalError, Unavailable
from ingot.runtime import Request, State, Submitted
from ingot.runtime.dispatch.acceptor import Acceptor
from ingot.runtime.scheduling.entry import OVER

# The states that may follow each state, stated independently of the table under test.
NEXT = {
    "loading": "loading testing unloaded failed",
    "testing": "warming unloaded failed",
    "warming": "ready unloaded failed",
    "ready": "stuck restarting draining unloaded failed",
    "stuck": "ready draining unloaded failed",
    "restarting": "ready restarting draining unloaded failed",
    "draining": "draining unloaded",
    "unloaded": "loading",
    "failed": "loading ready restarting draining failed",
}
# How a model that was served reaches each state.
PATHS: dict[str, list[str]] = {
    "ready": [],
    "stuck": ["stuck"],
    "restarting": ["restarting"],
    "failed": ["restarting", "failed"],
    "draining": ["draining"],
    "unloaded": ["draining", "unloaded"],
    "loading": ["unloaded", "loading"],
    "testing": ["unloaded", "loading", "testing"],
    "warming": ["unloaded", "loading", "testing", "warming"],
}


class Accepting:
    """Accepts requests, and reports who did."""

    def __init__(self, name: str):
        self.name = name

    def submit(self, request: Request) -> Submitted:
        raise LookupError(self.name)


def loaded(*, restarts: bool = True) -> Acceptor:
    acceptor = Acceptor("m", "1")
    for state in (State.LOADING, State.TESTING, State.WARMING):
        acceptor.move(state)
    acceptor.open(Accepting("served"), restarts=restarts)
    return acceptor


def in_state(name: str) -> Acceptor:
    acceptor = loaded()
    for step in PATHS[name]:
        acceptor.move(State(step), "as a test asks for it")
    return acceptor


def accepting(acceptor: Acceptor) -> str:
    try:
        acceptor.accepting.submit(OVER)
    except LookupError as accepted:
        return str(accepted.args[0])
    except Unavailable as refused:
        return str(refused)
    raise AssertionError


@pytest.mark.parametrize(("before", "after"), list(itertools.product(NEXT, NEXT)))
def test_each_transition_is_made_or_refused(before: str, after: str) -> None:
    acceptor = in_state(before)
    reason, accepted = acceptor.reason, accepting(acceptor)
    if after in NEXT[before].split():
        assert acceptor.move(State(after), "because")
        assert (acceptor.state.value, acceptor.reason) == (after, "because")
        assert (accepting(acceptor) == "served") is (after == "ready")
        return
    with pytest.raises(InternalError, match=f"model 'm' version 1 cannot become {after}: it is {before}"):
        acceptor.move(State(after), "because")
    assert (acceptor.state.value, acceptor.reason, accepting(acceptor)) == (before, reason, accepted)


@pytest.mark.parametrize("state", State)
def test_a_model_that_was_never_loaded_does_not_become_ready(state: State) -> None:
    acceptor = Acceptor("m", "1")
    acceptor.move(State.FAILED, "its file is damaged")
    with pytest.raises(InternalError, match="cannot become ready: it is failed"):
        acceptor.move(State.READY)
    assert (acceptor.loaded, accepting(acceptor)) == (False, "model 'm' version 1 is failed")
    assert not acceptor.move(state, after=(State.READY,))


def test_a_model_that_was_closed_while_it_was_loaded_is_not_opened() -> None:
    acceptor = Acceptor("m", "1")
    acceptor.move(State.TESTING)
    acceptor.close()
    with pytest.raises(InternalError, match="cannot become ready: it is unloaded"):
        acceptor.open(Accepting("served"), restarts=True)
    assert (acceptor.state, accepting(acceptor)) == (State.UNLOADED, "model 'm' version 1 is unloaded")


def test_a_canary_accepts_requests_only_while_the_model_is_ready() -> None:
    acceptor = loaded()
    acceptor.split(Accepting("canary"))
    assert accepting(acceptor) == "canary"
    acceptor.move(State.RESTARTING, "its engine process ended")
    assert accepting(acceptor) == "model 'm' version 1 is restarting: its engine process ended"
    acceptor.move(State.READY)
    assert (accepting(acceptor), acceptor.split_up) == ("canary", True)
    acceptor.split(None)
    assert (accepting(acceptor), acceptor.split_up) == ("served", False)


def test_requests_for_a_parked_model_wait_until_it_is_loaded_again() -> None:
    acceptor = loaded()
    acceptor.drain(Accepting("waiting"), "it is loaded when a request comes")
    acceptor.close()
    assert (acceptor.state, acceptor.reason) == (State.UNLOADED, "it is loaded when a request comes")
    for state in (State.LOADING, State.FAILED, State.LOADING, State.TESTING, State.WARMING):
        acceptor.move(state)
        assert (accepting(acceptor), acceptor.ready) == ("waiting", state is not State.FAILED)
    acceptor.open(Accepting("served"), restarts=False)
    assert (accepting(acceptor), acceptor.parked) == ("served", False)


def test_a_parked_model_that_drains_again_refuses_requests() -> None:
    acceptor = loaded()
    acceptor.drain(Accepting("waiting"))
    acceptor.close()
    acceptor.drain()
    assert (accepting(acceptor), acceptor.ready) == ("model 'm' version 1 is unloaded", False)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_failed_model_counts_as_loaded_if_its_processes_may_run_again(restarts: bool) -> None:
    acceptor = loaded(restarts=restarts)
    acceptor.move(State.FAILED, "its engine process ended 5 times")
    assert (acceptor.loaded, acceptor.ready) == (restarts, False)
    shown = ": its engine process ended 5 times" if restarts else ""
    assert accepting(acceptor) == f"model 'm' version 1 is failed{shown}"
    acceptor.drain()
    assert acceptor.state.value == "draining"
    acceptor.close()
    assert acceptor.state.value == "unloaded"
