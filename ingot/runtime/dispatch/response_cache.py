"""The response cache of one model: equal inputs are answered from memory, without the engine."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from ingot.errors import IngotError, InvalidArgument
from ingot.protocol.keys import InputKey, key_of
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Outcome, Reply, Request, size_of
from ingot.tensors import Array

LARGEST_INPUTS = 4 << 20
"""Most bytes of a request's inputs that are looked up: the event loop hashes about 1 MiB in a millisecond."""
# A response is kept if it needs at most one of so many parts of the cache.
_PARTS = 10
# Bytes that Python needs for an entry, for each of its arrays, and for each text in an array.
_ENTRY_BYTES, _ARRAY_BYTES, _TEXT_BYTES = 500, 200, 40
# Encoded keys that are remembered.
_HEADS = 1024


class ResponseCache:
    """The latest responses of a model by a digest of the inputs. All of it belongs to the event loop.

    An entry has all outputs of the model, so that it answers requests that want any of them.

    Args:
        limit: most bytes of all entries.
        dispatcher: the model's, which answers what is not cached.
        statistics: of the model, where hits and misses are counted.
        labels: the model's name and version.
        metrics: where they are counted, too.

    Attributes:
        nbytes: the bytes of all entries.
        last_hit: when the last hit was answered, in seconds of ``time.perf_counter``; 0 before the first.
    """

    def __init__(
        self, limit: int, dispatcher: Accepts, statistics: Statistics, labels: tuple[str, str], metrics: Metrics
    ):
        self.nbytes = 0
        self.last_hit = 0.0
        self._limit = limit
        self._dispatcher = dispatcher
        self._entries: OrderedDict[bytes, tuple[Mapping[str, Array], int]] = OrderedDict()
        self._statistics = statistics
        self._hits = metrics.cache_hits.labels(*labels)
        self._misses = metrics.cache_misses.labels(*labels)
        self._evictions = metrics.cache_evictions.labels(*labels)

    def submit(self, request: Request) -> Submitted:
        """Accept a request; errors as for :meth:`Dispatcher.submit`."""
        began = time.perf_counter()
        digest = digest_of(request.inputs, request.key)
        if digest is None:
            return self._dispatcher.submit(request)
        if request.lengths is not None:  # outputs are zero where the inputs have padding
            digest += b"lengths"
        entry, statistics = self._entries.get(digest), self._statistics
        if entry is None:
            answered = functools.partial(self._answered, digest, request.reply)
            pending = self._dispatcher.submit(request.passed_on(answered, request.timeout))
            self._misses.value += 1
            statistics.cache_miss.add(time.perf_counter() - began)
            return pending
        self._entries.move_to_end(digest)
        hit = _Hit(request.reply, entry[0])
        self._hits.value += 1
        self.last_hit = time.perf_counter()
        statistics.cache_hit.add(self.last_hit - began)
        statistics.answered.add(self.last_hit - began)
        statistics.last = time.time()
        return hit

    def _answered(self, digest: bytes, reply: Reply, outcome: Outcome) -> None:
        reply(outcome)
        if not isinstance(outcome, IngotError):
            began = time.perf_counter()
            self._keep(digest, outcome)
            self._statistics.cache_miss.seconds += time.perf_counter() - began

    def _keep(self, digest: bytes, outputs: Mapping[str, Array]) -> None:
        size = _ENTRY_BYTES + sum(map(_kept_bytes, outputs.values()))
        if size > self._limit // _PARTS or digest in self._entries:  # an equal request was answered meanwhile
            return
        while self.nbytes + size > self._limit:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed
            self._evictions.value += 1
        self._entries[digest] = {name: _copy(array) for name, array in outputs.items()}, size
        self.nbytes += size


class _Hit:
    """A request that is answered from the cache, in a later tick of the event loop."""

    __slots__ = ("_outputs", "_reply", "done")

    def __init__(self, reply: Reply, outputs: Mapping[str, Array]):
        self.done = False
        self._reply = reply
        self._outputs = outputs
        asyncio.get_running_loop().call_soon(self._answer)

    def cancel(self) -> None:
        """Drop the request, as its client left."""
        self.done = True

    def _answer(self) -> None:
        if not self.done:
            self.done = True
            self._reply(self._outputs)


def digest_of(inputs: Mapping[str, Array], key: InputKey | None = None) -> bytes | None:
    """Return a digest of names, types, shapes and values; None for inputs that are too large, or not valid.

    Args:
        inputs: of a request, not checked yet.
        key: :func:`key_of` them, if it is known.
    """
    try:
        if sum(map(size_of, inputs.values())) > LARGEST_INPUTS:
            return None
        digest = hashlib.blake2b(_head(key or key_of(inputs)), digest_size=32)
        for array in inputs.values():
            if array.dtype == object:
                texts = array.reshape(-1).tolist()
                digest.update(np.array([*map(len, texts)], np.int64).data)
                digest.update(b"".join(texts))
            else:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    except (InvalidArgument, TypeError):  # a text that is not bytes, which the model's check refuses
        return None
    return digest.digest()


@functools.lru_cache(_HEADS)
def _head(key: InputKey) -> bytes:
    return repr(key).encode("utf-8", "surrogatepass")


def _kept_bytes(array: Array) -> int:
    return _ARRAY_BYTES + size_of(array) + (_TEXT_BYTES * array.size if array.dtype == object else 0)


def _copy(array: Array) -> Array:
    """Return a copy that cannot be written, without the rest of the batch that the array is a part of."""
    copied = np.array(array, order="C")
    copied.setflags(write=False)
    return copied
