"""Folders: a local torch.hub repository, or a model saved by transformers."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot import foreign
from ingot.errors import ALLOW_CODE, InvalidArgument, NotFound, missing_package
from ingot.export.program import quiet


def load_hub(folder: Path, entry: str) -> nn.Module:
    """Call an entry point of a folder's ``hubconf.py`` without arguments and return its module.

    Raises:
        NotFound: there is no hubconf.py, or it has no such entry point.
        InvalidArgument: the entry point fails, or does not return a module.
    """
    if not (folder / "hubconf.py").is_file():
        raise NotFound(f"the folder {folder} has no hubconf.py that could define '{entry}'")
    known = _entries(folder / "hubconf.py")
    if entry not in known:
        raise NotFound(f"{folder}/hubconf.py has no entry point '{entry}'; it has: {', '.join(known)}")
    called = f"the entry point '{entry}' of {folder}"
    with foreign.reported_as(InvalidArgument, lambda error: f"{called} failed: {foreign.one_line(error)}"):
        module: Any = torch.hub.load(str(folder), entry, source="local")  # type: ignore[no-untyped-call]
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"{called} returned a {type(module).__name__}, not a module")
    return module


def _entries(path: Path) -> list[str]:
    """Return the public functions and classes that a file defines or imports by name."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {foreign.one_line(error)}") from error
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return [name for name in names if not name.startswith("_")]


def load_pretrained(folder: Path, *, allow_code: bool = False) -> nn.Module:
    """Return a model that ``save_pretrained`` of transformers wrote, with the architecture in its ``config.json``.

    Args:
        folder: the model's folder.
        allow_code: run the Python code in the folder that ``auto_map`` in its ``config.json`` names.

    Raises:
        NotFound: the folder has no ``config.json``.
        InvalidArgument: transformers lacks the architecture, ``allow_code`` is needed, or the model cannot be loaded.
        Unsupported: transformers is not installed.
    """
    config = _config(folder)
    if config.get("auto_map") and not allow_code:
        raise InvalidArgument(
            f"the model in {folder} comes with its own Python code (auto_map in its config.json), which loading it can "
            f"run; {ALLOW_CODE}"
        )
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise missing_package("transformers", "exporting a model of transformers", None) from error
    architecture = _architecture(config)
    name = architecture if hasattr(transformers, architecture) else _auto_class(config, architecture)
    cls = getattr(transformers, name, None)
    if cls is None:
        raise InvalidArgument(
            f"{folder / 'config.json'} names the architecture {architecture}, which transformers does not have"
        )

    def unloaded(error: Exception) -> str:
        return f"the model in {folder} cannot be loaded: {foreign.one_line(error)}"

    with foreign.reported_as(InvalidArgument, unloaded), quiet():
        # Without trust_remote_code=False, transformers asks on the terminal whether it may run code.
        return cls.from_pretrained(folder, local_files_only=True, trust_remote_code=allow_code)  # type: ignore[no-any-return]


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(
            f"the folder {folder} does not contain a transformers model (config.json); for an entry point of a "
            f"hubconf.py write {folder}:entry"
        )
    try:
        config = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {foreign.one_line(error)}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a configuration of transformers: it contains a {type(config).__name__}")
    return config


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModel"


def _auto_class(config: dict[str, Any], architecture: str) -> str:
    """Return the Auto class that loads an architecture defined in the folder, or the architecture itself."""
    found = config.get("auto_map")
    own = {name: str(code) for name, code in (found if isinstance(found, dict) else {}).items()}
    return next((name for name, code in own.items() if code.rpartition(".")[2] == architecture), architecture)
