"""Checkpoints: a ``state_dict`` for a module, from a file of tensors only."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound
from ingot.export.program import quiet

_COMPILED = "_orig_mod"
# PyTorch's messages for a pickle with types that it does not allow, as opposed to a damaged one.
_FORBIDDEN = re.compile(
    r"Unsupported (global|class|operand)|unrecognized function|Can only|not an allowed|is not allowed"
)


def load_checkpoint(
    module: nn.Module,
    path: Path,
    map_location: str = "cpu",
    *,
    called: str | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> None:
    """Load a ``state_dict`` into a module; all keys must match.

    A training checkpoint is searched for its ``state_dict`` (also as ``model_state_dict`` or ``model``). A prefix of
    all keys is removed if the keys fit without it: ``module.`` of ``DataParallel``, ``_orig_mod.`` of
    ``torch.compile``, the attribute of the network in a LightningModule. Only tensors are unpickled, never code.

    Args:
        module: the module to load the weights into.
        path: the file.
        map_location: the device that tensors are loaded to.
        called: the file's name in messages; its path by default.
        remark: called with notes on the keys.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint, or does not fit the module.
    """
    called = called or str(path)
    saved = _find_state(read(path, map_location, called), called)
    state, prefix = _without_prefix(saved, set(module.state_dict()))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        detail = _partly(state, module) or " ".join(str(error).split())
        raise InvalidArgument(
            f"the checkpoint {called} does not fit {type(module).__name__}: {detail[:600]}"
        ) from error
    if prefix:
        remark(f"removed the prefix '{prefix}' of all keys of {called}")


def _without_prefix(state: dict[str, torch.Tensor], wanted: set[str]) -> tuple[dict[str, torch.Tensor], str]:
    """Return a ``state_dict`` without the common prefix whose removal makes most keys fit, and that prefix."""
    compiled = any(f"{_COMPILED}." in key for key in state) and not any(_COMPILED in key for key in wanted)
    keys = {key: key.replace(f"{_COMPILED}.", "") if compiled else key for key in state}
    prefix, candidates = "", [("", keys)]
    while True:
        firsts = {key.partition(".")[0] for key in keys.values()}
        if len(firsts) != 1 or not all("." in key for key in keys.values()):
            break
        prefix += f"{firsts.pop()}."
        keys = {key: short.partition(".")[2] for key, short in keys.items()}
        candidates.append((prefix, keys))
    # max() returns the first, shortest prefix of several that fit equally well.
    prefix, keys = max(candidates, key=lambda item: len(wanted.intersection(item[1].values())))
    shown = f"{_COMPILED}." if compiled and not prefix else prefix
    return {keys[key]: value for key, value in state.items()}, shown


def _partly(state: Mapping[str, torch.Tensor], module: nn.Module) -> str:
    """Return why the keys under one prefix do not fit, if more of them fit than of all keys; otherwise ''."""
    wanted = module.state_dict()
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        first, _, rest = key.partition(".")
        parts.setdefault(first, {})[rest] = value
    first, part = max(parts.items(), key=lambda item: len(wanted.keys() & item[1].keys()))
    if len(wanted.keys() & part.keys()) <= len(wanted.keys() & state.keys()):
        return ""
    missing = [key for key in wanted if key not in part]
    shapes = [
        f"{first}.{key} has the shape {list(part[key].shape)}, not {list(value.shape)}"
        for key, value in wanted.items()
        if key in part and not is_lazy(value) and part[key].shape != value.shape
    ]
    if not missing and not shapes:
        return f"only its keys under '{first}.' fit; save those alone, without the prefix"
    wrong = [f"these are missing: {', '.join(missing)}"] * bool(missing) + shapes
    return f"most of its keys under '{first}.' fit, but {'; '.join(wrong)}"


def hyperparameters(path: Path) -> dict[str, Any]:
    """Return the constructor's arguments in a checkpoint of a LightningModule, or an empty dict.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint.
    """
    loaded = read(path, "cpu", str(path))
    lightning = isinstance(loaded, Mapping) and "pytorch-lightning_version" in loaded
    found = loaded.get("hyper_parameters") if lightning else None
    return {str(name): value for name, value in found.items()} if isinstance(found, Mapping) else {}


def read(path: Path, map_location: str, called: str) -> Any:
    """Unpickle a checkpoint of tensors and plain values only; messages call it ``called``.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a checkpoint, or contains other objects.
    """
    if not path.is_file():
        raise NotFound(f"there is no checkpoint {called}")
    check_device(map_location)

    def unread(error: Exception) -> str:
        check_whole(path, called)
        if _is_torchscript(path):
            return f"{called} is a TorchScript file, which is a whole model; export it directly: ingot export {called}"
        if isinstance(error, pickle.UnpicklingError) and _FORBIDDEN.search(str(error)):
            return (
                f"{called} contains more than tensors, which could run code when loaded; "
                "save model.state_dict() instead"
            )
        if isinstance(error, EOFError) or "EOF" in str(error):
            return _truncated(called)
        return f"{called} is not a PyTorch checkpoint, or is damaged: {foreign.first_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), quiet():
        return torch.load(path, map_location=map_location, weights_only=True)


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return any(name.endswith("/constants.pkl") for name in file.namelist())


def check_whole(path: Path, called: str) -> None:
    """Raise InvalidArgument if a file is empty, or begins as a ZIP archive and does not end as one."""
    if path.stat().st_size == 0:
        raise InvalidArgument(f"{called} is empty; copy or download it again")
    with path.open("rb") as file:
        start = file.read(4)
    if b"PK\x03\x04".startswith(start) and not zipfile.is_zipfile(path):
        raise InvalidArgument(_truncated(called))


def _truncated(called: str) -> str:
    return f"{called} is truncated or damaged: its end is missing; copy or download it again"


def _find_state(loaded: object, called: str) -> dict[str, torch.Tensor]:
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not loaded or not all(map(_is_weight, loaded.items())):
        keys = ", ".join(str(key) for key in list(loaded)[:8]) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise InvalidArgument(f"{called} does not contain a state_dict; it contains: {keys or 'nothing'}")
    return dict(loaded)


def _is_weight(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and torch.is_tensor(item[1])


def check_device(map_location: str) -> None:
    """Raise InvalidArgument if this machine cannot load tensors to a device."""
    try:
        torch.empty(0, device=map_location)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidArgument(
            f"tensors cannot be loaded to '{map_location}' here: {foreign.first_line(error)}"
        ) from error
