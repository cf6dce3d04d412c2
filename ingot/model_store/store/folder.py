"""The folder of a store: its schema, the names in it, and what cannot lie there."""

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
    """The folder of a store. Others may write to it too, so what lies there is looked at before it is used.

    Args:
        root: the folder; it is made by the first write.
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
        except OSError as error:  # what cannot be seen must not be taken for absent: its blobs would be collected
            raise InvalidArgument(f"the store's {error.filename} cannot be read: {error.strerror}") from error
        return sorted(found)

    def tags_of(self, name: str) -> Tags:
        """Return the tags of a model as they are kept.

        Raises:
            InvalidArgument: their folder is a link.
        """
        folder = self.root / "repos"
        for part in name.split("/"):
            folder /= part
            _check_no_link(folder)
        return Tags(name, folder)

    def check(self) -> None:
        """Raise InvalidArgument if the store is no folder, or is of a newer schema."""
        if self.root.exists() and not self.root.is_dir():
            raise InvalidArgument(f"the store at {self.root} cannot be read: it is not a folder")
        for name in ("blobs", "blobs/sha256", "repos", "tmp", "leases", "derived", "damaged"):
            _check_no_link(self.root / name)
        path = self.root / "store.json"
        try:
            with open_plain(path) as stream:
                manifest.decode(_Schema, stream.read(MAX_DOCUMENT_BYTES), str(path))
        except FileNotFoundError:
            return  # of a version that wrote none, or not made yet
        except OSError as error:
            raise InvalidArgument(f"the store at {self.root} cannot be read: {error.strerror}") from error
        except InvalidArchive as error:
            raise InvalidArgument(
                f"the store at {self.root} was made by a newer Ingot, or is damaged: {error}"
            ) from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make sure that the store can be written, and say so where it cannot."""
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
    """Raise InvalidArgument if a folder of the store is a link: it could lead to files that are none of the store's."""
    if os.path.islink(path):  # noqa: PTH114 - Path.is_symlink raises on names that are too long
        raise InvalidArgument(f"{path} is a link, which a folder of a store cannot be; move the whole store instead")


def _raise(error: OSError) -> None:
    raise error
