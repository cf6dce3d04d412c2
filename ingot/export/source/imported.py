"""A module by its import path: ``package.module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ingot.errors import InvalidArgument, NotFound
from ingot.export.source.text import one_line

# What exporting imports later: a folder of that name, such as a repository of Triton's, is not the package.
_PACKAGES = ("onnx", "onnx_ir", "onnxruntime", "onnxscript", "triton")
_WEIGHTS = (".bin", ".ckpt", ".pkl")


def find(source: str) -> Any:
    """Import what ``package.module:attribute`` names, with the current folder on the import path.

    Raises:
        NotFound: there is no such Python module or attribute.
        InvalidArgument: importing it fails.
    """
    module_name, colon, attribute = source.partition(":")
    _check_file(source, Path(module_name), attribute)
    if not colon or not attribute:
        raise InvalidArgument(
            f"'{source}' is not a model source; write package.module:attribute, or name a .onnx, .pt or .pt2 file, "
            "a folder with a hubconf.py (folder:entry), or a folder with a transformers model"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        _keep_installed(module_name.partition(".")[0])
        sys.path.insert(0, str(Path.cwd()))  # so that a user's own file next to him is found, as with uvicorn
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidArgument(f"importing {module_name} failed: {error}; install what it needs") from error
        raise NotFound(f"there is no Python module '{module_name}' here ({Path.cwd()}) or installed") from error
    except Exception as error:  # the user's code may raise anything
        raise InvalidArgument(f"importing {module_name} failed: {type(error).__name__}: {one_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join(_exportable(found)[:12]) or "nothing that can be exported"
            raise NotFound(f"'{module_name}' has no attribute '{attribute}'; it has: {known}")
        found = getattr(found, part)
    return found


def _keep_installed(wanted: str) -> None:
    """Import packages, or mark them as absent, where something in the current folder would be taken for them."""
    for name in _PACKAGES:
        if name != wanted and (Path(name).is_dir() or Path(f"{name}.py").is_file()):
            try:
                importlib.import_module(name)
            except ImportError:
                sys.modules[name] = None  # type: ignore[assignment]  # so that importing it fails


def _check_file(source: str, path: Path, attribute: str) -> None:
    """Raise if a source names a file of Python or of weights, and say how to write it."""
    if path.suffix == ".py" and (path.is_file() or "/" in source):
        if not path.is_file():
            raise NotFound(f"there is no file {path}")
        folder = path.resolve().parent
        inside = folder.is_relative_to(Path.cwd())
        parts = folder.relative_to(Path.cwd()).parts if inside else ()
        where = "" if inside else f", in the folder {path.parent}"
        raise InvalidArgument(
            f"'{source}' names a file; write its import path{where}: "
            f"{'.'.join([*parts, path.stem])}:{attribute or 'NAME, where NAME is a module, a class or a factory in it'}"
        )
    if path.suffix in _WEIGHTS and path.is_file():
        raise InvalidArgument(
            f"'{source}' holds weights without the model's code; give the class as the source, and this file by "
            f"--checkpoint: ingot export my_model:Net --checkpoint {path}"
        )


def _exportable(owner: Any) -> list[str]:
    """Return the names in a Python module, or of a module's parts, that may give a model: not what it imports."""
    names = [name for name in dir(owner) if not name.startswith("_")]
    if not inspect.ismodule(owner):
        return [name for name in names if isinstance(getattr(owner, name, None), nn.Module)]
    return [name for name in names if _gives_a_model(getattr(owner, name, None), owner.__name__)]


def _gives_a_model(found: Any, here: str) -> bool:
    if isinstance(found, nn.Module):
        return True
    if not callable(found) or getattr(found, "__module__", None) != here:
        return False
    return not inspect.isclass(found) or issubclass(found, nn.Module)


def make(found: Any, attribute: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return what was found as a module: itself, or what it gives when it is called with ``arguments``.

    Raises:
        InvalidArgument: it is no module and gives none.
    """
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise InvalidArgument(f"'{attribute}' is a {type(found).__name__}, not a module, a class or a factory")
    foreign = _not_taken(found, arguments or {})
    if foreign:
        raise InvalidArgument(
            f"{attribute}{_parameters(found)} does not take {', '.join(foreign)} of the checkpoint's hyper_parameters; "
            "name a factory that makes the model without them"
        )
    try:
        made = found(**arguments or {})
    except Exception as error:
        given = f"with {', '.join(arguments)}" if arguments else "without arguments"
        raise InvalidArgument(
            f"calling {attribute}{_parameters(found)} {given} failed: {type(error).__name__}: "
            f"{one_line(error)}; name a factory that needs none"
        ) from error
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"{attribute}() gave a {type(made).__name__}, not a torch.nn.Module")
    return made


def _not_taken(found: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that something does not take by name."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # some built-in ones have none
        return []
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return []
    return sorted(arguments.keys() - {item.name for item in parameters if item.kind is not item.POSITIONAL_ONLY})


def _parameters(found: Any) -> str:
    try:
        return str(inspect.signature(found))
    except ValueError:  # some built-in ones have none
        return "(...)"
