"""Calls of a model's code to other models of its server, while its engine process runs a batch: the server's side."""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import struct
from collections.abc import Callable, Mapping
from queue import SimpleQueue

import numpy as np

from ingot import foreign
from ingot.errors import IngotError, TooLarge, Unavailable
from ingot.runtime.engines.ipc.records import encode_error
from ingot.runtime.engines.isolation.link import Kind, Link
from ingot.tensors import Array

HEAD = struct.Struct("<IdH")
"""The number of a call, its timeout in seconds (infinity for none), and the bytes of the model's name."""
NUMBER = struct.Struct("<IB")
"""The number of the call that is answered, and whether the answer is an error."""

# Calls of one batch that wait for their answers.
_MOST = 256

Answer = Mapping[str, Array] | IngotError
Ask = Callable[[str, Mapping[str, Array], float, Callable[[Answer], None]], None]
"""Asks a model, by its name or ``name:version``; the reply is called once, in any thread, and does not block."""


class BatchCalls:
    """The calls of one batch. All of it belongs to the worker thread, except for replies.

    Args:
        link: to the engine process.
        ask: asks a model of the server.
    """

    def __init__(self, link: Link, ask: Ask):
        self._link = link
        self._ask = ask
        self._answers: SimpleQueue[tuple[int, Answer]] = SimpleQueue()
        self._waiting = 0
        self._taken: list[int] = []
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def begin(self, body: memoryview) -> None:
        """Submit the call of a record.

        Raises:
            Exception: of several types, if the record is invalid.
        """
        number, timeout, size = HEAD.unpack_from(body)
        name = bytes(body[HEAD.size : HEAD.size + size]).decode()
        # Copies: the process could change its memory after the values were checked.
        inputs = {key: np.array(array) for key, array in self._link.tensors(body[HEAD.size + size :]).items()}
        reply = functools.partial(self._answered, number)
        self._waiting += 1
        if self._waiting > _MOST:
            reply(Unavailable(f"{_MOST} calls of one batch wait for other models; await some of them first"))
        else:
            self._ask(name, inputs, timeout if timeout >= 0 else 0.0, reply)  # also for NaN

    def receive(self) -> tuple[int, memoryview]:
        """Wait for a record, and send answers meanwhile; errors as for :meth:`Link.receive`."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._link.connection, select.POLLIN)
        while not self._link.received:
            ready = dict(poll.poll())
            if self._woken.fileno() in ready:
                self._woken.recv(_MOST)
                while not self._answers.empty():
                    self._send(*self._answers.get())
            if self._link.connection.fileno() in ready:
                break
        return self._link.receive()

    def close(self) -> None:
        """Free the memory of answers; those that come later are dropped."""
        self._link.free(self._taken)
        self._woken.close()
        self._wake.close()

    def _answered(self, number: int, answer: Answer) -> None:
        self._answers.put((number, answer))
        with contextlib.suppress(OSError):  # it has been woken, or the batch has ended
            self._wake.send(b"a")

    def _send(self, number: int, answer: Answer) -> None:
        self._waiting -= 1
        if not isinstance(answer, IngotError):
            send = functools.partial(self._link.send_tensors, Kind.ANSWER, NUMBER.pack(number, 0), answer)
            sent = foreign.outcome(send)
            if isinstance(sent, list):
                self._taken += sent
                return
            if not isinstance(sent, TooLarge):
                raise sent
            answer = sent
        self._link.send(Kind.ANSWER, NUMBER.pack(number, 1), encode_error(answer))
