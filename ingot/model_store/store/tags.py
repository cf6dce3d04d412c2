"""The tags of one model in a store, and the log of their moves.

``index.json`` is replaced atomically, under a lock that readers do not take. ``reflog.jsonl`` is written afterwards; if
a process is killed in between, the next one logs its move as ``recover``.
"""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ingot.errors import InvalidArchive, InvalidArgument, TagMoved
from ingot.model_store.blobs.descriptor import Descriptor, Digest
from ingot.model_store.blobs.files import atomic_file, open_plain
from ingot.model_store.format import manifest
from ingot.model_store.format.manifest import Index
from ingot.model_store.references import is_attachments_tag, is_tag

Action = Literal["push", "promote", "rollback", "remove", "recover"]

ANY: Final = "any"
"""Expected value of a tag: anything."""
NONE: Final = "none"
"""Expected value of a tag: no archive."""
MAX_TAGS = 10_000
# Times that every time zone can represent.
_FIRST, _LAST = datetime(1970, 1, 2, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)

log = logging.getLogger(__name__)


class Move(BaseModel):
    """The target of one tag before and after: a digest, or None for nothing."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")

    time: Annotated[AwareDatetime, Field(ge=_FIRST, le=_LAST)]
    tag: str = Field(max_length=200)
    old: Digest | None = None
    new: Digest | None = None
    action: Action = "push"
    by: str = Field("", max_length=200)
    reason: str = Field("", max_length=1100)


class Tags:
    """The tags of one model.

    Args:
        name: the model's name.
        folder: where they are stored; created by the first change.
    """

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.folder = folder
        self.index = folder / "index.json"
        self.reflog = folder / "reflog.jsonl"

    def read(self) -> dict[str, Descriptor]:
        """Return tag -> archive, in the order in which tags were added; empty if there is no such model.

        Raises:
            InvalidArchive: the index is damaged.
            InvalidArgument: it cannot be read.
        """
        try:
            with open_plain(self.index) as stream:
                raw = stream.read()
        except FileNotFoundError:
            if self.reflog.exists():
                raise InvalidArchive(f"{self.index} is missing, although tags were moved") from None
            return {}
        except OSError as error:
            raise InvalidArgument(f"the store's {self.index} cannot be read: {error.strerror}") from error
        entries = manifest.decode(Index, raw, str(self.index)).manifests
        tags = {entry.annotations.get(manifest.REF_NAME, ""): entry for entry in entries}
        for tag in tags:
            if not is_tag(tag):
                raise InvalidArchive(f"{self.index} contains an invalid tag: {tag[:40]!r}")
        return tags

    def history(self) -> list[Move]:
        """Return all moves, oldest first.

        Raises:
            InvalidArchive: the log is damaged.
            InvalidArgument: it cannot be read.
        """
        try:
            with open_plain(self.reflog) as stream:
                lines = stream.read().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidArgument(f"the store's {self.reflog} cannot be read: {error.strerror}") from error
        return [move for number, line in enumerate(lines, 1) if (move := self.parse(line, number)) is not None]

    def parse(self, line: bytes, number: int) -> Move | None:
        """Return the move in a line of the log; None if the line was truncated by a full disk or a crash.

        Raises:
            InvalidArchive: it is damaged.
        """
        if not line.endswith(b"}"):
            return None  # the move was logged again
        try:
            return Move.model_validate_json(line)
        except ValidationError as error:
            raise InvalidArchive(
                f"line {number} of {self.reflog} is damaged; ingot store fsck --repair moves such lines away"
            ) from error

    @contextmanager
    def locked(self, *, recover: bool = True) -> Iterator[Change]:
        """Lock the tags against other processes, and yield an object that changes them.

        Args:
            recover: first log the move of a process that was killed.

        Raises:
            OSError: the folder cannot be written.
            InvalidArchive: the log is damaged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open_plain(self.folder / ".lock", "ab+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            change = Change(self, lock)
            if recover and os.fstat(lock.fileno()).st_size:
                change.recover()
            yield change


class Change:
    """Changes locked tags; see :meth:`Tags.locked`.

    Args:
        tags: the tags.
        lock: the lock file. It contains a mark while the index may have been written, but the log not yet.
    """

    def __init__(self, tags: Tags, lock: IO[bytes]):
        self.tags = tags
        self._lock = lock

    def replace(
        self,
        tag: str,
        new: Descriptor | None,
        action: Action,
        *,
        expect: str = ANY,
        reason: str = "",
    ) -> Descriptor | None:
        """Point a tag at an archive, or at nothing, if its current value is as expected.

        Args:
            tag: the tag.
            new: the archive, or None to remove the tag.
            action: its name in the log.
            expect: a digest, ``ANY`` or ``NONE``.
            reason: for the log.

        Returns:
            The previous target.

        Raises:
            TagMoved: the tag differs from ``expect``; nothing is changed.
            InvalidArgument: there are too many tags.
            OSError: the folder cannot be written.
        """
        tags = self.tags.read()
        old = tags.get(tag)
        there = old.digest if old else NONE
        check_expected(f"{self.tags.name}:{tag}", there, expect)
        if there == (new.digest if new else NONE):
            return old
        if new is None:
            del tags[tag]
        else:
            tags[tag] = new
        if len(tags) > MAX_TAGS:
            raise InvalidArgument(f"a model can have {MAX_TAGS} tags; remove some with ingot store remove")
        self._lock.write(b"*")
        self._lock.flush()
        self._write(tags)
        if not is_attachments_tag(tag):
            move = Move(**_now(), tag=tag, old=old and old.digest, new=new and new.digest, action=action, reason=reason)
            try:
                self._log(move)
            except OSError as error:  # the tag has moved; the mark makes the next writer log it
                log.warning("%s could not be written, and will be completed later: %s", self.tags.reflog, error)
                return old
        self._lock.truncate(0)
        return old

    def repair_log(self, aside: Path) -> int:
        """Remove damaged lines from the log, whose original is kept as ``aside``; return their number."""
        lines = self.tags.reflog.read_bytes().split(b"\n")
        sound = [line for number, line in enumerate(lines, 1) if self._sound(line, number)]
        aside.parent.mkdir(parents=True, exist_ok=True)
        self.tags.reflog.replace(aside)
        with atomic_file(self.tags.reflog, durable=True) as stream:
            stream.write(b"".join(line + b"\n" for line in sound))
        self.recover()
        return sum(map(bool, lines)) - len(sound)

    def _sound(self, line: bytes, number: int) -> bool:
        try:
            return self.tags.parse(line, number) is not None
        except InvalidArchive:
            return False

    def recover(self) -> None:
        """Log the moves of a killed process that were made but not logged."""
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
        with open_plain(self.tags.reflog, "ab+") as stream:
            start = b""
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                start = b"" if stream.read(1) == b"\n" else b"\n"  # the last line is truncated
            stream.write(start + move.model_dump_json().encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def check_expected(tag: str, there: str | None, expect: str) -> None:
    """Raise TagMoved if the target of a tag (``name:tag``) is not as expected: a digest, ``NONE`` or ``ANY``."""
    if expect not in (ANY, there or NONE):
        raise TagMoved(f"'{tag}' is {there or NONE}, not {expect}: it was moved meanwhile")


def targets(history: list[Move], tag: str) -> list[str | None]:
    """Return the targets of a tag in the order of rollbacks; the last is the current one.

    A rollback removes the newest, so that a second rollback goes one further back.
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
        return getpass.getuser()[:200]
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())
