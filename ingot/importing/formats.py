"""Detect the format of a PyTorch file from its members, without unpickling or running anything."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import Literal

from ingot.errors import InvalidArgument
from ingot.importing.members import DAMAGED, InPieces

Kind = Literal["torchscript", "pickle", "exported", "compiled", "unknown"]


def kind_of(path: Path) -> Kind:
    """Return the format of a file; ``compiled`` is an AOTInductor package, ``pickle`` a file of ``torch.save``."""
    with path.open("rb") as stream:
        head = stream.read(2)
    if head == b"PK":
        return _kind_of_zip(path)
    return "pickle" if head[:1] == b"\x80" else "unknown"


def _kind_of_zip(path: Path) -> Kind:
    try:
        with contextlib.closing(InPieces(path)) as stream:
            names = [name.partition("/")[2] or name for name in zipfile.ZipFile(stream).namelist()]
    except (*DAMAGED, OSError):
        return "unknown"
    if any(name.startswith("data/aotinductor/") for name in names):
        return "compiled"
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return "torchscript"
    if any(name.endswith(".json") and name.startswith(("models/", "serialized_exported_program")) for name in names):
        return "exported"
    return "pickle" if "data.pkl" in names else "unknown"


def check_torchscript(path: Path, called: str) -> None:
    """Raise InvalidArgument if a file is not TorchScript; the message names its format.

    Args:
        path: the file.
        called: its name in the message.
    """
    kind = kind_of(path)
    if kind == "torchscript":
        return
    if kind == "pickle":
        raise InvalidArgument(
            f"{called} is a pickle of torch.save, not TorchScript: it holds weights without a model, or a whole "
            "module, which cannot be read safely; save the model with torch.jit.save, or name its code: "
            "ingot export my_model:Net --checkpoint weights.pt"
        )
    if kind == "unknown":
        raise InvalidArgument(f"{called} is not TorchScript, or is damaged; save the model with torch.jit.save")
    raise InvalidArgument(f"{called} is not TorchScript but a program of torch.export; name it .pt2")


def check_program(path: Path, called: str) -> None:
    """Raise InvalidArgument if a file is native code instead of an exported program; see :func:`check_torchscript`."""
    if kind_of(path) == "compiled":
        raise InvalidArgument(
            f"{called} is compiled by AOTInductor: native code without its source model; export that "
            "with ingot export --to aoti"
        )
