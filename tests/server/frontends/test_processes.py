"""The engine's end of front processes: order of messages, isolation of faults, and counts while a front ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ingot.errors import IngotError
from ingot.ipc import arena, records
from ingot.runtime import Metrics
from ingot.server.config import ServerConfig
from ingot.server.dataplane import DataPlane
from ingot.server.frontends import kinds
from ingot.server.frontends.channel import Channel
from ingot.server.frontends.child import Child
from ingot.server.frontends.kinds import Kind
from ingot.server.frontends.remote import EngineEnd
from ingot.server.frontends.session import EngineSession
from ingot.server.frontends.supervisor import FrontProcesses


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@contextlib.contextmanager
def arenas() -> Iterator[tuple[int, int]]:
    handles = arena.create(1 << 20), arena.create(1 << 20)
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


class Broken:
    """A model whose every member fails with an unexpected exception."""

    name, version = "broken", "1"

    def submit(self, *_: Any) -> Any:
        raise ZeroDivisionError("in the model")

    def statistics(self) -> Any:
        raise ZeroDivisionError("in the statistics")


class Pair:
    """Both ends of a connection in one process: a session, and a front that keeps what it receives."""

    def __init__(self, models: list[Any], render: Any = None) -> None:
        self.told: list[tuple[int, bytes]] = []
        self.lost = False
        with arenas() as handles:
            self.session = EngineSession(DataPlane(FakeCatalog()), models.__getitem__, handles, render, self._lost)  # type: ignore[arg-type]
            self.front = Channel(handles[1], handles[0], self._receive, lambda: None)
        self.engine = EngineEnd(self.front, 1 << 20)

    async def connect(self) -> Pair:
        ours, theirs = socket.socketpair()
        await self.front.connect(theirs)
        await self.session.channel.connect(ours)
        return self

    async def close(self) -> None:
        self.front.close()
        while not self.lost:
            await asyncio.sleep(0.001)

    def _lost(self) -> None:
        self.lost = True

    def _receive(self, kind: int, body: memoryview) -> None:
        self.told.append((kind, bytes(body)))
        if kind in (Kind.OUTPUTS, Kind.ERROR, Kind.REPLY):
            self.engine.receive(kind, body)


class FakeCatalog:
    metrics = Metrics()


def test_messages_sent_before_the_connection_are_first() -> None:
    async def test() -> None:
        pair = Pair([])
        pair.session.channel.send(Kind.HELLO, b"hello")
        seen = pair.session.ask(Kind.STATE, Kind.SEEN, b"first")
        await asyncio.sleep(0.01)  # some turns of the loop without a connection
        later = pair.session.ask(Kind.STATE, Kind.SEEN, b"second")
        await pair.connect()
        while len(pair.told) < 3:
            await asyncio.sleep(0.001)
        assert pair.told == [(Kind.HELLO, b"hello"), (Kind.STATE, b"first"), (Kind.STATE, b"second")]
        pair.front.send(Kind.SEEN)
        await seen
        assert not later.done()
        await pair.close()

    run(test)


def test_a_record_that_cannot_be_taken_fails_its_own_request_alone() -> None:
    async def test() -> None:
        async def render() -> bytes:
            return b"the metrics"

        pair = await Pair([Broken()], render).connect()
        answers: list[Any] = []
        x = {"x": np.ones((1, 2), np.float32)}
        pair.engine.submit(0, x, (), answers.append, None, 0)
        pair.engine.submit(7, x, (), answers.append, None, 0)  # no such model
        while len(answers) < 2:
            await asyncio.sleep(0.001)
        assert [type(answer).__name__ for answer in answers] == ["InternalError"] * 2
        with pytest.raises(IngotError, match="in the statistics"):
            await pair.engine.statistics(0)
        pair.front.send(Kind.COUNTS, b"never asked for")
        assert await pair.engine.render() == b"the metrics"
        await pair.close()

    run(test)


def test_an_answer_that_cannot_be_read_fails_its_own_request_alone() -> None:
    async def test() -> None:
        async def render() -> bytes:
            return b"the metrics"

        pair = await Pair([], render).connect()
        answers: list[Any] = []
        pending = pair.engine.submit(0, {"x": np.ones((1, 2), np.float32)}, (), answers.append, None, 0)
        unknown = kinds.TENSORS.pack(999, records.INLINE)
        pair.session.channel.send(Kind.OUTPUTS, records.NUMBER.pack(1), unknown)
        while not answers:
            await asyncio.sleep(0.001)
        assert pending.done
        assert type(answers[0]).__name__ == "InternalError"
        assert await pair.engine.render() == b"the metrics"
        await pair.close()

    run(test)


class FakeSession:
    def __init__(self, counts: Any, ask: Callable[[], Awaitable[None]]):
        self.counts = counts
        self._ask = ask

    def ask(self, *_: Any) -> Awaitable[None]:
        return self._ask()


class FakeChild:
    listens = True

    def __init__(self, session: FakeSession):
        self.session = session


def test_counts_of_a_front_are_reported_once_while_it_ends() -> None:
    """It ends during a request for its counts, and its supervisor keeps them."""

    async def test() -> None:
        fronts = FrontProcesses(DataPlane(FakeCatalog()), FakeRepository(), ServerConfig())  # type: ignore[arg-type]
        counts = [["answers", "Answers", "counter", [["answers_total", {}, 7.0]]]]

        async def end() -> None:
            fronts._children.clear()
            fronts._past = counts

        fronts._children.append(FakeChild(FakeSession(counts, end)))  # type: ignore[arg-type]
        assert b"\nanswers_total 7.0\n" in await fronts._render()

    run(test)


class FakeRepository(list[Any]):
    metrics = Metrics()


def test_a_start_that_is_cancelled_stays_so_though_the_front_has_ended() -> None:
    async def test() -> None:
        async def render() -> bytes:
            return b""

        child = Child(DataPlane(FakeCatalog()), [].__getitem__, 1 << 20, render)  # type: ignore[arg-type]
        starting = asyncio.create_task(child.start(b"{}", b"{}"))
        for _ in range(20):  # until it waits for its front, which takes far longer to start
            await asyncio.sleep(0)
        child.ended.set()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        child.kill()
        await child.wait()
        child.session.channel.close()

    run(test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_request_that_is_over_leaves_nothing_for_the_garbage_collector(cancelled: bool) -> None:
    """Its bytes would stay until then."""

    class Ticket:
        pending: Any = None
        answer: Any = None

        def settle(self, outcome: Any) -> None:
            self.answer = outcome

    async def test() -> None:
        async def render() -> bytes:
            return b"the metrics"

        pair = await Pair([Broken()], render).connect()
        ticket = Ticket()
        ticket.pending = pair.engine.submit(0, {"x": np.ones((1, 2), np.float32)}, (), ticket.settle, None, 0)
        if cancelled:
            ticket.pending.cancel()
        while not (cancelled or ticket.answer):
            await asyncio.sleep(0.001)
        gone = weakref.ref(ticket)
        del ticket
        assert gone() is None
        await pair.close()

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()
