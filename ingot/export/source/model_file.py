"""A model as TorchServe keeps one that is not TorchScript: a Python file with one class, and its ``state_dict``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from ingot.errors import InvalidArgument
from ingot.export.source import imported
from ingot.export.source.checkpoint import load_checkpoint
from ingot.export.source.text import one_line

# No package has this name, whatever the file is called.
_MODULE = "ingot_imported_model"


def load_model_file(path: Path, checkpoint: Path, *, called: str | None = None) -> nn.Module:
    """Run a Python file, make its class without arguments, and load its weights.

    Args:
        path: the file. Others beside it can be imported by it.
        checkpoint: the ``state_dict``.
        called: what messages call that; by default its path.

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
        raise InvalidArgument(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and the like look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the author's code may raise anything
        raise InvalidArgument(f"running {path.name} failed: {type(error).__name__}: {one_line(error)}") from error
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
            f"{path.name} must define one class of torch.nn.Module, as TorchServe asks, and defines: {names}; name "
            "yours by ingot export module:Class --checkpoint FILE"
        )
    return found[0]
