"""Folders: a local torch.hub repository, or a model that transformers saved."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.errors import InvalidArgument, NotFound, missing_package
from ingot.export.program import quiet
from ingot.export.source.text import one_line


def load_hub(folder: Path, entry: str) -> nn.Module:
    """Return what an entry point of a folder's ``hubconf.py`` makes, called without arguments.

    Raises:
        NotFound: there is no hubconf.py, or it has no such entry point.
        InvalidArgument: the entry point fails, or makes no module.
    """
    if not (folder / "hubconf.py").is_file():
        raise NotFound(f"the folder {folder} has no hubconf.py, which would define '{entry}'")
    known = _entries(folder / "hubconf.py")
    if entry not in known:
        raise NotFound(f"{folder}/hubconf.py has no entry point '{entry}'; it has: {', '.join(known)}")
    try:
        made: Any = torch.hub.load(str(folder), entry, source="local")  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InvalidArgument(f"the entry point '{entry}' of {folder} failed: {one_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"the entry point '{entry}' of {folder} gave a {type(made).__name__}, not a module")
    return made


def _entries(path: Path) -> list[str]:
    """Return the public functions and classes that a file defines or imports by name."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {one_line(error)}") from error
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return [name for name in names if not name.startswith("_")]


def load_pretrained(folder: Path, *, allow_code: bool = False) -> nn.Module:
    """Return the model that ``save_pretrained`` of transformers wrote, by the architecture that it names.

    Args:
        folder: where it lies.
        allow_code: run the folder's own code, where its ``config.json`` names some by ``auto_map``.

    Raises:
        NotFound: the folder holds no ``config.json``.
        InvalidArgument: it names no architecture that transformers has, needs ``allow_code``, or cannot be loaded.
        Unsupported: transformers is not installed.
    """
    config = _config(folder)
    if config.get("auto_map") and not allow_code:
        raise InvalidArgument(
            f"the model in {folder} comes with Python code of its own (auto_map in its config.json), which loading "
            "it can run; if you trust where it comes from, allow that by --allow-code (INGOT_ALLOW_CODE=1, or "
            "allow_code=True)"
        )
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise missing_package("transformers", "exporting its models", None) from error
    architecture = _architecture(config)
    name = architecture if hasattr(transformers, architecture) else _auto_class(config, architecture)
    cls = getattr(transformers, name, None)
    if cls is None:
        raise InvalidArgument(
            f"{folder / 'config.json'} names the architecture {architecture}, which transformers does not have"
        )
    try:
        with quiet():
            # Said in any case: left unsaid, transformers asks on the terminal whether it may run code.
            made: nn.Module = cls.from_pretrained(folder, local_files_only=True, trust_remote_code=allow_code)
    except Exception as error:
        raise InvalidArgument(f"the model in {folder} cannot be loaded: {one_line(error)}") from error
    return made


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(
            f"the folder {folder} holds no transformers model (config.json); for an entry point of a hubconf.py write "
            f"{folder}:entry"
        )
    try:
        config = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is no configuration of transformers: it holds a {type(config).__name__}")
    return config


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModel"


def _auto_class(config: dict[str, Any], architecture: str) -> str:
    """Return the class of transformers that loads an architecture of the folder's own, or the architecture itself."""
    found = config.get("auto_map")
    own = {name: str(code) for name, code in (found if isinstance(found, dict) else {}).items()}
    return next((name for name, code in own.items() if code.rpartition(".")[2] == architecture), architecture)
