"""Watches files, and loads them again when they change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ingot.errors import public_text
from ingot.faults import attempt, attempt_async, rate_limited_logger
from ingot.runtime import Metrics
from ingot.server.access.audit import AuditLog

T = TypeVar("T")

log = rate_limited_logger(__name__)

# A change is used when it has lasted for this time: a certificate and its key are replaced one after the other.
_EVERY = 0.5

Stamp = tuple[tuple[int, int, int] | None, ...]


class Watch:
    """Looks at files at intervals, and reads changed ones, in a thread.

    Args:
        metrics: where loads are counted.
        audit: where they are logged.
    """

    def __init__(self, metrics: Metrics, audit: AuditLog | None = None):
        self._audit = audit
        self._metrics = metrics
        self._watched: list[_Watched] = []
        self._each: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def add(
        self, what: str, files: Callable[[], Iterable[Path]], load: Callable[[], T], use: Callable[[T], None]
    ) -> None:
        """Watch files that are loaded together.

        Args:
            what: their label in the metric.
            files: returns the files; they may differ after a load.
            load: reads them, in a thread; raises IngotError if they are invalid, and then the earlier content stays.
            use: called in the event loop with what was loaded.
        """

        async def reload() -> None:
            use(await asyncio.to_thread(load))

        self._watched.append(_Watched(what, files, reload))

    def each(self, call: Callable[[], None]) -> None:
        """Call a function at each interval."""
        self._each.append(call)

    def start(self) -> None:
        """Begin; call in the event loop."""
        # Separately: a file system that hangs must not keep keys from expiring.
        self._tasks = [asyncio.create_task(self._call()), asyncio.create_task(self._look())]

    def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()

    async def _call(self) -> None:
        while self._each:
            await asyncio.sleep(_EVERY)
            for call in self._each:
                attempt("keys and connections could not be checked", call)  # the task must survive them

    async def _look(self) -> None:
        while self._watched:
            await asyncio.sleep(_EVERY)
            for watched in self._watched:
                if await asyncio.to_thread(watched.settled):
                    await self._load(watched)

    async def _load(self, watched: _Watched) -> None:
        names = ", ".join(map(str, watched.files()))
        outcome = await attempt_async(f"{names} could not be loaded", watched.reload())
        result = "ok" if outcome is None else "failed"
        self._metrics.reloads.labels(watched.what, result).inc()
        if self._audit is not None:
            reason = "" if outcome is None else public_text(outcome)
            self._audit.write("reload", result, file=watched.what, reason=reason)
        if outcome is not None:
            log.error("%s changed and cannot be used; the earlier content stays in use: %s", names, outcome)
        else:
            log.info("%s was loaded again", names)
        watched.loaded()


class _Watched:
    """Files that are loaded together."""

    def __init__(self, what: str, files: Callable[[], Iterable[Path]], reload: Callable[[], Awaitable[None]]):
        self.what = what
        self.files = files
        self.reload = reload
        self._used = self._seen = self._stamp()

    def settled(self) -> bool:
        """Return whether the files differ from those in use, and have not changed since the last call."""
        stamp = self._stamp()
        settled, self._seen = stamp == self._seen, stamp
        return settled and stamp != self._used

    def loaded(self) -> None:
        """Note that the files that were seen last are in use, or cannot be used."""
        self._used = self._seen

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp, self.files()))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path.expanduser())  # noqa: PTH116 - not an object for each look
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
