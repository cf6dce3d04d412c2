"""Sources of an export: a module by its import path, a saved model, or a folder that contains one.

This file finds the kind of a source; subject.py binds the module to its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound
from ingot.export.arguments import FileArrays
from ingot.export.source import checkpoint as checkpoints
from ingot.export.source import imported, repositories
from ingot.export.source.checkpoint import load_checkpoint
from ingot.export.source.files import load_model_file, load_program, load_torchscript
from ingot.tensors import arrays

_SUFFIXES = (".onnx", ".pt", ".pth", ".pt2")

__all__ = [
    "load_checkpoint",
    "load_example",
    "load_model_file",
    "load_program",
    "load_source",
    "load_torchscript",
]


def load_source(
    source: str,
    checkpoint: str | Path | None = None,
    map_location: str = "cpu",
    *,
    allow_code: bool = False,
    remark: Callable[[str], None] = lambda text: None,
) -> nn.Module | Path:
    """Return the module that ``source`` names, or the path if it is an ``.onnx`` file.

    Args:
        source: ``package.module:attribute`` (a module, class or factory), a TorchScript ``.pt``, an ExportedProgram
            ``.pt2`` or an ``.onnx`` file, ``folder:entry`` of a local torch.hub repository, or the folder of a
            transformers model.
        checkpoint: a file with the module's ``state_dict``. The ``hyper_parameters`` in that of a LightningModule
            are the arguments of the class.
        map_location: the device that tensors are loaded to, as in ``torch.load``.
        allow_code: run code that is part of a model: in a ``.pt2`` file, or in a transformers folder with an
            ``auto_map``.
        remark: called with notes on the weights.

    Raises:
        NotFound: the file, the Python module or the attribute does not exist.
        InvalidArgument: the attribute does not return an ``nn.Module``, the checkpoint does not fit it, or
            ``allow_code`` is needed.
        Unsupported: a package that the source needs is not installed.
    """
    saved = _saved(source, map_location, allow_code)
    if saved is not None and checkpoint is not None:
        raise InvalidArgument(
            f"{source} contains its weights; use --checkpoint with package.module:attribute, or leave it out"
        )
    if saved is not None:
        return saved
    found = imported.find(source)
    if checkpoint is None:
        module = imported.make(found, source.partition(":")[2])
        if isinstance(found, type) and next(module.parameters(), None) is not None:
            remark(f"without --checkpoint, the weights are those that {found.__name__}() creates")
        return module
    path = Path(checkpoint).expanduser()
    arguments = checkpoints.hyperparameters(path) if isinstance(found, type) else None
    module = imported.make(found, source.partition(":")[2], arguments)
    load_checkpoint(module, path, map_location, remark=remark)
    return module


def names_code(source: str) -> bool:
    """Return whether a source is an import path, not a file or folder."""
    path, folder = Path(source).expanduser(), Path(source.rpartition(":")[0]).expanduser()
    return path.suffix not in _SUFFIXES and not path.is_dir() and not (":" in source and folder.is_dir())


def load_example(text: str | None) -> Any:
    """Return example inputs: the arrays of an ``.npz`` file, or ``package.module:attribute``, called if it is callable.

    Raises:
        NotFound: there is no such file, Python module or attribute.
        InvalidArgument: it is not an ``.npz`` file, or importing or calling it fails.
    """
    if text is None:
        return None
    if ":" not in text or Path(text).is_file():
        return FileArrays(arrays.load_npz(text))
    found = imported.find(text)
    if not callable(found):
        return found
    with foreign.reported_as(InvalidArgument, f"calling {text} failed"):
        return found()


def _saved(source: str, map_location: str, allow_code: bool) -> nn.Module | Path | None:
    """Return the model in a file or folder, or None if ``source`` is neither."""
    path = Path(source).expanduser()
    if path.suffix in _SUFFIXES:
        if not path.is_file():
            raise NotFound(f"there is no file {source}")
        if path.suffix == ".onnx":
            return path
        return (
            load_program(path, allow_code=allow_code) if path.suffix == ".pt2" else load_torchscript(path, map_location)
        )
    if path.is_dir():
        return repositories.load_pretrained(path, allow_code=allow_code)
    folder, _, entry = source.rpartition(":")
    if folder and Path(folder).expanduser().is_dir():
        return repositories.load_hub(Path(folder).expanduser(), entry)
    return None
