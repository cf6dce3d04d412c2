"""A module by its import path: ``package.module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound
from ingot.model_store.places import served_classes

# Packages that the export imports later: a folder of that name, such as a clone of Triton, is not the package.
_PACKAGES = ("onnx", "onnx_ir", "onnxruntime", "onnxscript", "triton")
_WEIGHTS = (".bin", ".ckpt", ".pkl")


def find(source: str) -> Any:
    """Import ``package.module:attribute``, with the current folder on the import path.

    Raises:
        NotFound: there is no such Python module or attribute.
        InvalidArgument: importing it fails.
    """
    module_name, colon, attribute = source.partition(":")
    _check_file(source, Path(module_name), attribute)
    if not colon and source.startswith((".", "/", "~")):
        raise NotFound(f"there is no file or folder {source}")
    if not colon or not attribute:
        raise InvalidArgument(
            f"'{source}' is not a model source; write package.module:attribute, or name a .onnx, .pt or .pt2 file, "
            "a folder with a hubconf.py (folder:entry), or a folder with a transformers model"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        _keep_installed(module_name.partition(".")[0])
        sys.path.insert(0, str(Path.cwd()))  # so that files in the current folder are found, as with uvicorn
    found = _imported(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join(_exportable(found)[:12]) or "nothing that can be exported"
            raise NotFound(f"'{module_name}' has no attribute '{attribute}'; it has: {known}")
        found = getattr(found, part)
    return found


def _imported(name: str) -> Any:
    def failure(error: Exception) -> str:
        if not isinstance(error, ModuleNotFoundError):
            return f"importing {name} failed: {foreign.typed(error)}"
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            return f"importing {name} failed: {error}; install the package that it needs"
        raise NotFound(f"there is no Python module '{name}' here ({Path.cwd()}) or installed") from error

    with foreign.reported_as(InvalidArgument, failure):
        return importlib.import_module(name)


def _keep_installed(wanted: str) -> None:
    """Import packages, or mark them as absent, if a name in the current folder would hide them."""
    for name in _PACKAGES:
        if name != wanted and (Path(name).is_dir() or Path(f"{name}.py").is_file()):
            try:
                importlib.import_module(name)
            except ImportError:
                sys.modules[name] = None  # type: ignore[assignment]  # so that importing it fails


def _check_file(source: str, path: Path, attribute: str) -> None:
    """Raise an error with the correct form if a source is a Python file or a file of weights."""
    if path.suffix == ".py" and (path.is_file() or "/" in source):
        if not path.is_file():
            raise NotFound(f"there is no file {path}")
        folder = path.resolve().parent
        inside = folder.is_relative_to(Path.cwd())
        parts = folder.relative_to(Path.cwd()).parts if inside else ()
        where = "" if inside else f", in the folder {path.parent}"
        raise InvalidArgument(
            f"'{source}' is a file; write its import path{where}: "
            f"{'.'.join([*parts, path.stem])}:{attribute or 'NAME, where NAME is a module, a class or a factory in it'}"
            f"{_served(path)}"
        )
    if path.suffix in _WEIGHTS and path.is_file():
        raise InvalidArgument(
            f"'{source}' contains weights without the model's code; pass the class as the source, and this file with "
            f"--checkpoint: ingot export my_model:Net --checkpoint {path}"
        )


def _served(path: Path) -> str:
    classes = " or ".join(f"{path}:{name}" for name in served_classes(path))
    return f"; for a class with its predict write {classes}" if classes else ""


def _exportable(owner: object) -> list[str]:
    """Return the names defined in a Python module, or of the parts of an object, that may be or return a model."""
    names = [name for name in dir(owner) if not name.startswith("_")]
    if not inspect.ismodule(owner):
        return [name for name in names if isinstance(getattr(owner, name, None), nn.Module)]
    return [name for name in names if _may_be_a_model(getattr(owner, name, None), owner.__name__)]


def _may_be_a_model(found: object, here: str) -> bool:
    if isinstance(found, nn.Module):
        return True
    if not callable(found) or getattr(found, "__module__", None) != here:
        return False
    return not inspect.isclass(found) or issubclass(found, nn.Module)


def make(found: object, attribute: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a module as it is, and otherwise call a class or factory with ``arguments``.

    Raises:
        InvalidArgument: the result is not a module.
    """
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise InvalidArgument(f"'{attribute}' is a {type(found).__name__}, not a module, a class or a factory")
    unknown = _unknown(found, arguments or {})
    if unknown:
        raise InvalidArgument(
            f"{attribute}{_parameters(found)} does not accept {', '.join(unknown)} of the checkpoint's "
            "hyper_parameters; name a factory that builds the model without them"
        )
    given = f"with {', '.join(arguments)}" if arguments else "without arguments"
    call = f"calling {attribute}{_parameters(found)} {given}"
    remedy = "name a factory that needs none"
    with foreign.reported_as(InvalidArgument, lambda error: f"{call} failed: {foreign.typed(error)}; {remedy}"):
        result = found(**arguments or {})
    if not isinstance(result, nn.Module):
        raise InvalidArgument(
            f"{attribute}() returned a {type(result).__name__}, not a torch.nn.Module{_as_class(type(result))}"
        )
    return result


def _as_class(kind: type) -> str:
    """Return how the class of a model in Python is exported, if it is one."""
    if not (hasattr(kind, "predict") or hasattr(kind, "predict_one")):
        return ""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "model.py"
    near = os.path.relpath(file)
    return f"; to export the class with its predict, name its file: ./{near}:{kind.__name__}"


def _unknown(found: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that a callable does not accept by name."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # some built-in callables have no signature
        return []
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return []
    return sorted(arguments.keys() - {item.name for item in parameters if item.kind is not item.POSITIONAL_ONLY})


def _parameters(found: Any) -> str:
    try:
        return str(inspect.signature(found))
    except ValueError:  # some built-in callables have no signature
        return "(...)"
