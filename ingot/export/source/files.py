"""Models in files: TorchScript ``.pt``, ExportedProgram ``.pt2``, and TorchServe's Python file with one class."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from ingot import foreign
from ingot.errors import ALLOW_CODE, InvalidArgument
from ingot.export.program import quiet
from ingot.export.source import imported
from ingot.export.source.checkpoint import check_device, check_whole, load_checkpoint


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


# A fixed name that no package has, instead of the file's.
_MODULE = "ingot_imported_model"


def load_model_file(path: Path, checkpoint: Path, *, called: str | None = None) -> nn.Module:
    """Run a Python file, create its class without arguments, and load its weights.

    Args:
        path: the file. It can import other files from its folder.
        checkpoint: the ``state_dict``.
        called: the checkpoint's name in messages; its path by default.

    Raises:
        InvalidArgument: the file fails, defines no module or several, or the weights do not fit.
    """
    cls = _only_class(_run(path), path)
    module = imported.make(cls, cls.__name__)
    load_checkpoint(module, checkpoint, called=called)
    return module


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look up their module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    with foreign.reported_as(InvalidArgument, f"running {path.name} failed"):
        spec.loader.exec_module(module)
    return module


def _only_class(module: ModuleType, path: Path) -> type[nn.Module]:
    found = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, nn.Module) and item.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(item.__name__ for item in found) or "none"
        raise InvalidArgument(
            f"{path.name} must define one subclass of torch.nn.Module, as TorchServe requires, and defines: {names}; "
            "name yours with ingot export module:Class --checkpoint FILE"
        )
    return found[0]
