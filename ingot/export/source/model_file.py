"""A model in TorchServe's eager form: a Python file with one class, and its ``state_dict``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.export.source import imported
from ingot.export.source.checkpoint import load_checkpoint

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
