"""Finding out what a file or folder is, and the models in it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ingot.errors import InvalidArgument, NotFound
from ingot.importing import mar, triton
from ingot.importing.members import LIMITS, FolderMembers, Limits, Members, reading
from ingot.importing.record import Candidate, Consent, Imported
from ingot.importing.tars import TarMembers
from ingot.importing.zips import ZipMembers
from ingot.model_store.references import name_from

_PROGRAMS = (".pt", ".pth", ".pt2", ".bin", ".safetensors", ".ckpt")
# Where a tar file says that it is one.
_TAR_MAGIC = slice(257, 262)


@contextlib.contextmanager
def candidates(path: Path, consent: Consent, limits: Limits = LIMITS) -> Iterator[tuple[Candidate, ...]]:
    """Yield the models of a source, which can be read until the block ends; what was unpacked is removed then.

    Args:
        path: an ``.onnx`` file, TorchServe's archive or the folder of one, or a folder of Triton's.
        consent: what the user agreed to.
        limits: bounds on what an archive unpacks to.

    Raises:
        NotFound: there is no such file or folder.
        InvalidArgument: it is none of these, or damaged.
    """
    with reading(path):
        found = _in_place(path)
    if found:
        yield tuple(_consenting(candidate, consent) for candidate in found)
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="ingot-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InvalidArgument(f"no temporary folder can be made: {error.strerror}; set TMPDIR to one") from error
    with folder as scratch, contextlib.closing(_members(path, Path(scratch), limits)) as members:
        yield (_consenting(mar.candidate(members, Path(scratch), consent), consent),)


def _consenting(candidate: Candidate, consent: Consent) -> Candidate:
    """Return a model that is not read without consent if it is TorchScript, whose operators can write files."""

    def read() -> Imported:
        found = candidate.read()
        if found.format == "torchscript":
            inputs = "" if found.inputs else " (--input must then say what it takes)"
            consent.need_code(
                f"{found.called} is TorchScript, a program, which is run to export it and can write files{inputs}"
            )
        return found

    return replace(candidate, read=read)


def _in_place(path: Path) -> tuple[Candidate, ...]:
    """Return the models that nothing need be unpacked for; none of an archive of TorchServe."""
    if not path.exists():
        raise NotFound(f"there is no file or folder {path}")
    if path.is_dir():
        return () if (path / mar.MANIFEST).is_file() else triton.candidates(path)
    return (_graph(path),) if path.suffix.lower() == ".onnx" else ()


def _graph(path: Path) -> Candidate:
    return Candidate(str(path), name_from(path.stem), None, lambda: Imported(str(path), "onnx", path), called=path.stem)


def _members(path: Path, scratch: Path, limits: Limits) -> Members:
    if path.is_dir():
        return FolderMembers(path, limits)
    if not path.is_file():
        raise InvalidArgument(f"{path} is a device, pipe or socket; name a file or folder")
    if path.suffix.lower() == ".ingot":
        raise InvalidArgument(f"{path} is an archive of Ingot's already; ingot push takes it into the store")
    if path.suffix.lower() in _PROGRAMS:
        raise InvalidArgument(f"{path} is a model without an archive around it: ingot export takes it")
    with reading(path):
        with path.open("rb") as stream:
            head = stream.read(_TAR_MAGIC.stop)
        if head[:2] == b"PK":
            return ZipMembers(path, limits)
        if head[:2] == b"\x1f\x8b" or head[_TAR_MAGIC] == b"ustar":
            return TarMembers(path, scratch, limits)
    raise InvalidArgument(
        f"{path} is nothing that can be imported: that is an .onnx file, a .mar of TorchServe (zip or tar), or a "
        "folder of TorchServe's or Triton's"
    )
