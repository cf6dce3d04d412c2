"""Checkpoints: a ``state_dict`` for a module, from a file of tensors only."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.errors import InvalidArgument, NotFound
from ingot.export.program import quiet
from ingot.export.source.text import first_line


def load_checkpoint(module: nn.Module, path: Path, map_location: str = "cpu", *, called: str | None = None) -> None:
    """Load a ``state_dict`` into a module; all keys must match.

    A training checkpoint is searched for its ``state_dict`` (also as ``model_state_dict`` or ``model``), and the
    ``module.`` prefix of ``DataParallel`` is stripped. Only tensors are unpickled, never code.

    Args:
        module: what the weights are for.
        path: the file.
        map_location: the device that tensors are loaded to.
        called: what messages call the file; by default its path.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint, or does not fit the module.
    """
    called = called or str(path)
    state = _find_state(read(path, map_location, called), called)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise InvalidArgument(
            f"the checkpoint {called} does not fit {type(module).__name__}: {detail[:600]}"
        ) from error


def hyperparameters(path: Path) -> dict[str, Any]:
    """Return the constructor's arguments that a checkpoint of a LightningModule carries, or none.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint.
    """
    loaded = read(path, "cpu", str(path))
    lightning = isinstance(loaded, Mapping) and "pytorch-lightning_version" in loaded
    found = loaded.get("hyper_parameters") if lightning else None
    return {str(name): value for name, value in found.items()} if isinstance(found, Mapping) else {}


def read(path: Path, map_location: str, called: str) -> Any:
    """Unpickle a checkpoint, tensors and plain values only; messages call it ``called``.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint, or holds more than that.
    """
    if not path.is_file():
        raise NotFound(f"there is no checkpoint {called}")
    check_device(map_location)
    try:
        with quiet():
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidArgument(
            f"{called} holds more than tensors, which could run code when loaded; save model.state_dict() instead"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InvalidArgument(f"{called} is not a PyTorch checkpoint, or is damaged: {first_line(error)}") from error


def _find_state(loaded: Any, called: str) -> dict[str, torch.Tensor]:
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not loaded or not all(map(_is_weight, loaded.items())):
        keys = ", ".join(str(key) for key in list(loaded)[:8]) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise InvalidArgument(f"{called} holds no state_dict; it holds: {keys or 'nothing'}")
    if all(key.startswith("module.") for key in loaded):
        return {key.removeprefix("module."): value for key, value in loaded.items()}
    return dict(loaded)


def _is_weight(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and torch.is_tensor(item[1])


def check_device(map_location: str) -> None:
    """Raise InvalidArgument if tensors cannot be on a device here."""
    try:
        torch.empty(0, device=map_location)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidArgument(f"tensors cannot be loaded to '{map_location}' here: {first_line(error)}") from error
