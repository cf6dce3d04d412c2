"""Where archives are kept: the common interface of the store and registries, and how users name archives."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ingot.errors import InvalidArgument, NotFound, PermissionDenied
from ingot.model_store.blobs.remote import is_object
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import Reference
from ingot.model_store.store.store import Store
from ingot.model_store.store.tags import ANY

_CLASS = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)", re.DOTALL)
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.\-]*)=(?P<source>.+)", re.DOTALL)


class Place(Protocol):
    """A store or a registry. Every method of a registry raises Unavailable if it cannot be reached."""

    def names(self) -> list[str]:
        """Return the names of all models, sorted."""
        ...

    def tags(self, name: str) -> Mapping[str, str]:
        """Return tag -> digest of a model; empty if there is no such model."""
        ...

    def digest_of(self, name: str, tag: str) -> str | None:
        """Return the digest that a model's tag points to; None if there is no such tag. Other tags are not read.

        Raises:
            InvalidArgument: ``tag`` is not a tag.
        """
        ...

    def find(self, reference: str | Reference) -> tuple[Archive, Reference]:
        """Return the archive with its attachments, and the reference with its tag and digest filled in.

        Without a tag it is the highest version, or the only tag; with a digest alone, the archive of that digest. A
        registry finds that even if no tag points to it; the tag is then None.

        Raises:
            NotFound: there is no such name, tag or digest; the message lists those that exist. Or there are several
                tags, none of them a version, and none was named.
        """
        ...

    def push(
        self, archive: Archive, reference: str | Reference, *, expect: str = ANY, transfer: Transfer | None = None
    ) -> Reference:
        """Copy an archive with its attachments, and point a tag at it.

        Raises:
            AlreadyExists: the version holds another archive.
            TagMoved: the tag differs from ``expect``; if it does so from the start, nothing is copied.
        """
        ...

    def promote(self, reference: str | Reference, alias: str, *, expect: str = ANY) -> Reference:
        """Point an alias at the archive of a reference.

        Raises:
            InvalidArgument: ``alias`` is not a tag.
            AlreadyExists: ``alias`` is a version that holds another archive.
            TagMoved: the alias differs from ``expect``.
        """
        ...

    def remove(self, reference: str | Reference, *, expect: str = ANY) -> Reference:
        """Remove a tag if it points to the reference's digest, if any, and matches ``expect``.

        Raises:
            NotFound: there is no such tag, or it points to another digest than the reference's.
            TagMoved: the tag differs from ``expect``.
        """
        ...

    def attach(self, archive: Archive, name: str, *, replace: bool = False) -> None:
        """Store the attachments of an existing archive, in addition to or instead of earlier ones.

        Raises:
            NotFound: the archive is not here.
            Unsupported: a registry maintains the list of attachments itself, so that nothing can be replaced.
        """
        ...


def open_place(reference: str | Reference, store: Store, chunk_bytes: int | None = None) -> tuple[Place, Reference]:
    """Return the place of a reference, and the parsed reference.

    Args:
        reference: ``name:tag`` of the local store, or ``oci://host/name:tag``.
        store: the local store.
        chunk_bytes: size of upload requests to a registry; None sends each blob whole.

    Raises:
        InvalidArgument: it is not a reference.
    """
    ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
    if ref.registry is None:
        return store, ref
    from ingot.model_store.registry import Registry

    return Registry(ref.registry, chunk_bytes=chunk_bytes), ref


@dataclass(frozen=True)
class Located:
    """The location of an archive that a user named: a file, an object, or a place with a reference.

    ``name`` is the user's text before the ``#``, ``variant`` the text after it. Exactly one of ``path``, ``url`` and
    ``place`` (with ``reference``) is set.
    """

    name: str
    variant: str | None = None
    path: Path | None = None
    url: str | None = None
    place: Place | None = None
    reference: Reference | None = None

    def find(self) -> tuple[Archive, Reference]:
        """Open the archive. For a file, the returned reference is the archive's own name.

        Raises:
            NotFound: there is no such file, object, name, tag or digest.
            InvalidArchive: it is not an archive, or the parts that are read here are damaged.
            Unavailable: the registry or the object storage cannot be reached.
        """
        if self.place is not None and self.reference is not None:
            with _file_of_that_name(self.name):
                return self.place.find(self.reference)
        if (code := self.code) is not None:
            raise InvalidArgument(
                f"{self.name} is a class in Python, not an archive; ingot export {self.name} -o "
                f"{code[1].lower()}.ingot makes one of it"
            )
        if self.path is not None and self.path.suffix == ".onnx" and os.path.isfile(self.path):  # noqa: PTH113
            raise InvalidArgument(f"{self.name} is an ONNX model, not an archive; ingot export converts it")
        archive = Archive.open(self.url or self.path or self.name)
        return archive, Reference(archive.name, variant=self.variant)

    @property
    def code(self) -> tuple[Path, str] | None:
        """The file and the name of a class in Python; None if it is something else."""
        return None if self.path is None else python_class(str(self.path))

    @property
    def bare(self) -> Path | None:
        """The file of a bare ``.onnx`` model, or of a class in Python; None for an archive."""
        if (code := self.code) is not None:
            return code[0]
        return self.path if self.path is not None and self.path.suffix == ".onnx" else None

    def open(self) -> Archive:
        """Open the archive; raises the same errors as :meth:`find`."""
        return self.find()[0]

    def whole(self) -> Located:
        """Return this location if it names a whole archive.

        Raises:
            InvalidArgument: it names a single variant.
        """
        if self.variant is not None:
            raise InvalidArgument(f"'{self.name}' is used with all its variants here; leave #{self.variant} out")
        return self


def locate(text: str, store: Store) -> Located:
    """Return the location of an archive that a user named. Nothing is opened yet.

    Args:
        text: a file (a path that ends in .ingot or .onnx, or begins with ``.``, ``/`` or ``~``), a class in a Python
            file (``model.py:Model``), the URL of an object
            (``s3://bucket/digits.ingot``, ``file:///digits.ingot``), or a reference to the store or to a registry; each
            with or without ``#variant``.
        store: the local store.

    Raises:
        InvalidArgument: it is none of them.
    """
    name, variant = split_variant(text)
    if is_file(name):
        return locate_file(text)
    with _file_of_that_name(name):
        place, reference = open_place(name, store)
    return Located(name, variant, place=place, reference=replace(reference, variant=variant))


def locate_file(text: str) -> Located:
    """Return the location of a file of any name, or of an object.

    Raises:
        InvalidArgument: it is not a possible file name.
    """
    name, variant = split_variant(text)
    if is_object(name):
        return Located(name, variant, url=name)
    if "\0" in name:
        raise InvalidArgument(f"'{name}' cannot be the name of a file")
    return Located(name, variant, path=Path(os.path.expanduser(name)))  # noqa: PTH111 - Path.expanduser raises for unknown users


def is_file(text: str) -> bool:
    """Return whether a text names a file or an object rather than a reference."""
    if "://" in text:
        return is_object(text)
    return text.endswith((".ingot", ".onnx")) or text.startswith((".", "/", "~")) or python_class(text) is not None


def python_class(text: str) -> tuple[Path, str] | None:
    """Return the file and the name of ``model.py:Model``; None if a text is not of that form."""
    match = _CLASS.fullmatch(text)
    return None if match is None else (Path(match["file"]), match["name"])


def served_classes(file: Path) -> list[str]:
    """Return the names of the classes of a Python file that have ``predict`` or ``predict_one``; none of it is run."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [
        each.name
        for each in body
        if isinstance(each, ast.ClassDef)
        and any(getattr(part, "name", "") in ("predict", "predict_one") for part in each.body)
    ]


def split_name(text: str) -> tuple[str | None, str]:
    """Return the name of ``NAME=SOURCE``, or None, and the source."""
    match = _NAMED.fullmatch(text)
    return (match["name"], match["source"]) if match else (None, text)


def split_variant(text: str) -> tuple[str, str | None]:
    """Return the parts before and after the last ``#``, or None for the latter; file names may contain one."""
    name, mark, variant = text.rpartition("#")
    # The methods of Path raise on names that are too long.
    if not mark or os.path.exists(os.path.expanduser(text)):  # noqa: PTH110, PTH111
        return text, None
    return name, variant


@contextmanager
def _file_of_that_name(name: str) -> Iterator[None]:
    """If a reference fails and a file has that name, explain how to name the file."""
    try:
        yield
    except (NotFound, InvalidArgument, PermissionDenied) as error:
        if os.path.isfile(name):  # noqa: PTH113
            raise NotFound(f"{error}; for the file of that name write ./{name}").hinting(error) from error
        raise
