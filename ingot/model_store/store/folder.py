"""The folder of a store: its schema, the model names in it, and checks of its content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ingot.errors import InvalidArchive, InvalidArgument, write_error
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES
from ingot.model_store.blobs.files import atomic_file, open_plain
from ingot.model_store.format import manifest
from ingot.model_store.store.tags import Tags


class _Schema(BaseModel):
    """``store.json``."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")

    schema_version: Literal[1] = 1


class StoreFolder:
    """The folder of a store. Others may write to it too, so its content is checked before use.

    Args:
        root: the folder; created by the first write.
    """

    def __init__(self, root: Path):
        self.root = root

    def names(self) -> list[str]:
        """Return the names of all models, sorted.

        Raises:
            InvalidArgument: the store is not a folder.
        """
        self.check()
        repos = self.root / "repos"
        found = []
        try:
            for folder, folders, files in os.walk(repos, onerror=_raise):
                for path in (Path(folder) / name for name in folders):
                    _check_no_link(path)
                if "index.json" in files or "reflog.jsonl" in files:
                    found.append(Path(folder).relative_to(repos).as_posix())
        except FileNotFoundError:
            return []
        except OSError as error:  # unreadable folders must not count as absent: their blobs would be collected
            raise InvalidArgument(f"the store's {error.filename} cannot be read: {error.strerror}") from error
        return sorted(found)

    def tags_of(self, name: str) -> Tags:
        """Return the stored tags of a model.

        Raises:
            InvalidArgument: their folder is a link.
        """
        folder = self.root / "repos"
        for part in name.split("/"):
            folder /= part
            _check_no_link(folder)
        return Tags(name, folder)

    def check(self) -> None:
        """Raise InvalidArgument if the store is not a folder, or has a newer schema."""
        if self.root.exists() and not self.root.is_dir():
            raise InvalidArgument(f"the store at {self.root} cannot be read: it is not a folder")
        for name in ("blobs", "blobs/sha256", "repos", "tmp", "leases", "derived", "damaged"):
            _check_no_link(self.root / name)
        path = self.root / "store.json"
        try:
            with open_plain(path) as stream:
                manifest.decode(_Schema, stream.read(MAX_DOCUMENT_BYTES), str(path))
        except FileNotFoundError:
            return  # by a version without this file, or not created yet
        except OSError as error:
            raise InvalidArgument(f"the store at {self.root} cannot be read: {error.strerror}") from error
        except InvalidArchive as error:
            raise InvalidArgument(
                f"the store at {self.root} was made by a newer Ingot, or is damaged: {error}"
            ) from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Create the store if needed, and report why it cannot be written."""
        self.check()
        try:
            path = self.root / "store.json"
            if not path.exists():
                self.root.mkdir(parents=True, exist_ok=True)
                with atomic_file(path, durable=True) as stream:
                    stream.write(manifest.encode(_Schema()))
            yield
        except OSError as error:
            raise write_error(f"the store at {self.root} cannot be written", error) from error


def _check_no_link(path: Path) -> None:
    """Raise InvalidArgument if a folder of the store is a link, which could lead outside of the store."""
    if os.path.islink(path):  # noqa: PTH114 - Path.is_symlink raises on names that are too long
        raise InvalidArgument(f"{path} is a link, which is not allowed inside a store; move the whole store instead")


def _raise(error: OSError) -> None:
    raise error
