"""Saved models: TorchScript ``.pt`` and ExportedProgram ``.pt2`` files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ingot import foreign
from ingot.errors import ALLOW_CODE, InvalidArgument
from ingot.export.program import quiet
from ingot.export.source.checkpoint import check_device, check_whole


def load_torchscript(path: Path, map_location: str = "cpu", *, called: str | None = None) -> nn.Module:
    """Load a TorchScript file.

    Args:
        path: the file.
        map_location: the device that tensors are loaded to.
        called: the file's name in messages; its path by default.

    Raises:
        InvalidArgument: it is not a TorchScript file, or is damaged.
    """
    check_device(map_location)
    try:
        with quiet():
            return torch.jit.load(str(path), map_location=map_location)  # type: ignore[no-any-return, no-untyped-call]
    except (RuntimeError, ValueError) as error:
        check_whole(path, called or str(path))
        raise InvalidArgument(
            f"{called or path} is not a TorchScript file. A whole module pickled by torch.save cannot be read safely: "
            "save its state_dict instead. For a state_dict, name the model's code and pass this file with "
            f"--checkpoint: ingot export my_model:Net --checkpoint {path.name}"
        ) from error


def load_program(path: Path, *, allow_code: bool = False, called: str | None = None) -> nn.Module:
    """Load a file that ``torch.export.save`` wrote.

    Args:
        path: the file.
        allow_code: allow loading the file, which can run code in it.
        called: the file's name in messages; its path by default.

    Raises:
        InvalidArgument: it is not an exported program, or ``allow_code`` is not set.
    """
    if not allow_code:
        raise InvalidArgument(
            f"loading {called or path} can run code that it contains; {ALLOW_CODE}, or name the module that it was "
            "exported from"
        )

    def unread(error: Exception) -> str:
        check_whole(path, called or str(path))
        return (
            f"{called or path} does not contain an exported program (torch.export.save writes one): "
            f"{foreign.one_line(error)}"
        )

    with foreign.reported_as(InvalidArgument, unread), quiet():
        return torch.export.load(path).module()
