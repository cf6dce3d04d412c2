"""A served source over time: the model that answers, the one that is to take over, and why one did not."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ingot.errors import InvalidArgument, NotFound
from ingot.model_store import Archive, Store
from ingot.model_store.places import Located
from ingot.model_store.references import is_version
from ingot.runtime.dispatch.acceptor import State
from ingot.runtime.model import Model
from ingot.runtime.settings.settings import Settings

Result = Literal["ok", "failed", "stopped", "unchanged", "canary"]

CHANGES = "ingot.changes"
"""The logger of what an operator changed: what is served, the configuration, the log level."""

_EVENTS = 20


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of the model that answers, or a failed attempt.

    Attributes:
        before: the digest of the model that answered; empty if none did.
        after: the digest of the model that was to take over; empty if it was unloaded, or was not found.
        result: ``ok`` or ``failed``; ``canary`` if a candidate begins to get requests, ``stopped`` if an
            operator stops it.
        reason: of a failure or a stop.
    """

    before: str
    after: str
    result: Result
    reason: str = ""
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def content(self) -> dict[str, str]:
        """The event, as JSON has it."""
        return {
            "time": self.time.isoformat(timespec="seconds"),
            "from": self.before,
            "to": self.after,
            "result": self.result,
            "reason": self.reason,
        }


@dataclass(eq=False, kw_only=True)
class Deployment:
    """A served name and version. It belongs to the event loop; :meth:`wanted` may run in any thread.

    Attributes:
        name: the name for clients.
        tag: the version for clients: what the source names, such as the alias ``prod``; 1 for a file.
        source: as it was given.
        located: where the source is; None for an archive in memory.
        settings: how its models are run; None for those of all models.
        current: the model that answers.
        candidate: the model that is loaded to take over.
        failure: why the last change did not take place.
        refused: the digest of the last candidate that failed, or was stopped while the source still has it.
        skipped_digest: what the alias means while the deployment is detached from it; empty if it is not. It is not
            loaded again until the alias moves.
        rolled_back: whether the last canary was, or was stopped, and the alias was pointed back at what answers.
        aliases: other tags of the store for what answers; clients may use them as its version.
        history: the last changes and failures.
        changing: held during a change.
    """

    name: str
    tag: str
    source: str | Archive
    located: Located | None
    settings: Settings | None = None
    current: Model | None = None
    candidate: Model | None = None
    failure: str = ""
    refused: str = ""
    skipped_digest: str = ""
    rolled_back: bool = False
    aliases: frozenset[str] = frozenset()
    history: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def follows(self) -> bool:
        """Whether its source is an alias, which may be moved to another archive."""
        reference = self.located.reference if self.located is not None else None
        return (
            reference is not None
            and reference.tag is not None
            and reference.digest is None
            and not is_version(reference.tag)
        )

    @property
    def store(self) -> Store | None:
        """The local store, if its source is there."""
        place = self.located.place if self.located is not None else None
        return place if isinstance(place, Store) else None

    @property
    def digest(self) -> str:
        """The digest of the model that answers; empty if there is none."""
        return self.current.digest if self.current is not None else ""

    @property
    def state(self) -> State:
        """The state of the model that answers, or of the one that is loaded to be the first."""
        if self.current is not None:
            return self.current.state
        if self.candidate is not None:
            return self.candidate.state
        return State.FAILED if self.failure else State.UNLOADED

    def wanted(self) -> str:
        """Return the digest of what the source means now. This reads a file or asks a registry.

        Raises:
            NotFound: its file or tag is gone.
            IngotError: it cannot be read.
        """
        located = self.located
        if located is None:
            assert isinstance(self.source, Archive)  # noqa: S101
            return self.source.digest
        if located.place is None or located.reference is None:
            return stamp(bare) if (bare := located.bare) is not None else located.open().digest
        if located.reference.digest is not None:
            return located.reference.digest
        name = located.reference.name
        found = located.place.digest_of(name, located.reference.tag or self.tag)
        if found is None:
            raise NotFound(f"'{located.name}' has no tag '{located.reference.tag or self.tag}' any longer")
        return found

    def point_back(self, digest: str, reason: str) -> str:
        """Point the alias at what answers if it means ``digest``; return what this changes for users.

        The alias of a registry is left to users: other servers may follow it, and it keeps no history.

        Raises:
            IngotError: the store cannot be written, or the alias was moved meanwhile.
        """
        if self.located is None or self.wanted() != digest:
            return ""
        reference = self.located.reference
        if reference is None or not self.follows:
            return "; a restart serves it, as the model's source still has it: put the earlier one back there"
        again = f"ingot store promote {replace(reference, tag=None, digest=digest)} {reference.tag}"
        if self.store is None:
            back = f"ingot store promote {replace(reference, tag=None, digest=self.digest)} {reference.tag}"
            return f"; a restart serves it, as '{reference}' still means it: {back}"
        self.store.rollback(reference, expect=digest, to=self.digest, reason=reason)
        self.rolled_back = True
        return f"; '{reference}' means {self.digest} again; to try it once more: {again}"

    def source_of(self, version: str) -> str:
        """Return the source of another version in the repository whose alias this follows.

        Raises:
            InvalidArgument: it follows no alias, or ``version`` is not a version.
        """
        reference = self.located.reference if self.located is not None else None
        if reference is None or not self.follows:
            raise InvalidArgument(
                f"model '{self.name}:{self.tag}' follows no alias that it could be detached from; name a source instead"
            )
        if not is_version(version):
            raise InvalidArgument(f"'{version}' is not a version, such as 2 or 1.4.0; only versions never change")
        return str(replace(reference, tag=version))

    def others(self) -> frozenset[str]:
        """Return the other tags that the store has for what answers."""
        reference = self.located.reference if self.located is not None else None
        if self.store is None or reference is None:
            return frozenset()
        tags = self.store.tags(reference.name)
        return frozenset(tag for tag, digest in tags.items() if digest == self.digest and tag != self.tag)

    def note(self, event: Event) -> None:
        """Record a change or a failure, and show a failure to clients."""
        self.history.append(event)
        if event.result != "stopped":
            self.show(event.reason)

    def show(self, failure: str) -> None:
        """Show why the last change did not take place in the metadata of the model that answers."""
        self.failure = failure
        if self.current is not None:
            self.current.show_update(failure)

    def status(self) -> dict[str, Any]:
        """Return the deployment's state for users, as JSON has it."""
        current, candidate = self.current, self.candidate
        return {
            "name": self.name,
            "version": self.tag,
            "source": self.source if isinstance(self.source, str) else self.source.name,
            "aliases": sorted(self.aliases),
            "follows": self.follows,
            "detached": bool(self.skipped_digest),
            "state": self.state.value,
            "reason": current.reason if current is not None else self.failure,
            "digest": self.digest,
            "number": current.number if current is not None else None,
            "variant": current.variant if current is not None else "",
            "device": current.device if current is not None else "",
            "update_failed": self.failure,
            "candidate": None
            if candidate is None
            else {"digest": candidate.digest, "number": candidate.number, "state": candidate.state.value},
            "history": [event.content for event in self.history],
        }


def stamp(path: Path) -> str:
    """Return a text that changes when a file is replaced or written; empty if it cannot be read."""
    try:
        found = os.stat(path)  # noqa: PTH116 - not an object for each look
    except (OSError, ValueError):
        return ""
    identity = f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    return f"file:{hashlib.sha256(identity.encode()).hexdigest()}"
