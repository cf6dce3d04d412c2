"""Requests that were running when an engine process ended: repeated, they run alone or are refused."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from ingot.errors import IngotError, InvalidArgument
from ingot.runtime.scheduling.entry import Entry, Outcome
from ingot.tensors import Array, arrays

# Seconds for which a request is remembered, and the most requests.
_SECONDS = 600.0
_MOST = 1024
# Ends of processes after which a request is refused: another request of the batch may have caused the first.
_ENDS = 2


@dataclass
class _Suspect:
    ends: int
    until: float


class Suspects:
    """The requests of one model that may have ended an engine process. False if empty; thread-safe.

    A client, or a proxy, that repeats such a request would end one process after the other. Requests are compared by
    their inputs, so equal requests of other clients count too.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._found: dict[bytes, _Suspect] = {}
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, entries: Iterable[Entry]) -> None:
        """Remember the requests of a call during which the process ended."""
        until = self._clock() + _SECONDS
        with self._lock:
            for key in dict.fromkeys(_key(entry.inputs) for entry in entries):  # equal inputs share one end
                suspect = self._found.pop(key, None) or _Suspect(0, until)
                self._found[key] = _Suspect(suspect.ends + 1, until)
            while len(self._found) > _MOST:
                del self._found[next(iter(self._found))]

    def divide(self, parts: Iterable[Sequence[Entry]]) -> tuple[list[Sequence[Entry]], dict[Entry, Outcome]]:
        """Return the parts of a batch that are to run separately, and the errors of requests that are refused."""
        divided: list[Sequence[Entry]] = []
        refused: dict[Entry, Outcome] = {}
        for part in parts:
            unknown = []
            for entry in part:
                suspect = self._find(entry)
                if suspect is None:
                    unknown.append(entry)
                elif suspect.ends < _ENDS:
                    divided.append([entry])
                else:
                    refused[entry] = InvalidArgument(
                        f"requests with these inputs ended the model's engine process {suspect.ends} times; they are "
                        f"refused for {math.ceil((suspect.until - self._clock()) / 60)} min"
                    )
            if unknown:
                divided.append(unknown)
        return divided, refused

    def settle(self, part: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
        """Forget a request that ran alone and was answered."""
        if len(part) == 1 and not isinstance(outcomes[0], IngotError):
            with self._lock:
                self._found.pop(_key(part[0].inputs), None)

    def _find(self, entry: Entry) -> _Suspect | None:
        now = self._clock()
        with self._lock:
            while self._found and (oldest := next(iter(self._found.items())))[1].until <= now:
                del self._found[oldest[0]]
            return self._found.get(_key(entry.inputs)) if self._found else None


def _key(inputs: Mapping[str, Array]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(inputs.items()):
        raw = arrays.to_bytes(array)
        digest.update(f"{name} {array.dtype} {array.shape} {len(raw)} ".encode())
        digest.update(raw)
    return digest.digest()
