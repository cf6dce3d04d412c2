"""``ts.utils.util``: names of classes, a module's own classes, and the exception that sets an answer's status."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class PredictionException(Exception):
    """A failure of a batch with the message and the status of its answers."""

    def __init__(self, message: str, error_code: int = 500):
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes that a module defines itself, or those of them that derive from another."""
    return [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and (parent_class is None or issubclass(found, parent_class))
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Return the names of classes by their numbers as text; None without the file.

    Raises:
        ValueError: it has another form than ``{"0": "cat"}``, ``{"0": ["n01", "cat"]}`` or
            ``{"object_type_names": ["cat"]}``.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        log.warning("%s is missing; answers have the numbers of classes", path.name)
        return None
    mapping = json.loads(path.read_text())
    if not isinstance(mapping, dict):
        raise ValueError(f'{path.name} must be an object, such as {{"0": "cat"}}')
    if isinstance(listed := mapping.get("object_type_names"), list):
        return {str(index): name for index, name in enumerate(listed)}
    names = {key: name[-1] if isinstance(name, list) else name for key, name in mapping.items()}
    if not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"the names in {path.name} must be texts, or lists that end with one")
    return names


def map_class_to_label(
    probs: Sequence[Sequence[float]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, float]]:
    """Return the scores of each sample by the names of their classes.

    Args:
        probs: scores of classes [samples, classes].
        mapping: names of classes; their numbers by default.
        lbl_classes: the class of each score; by default that of its index.
    """
    rows = lbl_classes if lbl_classes is not None else itertools.repeat(range(len(probs[0]) if probs else 0))
    return [
        {mapping[str(number)] if mapping is not None else str(number): score for number, score in zip(*row)}  # noqa: B905 - as TorchServe
        for row in zip(rows, probs)  # noqa: B905 - one of them may be endless
    ]


def timed(function: _Function) -> _Function:
    """Return a method as it is: Ingot measures handlers itself."""
    return function
