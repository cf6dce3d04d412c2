"""Saved models: TorchScript ``.pt`` and ExportedProgram ``.pt2`` files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ingot.errors import InvalidArgument
from ingot.export.program import quiet
from ingot.export.source.checkpoint import check_device, check_whole
from ingot.export.source.text import one_line


def load_torchscript(path: Path, map_location: str = "cpu", *, called: str | None = None) -> nn.Module:
    """Load a TorchScript file.

    Args:
        path: the file.
        map_location: the device that tensors are loaded to.
        called: what messages call the file; by default its path.

    Raises:
        InvalidArgument: it is not one, or is damaged.
    """
    check_device(map_location)
    try:
        with quiet():
            return torch.jit.load(str(path), map_location=map_location)  # type: ignore[no-any-return, no-untyped-call]
    except (RuntimeError, ValueError) as error:
        check_whole(path, called or str(path))
        raise InvalidArgument(
            f"{called or path} is not a TorchScript file. A whole module pickled by torch.save cannot be read safely: "
            f"save its state_dict instead. For a state_dict, name the model's code and pass this file by "
            f"--checkpoint: ingot export my_model:Net --checkpoint {path.name}"
        ) from error


def load_program(path: Path, *, allow_code: bool = False, called: str | None = None) -> nn.Module:
    """Load what ``torch.export.save`` wrote.

    Args:
        path: the file.
        allow_code: run code that it may hold.
        called: what messages call the file; by default its path.

    Raises:
        InvalidArgument: it is no such file, or ``allow_code`` is not set: loading one can run code.
    """
    if not allow_code:
        raise InvalidArgument(
            f"loading {called or path} can run code that it holds; if you trust where it comes from, allow that by "
            "--allow-code (INGOT_ALLOW_CODE=1, or allow_code=True), else name the module that it was made from"
        )
    try:
        with quiet():
            return torch.export.load(path).module()
    except Exception as error:
        check_whole(path, called or str(path))
        raise InvalidArgument(
            f"{called or path} holds no exported program (torch.export.save writes one): {one_line(error)}"
        ) from error
