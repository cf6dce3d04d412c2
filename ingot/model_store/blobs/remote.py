"""Archive files in object storage and on web servers, read in place by byte ranges.

Needs ``ingot-serve[objects]`` (obstore). Credentials and regions are found as by the clouds' own tools: from variables
such as ``AWS_ACCESS_KEY_ID``, from files and from the machine's identity.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ingot.errors import (
    IngotError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    missing_package,
)

SCHEMES = ("s3", "gs", "az", "abfss", "https", "file")
_BUFFER_BYTES = 1 << 20


def is_object(text: str) -> bool:
    """Return whether a text is the URL of an object, such as ``s3://bucket/digits.ingot``."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and scheme in SCHEMES


@dataclass(frozen=True)
class ObjectFile:
    """An object as a :class:`~ingot.model_store.format.tar.TarSource`.

    Args:
        url: such as ``s3://bucket/models/digits.ingot``.
    """

    url: str

    @property
    def name(self) -> str:
        return self.url

    def size(self) -> int:
        """Return its length in bytes.

        Raises:
            NotFound: there is no such object.
            InvalidArgument: the URL is invalid.
            PermissionDenied: access is denied.
            Unavailable: the service cannot be reached.
            Unsupported: obstore is not installed.
        """
        obstore, store, path = self._located()
        with self.errors(obstore):
            return int(obstore.head(store, path)["size"])

    def open(self) -> io.RawIOBase:
        obstore, store, path = self._located()
        with self.errors(obstore):
            return _Reader(self, obstore, obstore.open_reader(store, path, buffer_size=_BUFFER_BYTES))

    def _located(self) -> tuple[Any, Any, str]:
        try:
            import obstore
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise missing_package("obstore", "reading archives from object storage", "objects") from error
        folder, _, path = self.url.rpartition("/")
        if not path or folder.endswith(":/"):
            raise InvalidArgument(f"'{self.url}' does not name an object; write s3://bucket/folder/digits.ingot")
        with self.errors(obstore):
            return obstore, from_url(folder), path

    @contextmanager
    def errors(self, obstore: Any) -> Iterator[None]:
        """Convert errors of obstore."""
        try:
            yield
        except (obstore.exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise self._converted(obstore, error) from error

    def _converted(self, obstore: Any, error: Exception) -> IngotError:
        reason = " ".join(str(error).split("\n")[0].split())[:300]
        kinds = obstore.exceptions
        if isinstance(error, (FileNotFoundError, kinds.NotFoundError)):
            return NotFound(f"there is no object {self.url}")
        denied = {kinds.PermissionDeniedError: PermissionDenied, kinds.UnauthenticatedError: Unauthenticated}
        if (refused := denied.get(type(error))) is not None:
            return refused(f"{self.url} cannot be read: access is denied; check the cloud credentials on this machine")
        if isinstance(error, (kinds.GenericError, OSError)):
            return Unavailable(f"{self.url} cannot be read: {reason}")
        return InvalidArgument(f"{self.url} cannot be read: {reason}")


class _Reader(io.RawIOBase):
    """An obstore reader as a Python file."""

    def __init__(self, file: ObjectFile, obstore: Any, reader: Any):
        self._file = file
        self._obstore = obstore
        self._reader = reader

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with self._file.errors(self._obstore):
            content = self._reader.read(len(buffer))
        buffer[: len(content)] = memoryview(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()
