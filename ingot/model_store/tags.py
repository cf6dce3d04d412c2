"""The tags of one model in a store, and the log of their moves.

``index.json`` is replaced whole, under a lock that readers do not take. ``reflog.jsonl`` is written after it; what a
process that was killed in between did not log, the next one logs, as ``recover``.
"""

from __future__ import annotations

import fcntl
import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from ingot.errors import InvalidArgument, TagMoved
from ingot.model_store import manifest
from ingot.model_store.files import atomic_file
from ingot.model_store.manifest import Descriptor, Digest, Index
from ingot.model_store.references import is_attachments_tag

Action = Literal["push", "promote", "rollback", "remove", "recover"]

ANY: Final = "any"
"""Where a digest is expected: whatever there is."""
NONE: Final = "none"
"""Where a digest is expected: nothing yet."""
MAX_TAGS = 10_000


class Move(BaseModel):
    """What one tag pointed to before and after, each a digest, or None for nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: AwareDatetime
    tag: str
    old: Digest | None = None
    new: Digest | None = None
    action: Action = "push"
    by: str = ""


class Tags:
    """The tags of one model.

    Args:
        name: the model's.
        folder: where they are kept; made by the first change.
    """

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.folder = folder
        self.index = folder / "index.json"
        self.reflog = folder / "reflog.jsonl"

    def read(self) -> dict[str, Descriptor]:
        """Return tag -> archive, in the order in which they were added; empty when there is no such model.

        Raises:
            InvalidArchive: the index is damaged.
            InvalidArgument: it cannot be read.
        """
        try:
            raw = self.index.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InvalidArgument(f"the store's {self.index} cannot be read: {error.strerror}") from error
        entries = manifest.decode(Index, raw, str(self.index)).manifests
        return {entry.annotations.get(manifest.REF_NAME, ""): entry for entry in entries}

    def history(self) -> list[Move]:
        """Return all moves, the oldest first.

        Raises:
            InvalidArgument: the log cannot be read.
        """
        try:
            lines = self.reflog.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidArgument(f"the store's {self.reflog} cannot be read: {error.strerror}") from error
        moves = []
        for line in lines:
            try:
                moves.append(Move.model_validate_json(line))
            except ValidationError:  # cut short by a full disk; the move was logged anew
                continue
        return moves

    @contextmanager
    def locked(self) -> Iterator[Change]:
        """Keep other processes from changing the tags, and yield what changes them.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("ab+", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            change = Change(self, lock)
            if os.fstat(lock.fileno()).st_size:
                change.recover()
            yield change


class Change:
    """Changes tags that are locked; see :meth:`Tags.locked`.

    Args:
        tags: the tags.
        lock: the lock file. It holds a mark while the index may have been written, and the log not yet.
    """

    def __init__(self, tags: Tags, lock: IO[bytes]):
        self.tags = tags
        self._lock = lock

    def replace(self, tag: str, new: Descriptor | None, action: Action, *, expect: str = ANY) -> Descriptor | None:
        """Point a tag at an archive, or at nothing, if it points to what is expected.

        Returns:
            What it pointed to before.

        Raises:
            TagMoved: it points to something else than ``expect`` (a digest, ``ANY`` or ``NONE``).
            InvalidArgument: there are too many tags.
            OSError: the folder cannot be written.
        """
        tags = self.tags.read()
        old = tags.get(tag)
        there = old.digest if old else NONE
        check_expected(f"{self.tags.name}:{tag}", there, expect)
        if (new and new.digest) == (old and old.digest):
            return old
        if new is None:
            del tags[tag]
        else:
            tags[tag] = new
        if len(tags) > MAX_TAGS:
            raise InvalidArgument(f"a model can have {MAX_TAGS} tags; remove some by ingot remove")
        self._lock.write(b"*")
        self._write(tags)
        if not is_attachments_tag(tag):
            self._log(Move(**_now(), tag=tag, old=old and old.digest, new=new and new.digest, action=action))
        self._lock.truncate(0)
        return old

    def recover(self) -> None:
        """Log the moves that were made, but not logged, by a process that was killed."""
        logged: dict[str, str | None] = {}
        for move in self.tags.history():
            logged[move.tag] = move.new
        there = {tag: entry.digest for tag, entry in self.tags.read().items() if not is_attachments_tag(tag)}
        for tag in {**logged, **there}:
            if logged.get(tag) != there.get(tag):
                self._log(Move(**_now(), tag=tag, old=logged.get(tag), new=there.get(tag), action="recover"))
        self._lock.truncate(0)

    def _write(self, tags: dict[str, Descriptor]) -> None:
        entries = tuple(
            entry.model_copy(update={"annotations": {manifest.REF_NAME: tag}}) for tag, entry in tags.items()
        )
        layout = self.tags.folder / "oci-layout"
        if not layout.exists():
            with atomic_file(layout, durable=True) as stream:
                stream.write(manifest.LAYOUT)
        with atomic_file(self.tags.index, durable=True) as stream:
            stream.write(manifest.encode(Index(manifests=entries)))

    def _log(self, move: Move) -> None:
        with self.tags.reflog.open("ab+") as log:
            if log.seek(0, os.SEEK_END):
                log.seek(-1, os.SEEK_END)
                if log.read(1) != b"\n":  # the last line was cut short
                    log.write(b"\n")
            log.write(move.model_dump_json().encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())


def check_expected(tag: str, there: str | None, expect: str) -> None:
    """Raise TagMoved if a tag (``name:tag``) points to something else than a digest, ``NONE`` or ``ANY``."""
    if expect not in (ANY, there or NONE):
        raise TagMoved(f"'{tag}' is {there or NONE}, not {expect}: somebody else has moved it")


def targets(history: list[Move], tag: str) -> list[str | None]:
    """Return what a tag points to and, before it, what it can be rolled back to in turn; the last is what it is now.

    A rollback takes the newest one off, so that a second rollback goes one further back.
    """
    stack: list[str | None] = []
    for move in history:
        if move.tag != tag:
            continue
        if move.action == "rollback" and move.new in stack[:-1]:
            del stack[len(stack) - 1 - stack[:-1][::-1].index(move.new) :]
        elif not stack or stack[-1] != move.new:
            stack.append(move.new)
    return stack


def _now() -> dict[str, object]:
    return {"time": datetime.now(UTC), "by": _user()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())
