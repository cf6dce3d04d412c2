"""The local store: a folder of archives under names and tags, safe for many processes.

STORE/
  blobs/sha256/<hex>            every blob, once, read-only
  repos/<name>/index.json       tag -> archive
  repos/<name>/reflog.jsonl     what each tag pointed to, and when
  repos/<name>/.lock            held only while index.json is replaced; readers take no lock
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ingot.errors import AlreadyExists, InvalidArgument, NotFound
from ingot.model_store import manifest
from ingot.model_store.archive import Archive
from ingot.model_store.blobs import BlobFolder, atomic_file
from ingot.model_store.manifest import Descriptor, Index
from ingot.model_store.references import Reference, is_version, version_key


def default_root() -> Path:
    """Return ``$INGOT_HOME``, or ``~/.ingot``."""
    return Path(os.environ.get("INGOT_HOME") or Path.home() / ".ingot")


class Store:
    """Archives by name and tag.

    Args:
        root: the folder; by default ``$INGOT_HOME``, else ``~/.ingot``. It is made by the first push.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.root = Path(root) if root is not None else default_root()
        self._blobs = BlobFolder(self.root / "blobs", durable=True)

    def push(self, archive: Archive, reference: str | Reference) -> Reference:
        """Copy an archive into the store and point a tag at it.

        A version tag (``1``, ``1.2.0``, ``v2``) is never moved; pushing the same archive again changes nothing.
        Any other tag is an alias and moves.

        Returns:
            The reference with the archive's digest.

        Raises:
            InvalidArgument: the reference has no tag, or the store cannot be written.
            InvalidArchive: a blob of the archive is damaged; nothing is stored.
            AlreadyExists: the version holds another archive.
        """
        ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
        if ref.tag is None or ref.digest or ref.variant:
            raise InvalidArgument(f"'{ref}' cannot be pushed to; write name:tag, such as {ref.name}:1")
        try:
            self._check_free(ref, self._tags(ref.name), archive)
            archive.check_own()
            archive.copy_to(self._blobs)  # blobs first: whoever sees the tag finds all that it refers to
            with self._lock(ref.name):
                tags = self._tags(ref.name)
                self._check_free(ref, tags, archive)
                previous = tags.get(ref.tag)
                if previous is None or previous.digest != archive.digest:
                    tags[ref.tag] = archive.descriptor
                    self._write(ref.name, tags)
                    self._log(ref, previous, archive.descriptor)
        except OSError as error:
            raise InvalidArgument(f"the store at {self.root} cannot be written: {error.strerror or error}") from error
        return Reference(ref.name, ref.tag, archive.digest)

    def get(self, reference: str | Reference) -> Archive:
        """Return the archive that a reference names; without a tag, the highest version.

        Raises:
            NotFound: the store holds no such name, tag or digest; the message lists what there is.
        """
        return self.find(reference)[0]

    def resolve(self, reference: str | Reference) -> Reference:
        """Return the reference with its tag and digest filled in.

        Raises:
            NotFound: the store holds no such name, tag or digest.
        """
        return self.find(reference)[1]

    def find(self, reference: str | Reference) -> tuple[Archive, Reference]:
        """Return the archive and the resolved reference, both from one reading of the tags.

        Raises:
            NotFound: the store holds no such name, tag or digest.
        """
        ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
        tags = self._tags(ref.name)
        if not tags:
            known = ", ".join(self.names()) or "nothing yet"
            raise NotFound(f"the store at {self.root} has no model '{ref.name}'; it holds: {known}")
        if ref.tag is not None:
            tag = ref.tag
        elif ref.digest is not None:
            tag = next((tag for tag, entry in tags.items() if entry.digest == ref.digest), "")
        else:
            tag = _latest(tags)
        if tag not in tags or (ref.digest or tags[tag].digest) != tags[tag].digest:
            raise NotFound(f"the store at {self.root} has no '{ref}'; '{ref.name}' has: {', '.join(tags)}")
        return Archive(self._blobs, tags[tag]), Reference(ref.name, tag, tags[tag].digest, ref.variant)

    def names(self) -> list[str]:
        """Return the names of all models, sorted.

        Raises:
            InvalidArgument: the store is not a folder.
        """
        if self.root.exists() and not self.root.is_dir():
            raise InvalidArgument(f"the store at {self.root} cannot be read: it is not a folder")
        repos = self.root / "repos"
        return sorted(path.parent.relative_to(repos).as_posix() for path in repos.rglob("index.json") if path.is_file())

    def tags(self, name: str) -> dict[str, str]:
        """Return tag -> digest of a model; empty when there is no such model."""
        return {tag: entry.digest for tag, entry in self._tags(name).items()}

    def next_version(self, name: str) -> str:
        """Return the lowest whole version above all that a model has; ``1`` for a new one."""
        return _next(self._tags(name))

    def _tags(self, name: str) -> dict[str, Descriptor]:
        path = self.root / "repos" / name / "index.json"
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InvalidArgument(f"the store at {self.root} cannot be read: {error.strerror}") from error
        entries = manifest.decode(Index, raw, str(path)).manifests
        return {entry.annotations.get(manifest.REF_NAME, ""): entry for entry in entries}

    def _check_free(self, ref: Reference, tags: dict[str, Descriptor], archive: Archive) -> None:
        taken = tags.get(str(ref.tag))
        if taken is not None and is_version(str(ref.tag)) and taken.digest != archive.digest:
            raise AlreadyExists(
                f"'{ref.name}:{ref.tag}' holds another archive ({taken.digest[:19]}...) and a version never changes; "
                f"push as another version, such as {ref.name}:{_next(tags)}"
            )

    def _write(self, model: str, tags: dict[str, Descriptor]) -> None:
        folder = self.root / "repos" / model
        entries = tuple(
            entry.model_copy(update={"annotations": {manifest.REF_NAME: tag}}) for tag, entry in tags.items()
        )
        for name, content in (
            ("oci-layout", manifest.LAYOUT),
            ("index.json", manifest.encode(Index(manifests=entries))),
        ):
            with atomic_file(folder / name, durable=True) as stream:
                stream.write(content)

    def _log(self, ref: Reference, old: Descriptor | None, new: Descriptor) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "tag": ref.tag,
            "old": old.digest if old else None,
            "new": new.digest,
        }
        with (self.root / "repos" / ref.name / "reflog.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        folder = self.root / "repos" / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _latest(tags: dict[str, Descriptor]) -> str:
    versions = [tag for tag in tags if is_version(tag)]
    return max(versions, key=version_key) if versions else next(reversed(tags))


def _next(tags: dict[str, Descriptor]) -> str:
    highest = max((version_key(tag) for tag in tags if is_version(tag)), default=version_key("0"))
    whole = highest[0][1]
    return str(whole if version_key(str(whole)) > highest else whole + 1)
