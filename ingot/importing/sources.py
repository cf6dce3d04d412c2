"""Detect the format of a source, and find the models in it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ingot.errors import InvalidArgument, NotFound, write_error
from ingot.importing import mar, other_servers, triton
from ingot.importing.mar_manifest import MANIFEST, WORKFLOW
from ingot.importing.members import LIMITS, FolderMembers, Limits, Members, reading
from ingot.importing.record import Candidate, Consent, Imported
from ingot.importing.unpacking import TarMembers, ZipMembers
from ingot.model_store.references import name_from

_PROGRAMS = (".pt", ".pth", ".pt2", ".bin", ".safetensors", ".ckpt")
# The position of the magic bytes of a tar file.
_TAR_MAGIC = slice(257, 262)


@contextlib.contextmanager
def candidates(path: Path, consent: Consent, limits: Limits = LIMITS) -> Iterator[tuple[Candidate, ...]]:
    """Yield the models of a source. They can be read until the block ends, which removes unpacked files.

    Args:
        path: an ``.onnx`` file, a TorchServe archive or its folder, or a Triton folder.
        consent: the user's consent.
        limits: the bounds on unpacking.

    Raises:
        NotFound: there is no such file or folder.
        InvalidArgument: the source is none of these, or is damaged.
    """
    with reading(path):
        found = _in_place(path)
    if found:
        yield tuple(_consenting(candidate, consent) for candidate in found)
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="ingot-", ignore_cleanup_errors=True)
    except OSError as error:
        raise write_error("cannot create a temporary folder", error, "; set TMPDIR to a writable folder") from error
    with folder as scratch, contextlib.closing(_members(path, Path(scratch), limits)) as members:
        yield tuple(_consenting(each, consent) for each in mar.candidates(members, Path(scratch), consent))


def _consenting(candidate: Candidate, consent: Consent) -> Candidate:
    """Return a model that needs consent if it is TorchScript, whose operators can write files."""

    def read() -> Imported:
        found = candidate.read()
        if found.format == "torchscript":
            inputs = "" if found.inputs else " (--input must then describe its inputs)"
            consent.need_code(
                f"{found.called} is TorchScript, a program, which runs during the export and can write files{inputs}"
            )
        return found

    return replace(candidate, read=read)


def _in_place(path: Path) -> tuple[Candidate, ...]:
    """Return the models that need no unpacking; none for a TorchServe archive."""
    if not path.exists():
        raise NotFound(f"there is no file or folder {path}")
    if path.is_dir():
        packed = any((path / name).is_file() for name in (MANIFEST, WORKFLOW, *other_servers.FILES))
        return () if packed else triton.candidates(path)
    return (_graph(path),) if path.suffix.lower() == ".onnx" else ()


def _graph(path: Path) -> Candidate:
    return Candidate(str(path), name_from(path.stem), None, lambda: Imported(str(path), "onnx", path), called=path.stem)


def _members(path: Path, scratch: Path, limits: Limits) -> Members:
    if path.is_dir():
        return FolderMembers(path, limits)
    if not path.is_file():
        raise InvalidArgument(f"{path} is a device, pipe or socket; name a file or folder")
    if path.suffix.lower() == ".ingot":
        raise InvalidArgument(f"{path} is already an Ingot archive; ingot copy stores it")
    if path.suffix.lower() in _PROGRAMS:
        raise InvalidArgument(f"{path} is a saved model without an archive: ingot export converts it")
    with reading(path):
        with path.open("rb") as stream:
            head = stream.read(_TAR_MAGIC.stop)
        if head[:2] == b"PK":
            return ZipMembers(path, limits)
        if head[:2] == b"\x1f\x8b" or head[_TAR_MAGIC] == b"ustar":
            return TarMembers(path, scratch, limits)
    raise InvalidArgument(
        f"{path} cannot be imported: expected an .onnx file, a .mar or .war file of TorchServe (zip or tar), "
        "SageMaker's model.tar.gz with code/inference.py, or a "
        "folder of TorchServe, MLflow or Triton"
    )
