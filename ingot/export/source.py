"""What ``ingot export`` is pointed at: a module by import path, an ONNX file, or a TorchScript file."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.errors import InvalidArgument, NotFound
from ingot.export.program import quiet


def load_source(source: str, checkpoint: str | Path | None = None, map_location: str = "cpu") -> nn.Module | Path:
    """Return the module that ``source`` names, or the path if it is an ``.onnx`` file.

    Args:
        source: ``package.module:attribute`` (a module, class or factory), a TorchScript ``.pt`` or an ``.onnx`` file.
        checkpoint: a file with the module's ``state_dict``.
        map_location: the device that tensors are loaded to, as in ``torch.load``.

    Raises:
        NotFound: the file, the Python module or the attribute does not exist.
        InvalidArgument: the attribute gives no ``nn.Module``, or the checkpoint does not fit it.
    """
    path = Path(source).expanduser()
    if path.suffix in (".onnx", ".pt", ".pth"):
        if not path.is_file():
            raise NotFound(f"there is no file {source}")
        if checkpoint is not None:
            raise InvalidArgument(
                f"{source} holds its weights already; --checkpoint goes with package.module:attribute"
            )
        return path if path.suffix == ".onnx" else _load_torchscript(path, map_location)
    module = _import_module(source)
    if checkpoint is not None:
        load_checkpoint(module, Path(checkpoint).expanduser(), map_location)
    return module


def load_checkpoint(module: nn.Module, path: Path, map_location: str = "cpu") -> None:
    """Load a ``state_dict`` into a module; all keys must match.

    A training checkpoint is searched for its ``state_dict`` (also as ``model_state_dict`` or ``model``), and the
    ``module.`` prefix of ``DataParallel`` is stripped. Only tensors are unpickled, never code.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint, or does not fit the module.
    """
    if not path.is_file():
        raise NotFound(f"there is no checkpoint {path}")
    _check_device(map_location)
    try:
        with quiet():
            loaded = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidArgument(
            f"{path} holds more than tensors, which could run code when loaded; save model.state_dict() instead"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InvalidArgument(f"{path} is not a PyTorch checkpoint, or is damaged: {_first_line(error)}") from error
    state = _find_state(loaded, path)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise InvalidArgument(f"the checkpoint {path} does not fit {type(module).__name__}: {detail[:600]}") from error


def _find_state(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not loaded or not all(map(_is_weight, loaded.items())):
        keys = ", ".join(str(key) for key in list(loaded)[:8]) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise InvalidArgument(f"{path} holds no state_dict; it holds: {keys or 'nothing'}")
    if all(key.startswith("module.") for key in loaded):
        return {key.removeprefix("module."): value for key, value in loaded.items()}
    return dict(loaded)


def _is_weight(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and torch.is_tensor(item[1])


def _check_device(map_location: str) -> None:
    try:
        torch.empty(0, device=map_location)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidArgument(f"tensors cannot be loaded to '{map_location}' here: {_first_line(error)}") from error


def _import_module(source: str) -> nn.Module:
    module_name, colon, attribute = source.partition(":")
    if not colon or not attribute:
        raise InvalidArgument(
            f"'{source}' is not a model source; write package.module:attribute, or name a .onnx or TorchScript .pt "
            "file (a .pt2 runs code when it is loaded: name the module that it was made from)"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that a user's own file next to him is found, as with uvicorn
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidArgument(f"importing {module_name} failed: {error}; install what it needs") from error
        raise NotFound(f"there is no Python module '{module_name}' here ({Path.cwd()}) or installed") from error
    except Exception as error:  # the user's code may raise anything
        raise InvalidArgument(f"importing {module_name} failed: {type(error).__name__}: {_one_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join([name for name in dir(found) if not name.startswith("_")][:12])
            raise NotFound(f"'{module_name}' has no attribute '{attribute}'; it has: {known}")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise InvalidArgument(f"'{source}' is a {type(found).__name__}, not a module, a class or a factory")
    try:
        made = found()
    except Exception as error:
        raise InvalidArgument(
            f"calling {attribute}{_parameters(found)} without arguments failed: {type(error).__name__}: "
            f"{_one_line(error)}; name a factory that needs none"
        ) from error
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"{attribute}() gave a {type(made).__name__}, not a torch.nn.Module")
    return made


def _load_torchscript(path: Path, map_location: str) -> nn.Module:
    try:
        with quiet():
            return torch.jit.load(str(path), map_location=map_location)  # type: ignore[no-any-return, no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is not a TorchScript file. A whole module pickled by torch.save cannot be read safely: save its "
            f"state_dict instead. For a state_dict, name the model's code and pass this file by "
            f"--checkpoint: ingot export my_model:Net --checkpoint {path.name}"
        ) from error


def _parameters(found: Any) -> str:
    try:
        return str(inspect.signature(found))
    except ValueError:  # some built-in ones have none
        return "(...)"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
