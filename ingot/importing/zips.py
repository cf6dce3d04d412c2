"""The members of a zip file."""

from __future__ import annotations

import stat
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

from ingot.errors import InvalidArgument
from ingot.importing.members import DAMAGED, LIMITS, InPieces, Limits, Members, Meter, reason

# A local header, without the name.
_HEADER = 30
_ENCRYPTED = 0x1


class ZipMembers(Members):
    """A zip file, as TorchServe's archiver writes it: plain files, stored or deflated.

    Raises:
        InvalidArgument: it is damaged, encrypted, or malicious.
    """

    def __init__(self, path: Path, limits: Limits = LIMITS):
        super().__init__(path, limits, Meter(path, limits))
        self._file = InPieces(path)
        try:
            self._zip = zipfile.ZipFile(self._file)
            entries = self._zip.infolist()
            for entry in entries:
                self._check(entry)
            self._check_apart(entries)
        except DAMAGED as error:
            self.close()
            raise InvalidArgument(f"{path} is damaged or truncated: {reason(error)}") from error
        except InvalidArgument:
            self.close()
            raise

    def open(self, name: str) -> IO[bytes]:  # type: ignore[override] # zipfile's streams are not called BinaryIO
        return self._zip.open(name)

    def close(self) -> None:
        self._file.close()

    def _check(self, entry: zipfile.ZipInfo) -> None:
        if entry.orig_filename != entry.filename:  # cut at a NUL
            raise InvalidArgument(
                f"{self.path} holds a file called {entry.orig_filename[:200]!r}, which is not a valid name"
            )
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.is_dir() and kind in (0, stat.S_IFDIR):
            if entry.filename.strip("/"):
                return
            raise InvalidArgument(f"{self.path} holds a folder without a name; pack it again")
        if kind not in (0, stat.S_IFREG):
            raise InvalidArgument(
                f"{self.path} holds '{entry.filename[:200]}' as a link or special file; pack it with plain files"
            )
        self.add(entry.filename, entry.file_size)
        if entry.flag_bits & _ENCRYPTED:
            raise InvalidArgument(f"'{entry.filename}' in {self.path} is encrypted; pack it without a password")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InvalidArgument(
                f"'{entry.filename}' in {self.path} is packed by method {entry.compress_type}; pack it by deflate"
            )

    def _check_apart(self, entries: list[zipfile.ZipInfo]) -> None:
        """Check that members do not overlap, as in zip bombs."""
        spans = sorted((entry.header_offset, entry.compress_size + _HEADER, entry.filename) for entry in entries)
        # The type stub of ZipFile lacks the offset of the directory.
        end = (cast("int", vars(self._zip)["start_dir"]), 0, "its directory")
        for (start, length, name), (following, _, _) in pairwise([*spans, end]):
            if start < 0 or start + length > following:
                raise InvalidArgument(f"'{name}' in {self.path} overlaps another file: it is malicious")
