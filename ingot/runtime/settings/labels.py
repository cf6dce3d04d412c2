"""The names of classes: a line for each, or JSON as of TorchServe's ``index_to_name.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArgument
from ingot.tensors import Signature
from ingot.tensors.arrays import open_regular

_MOST_BYTES = 4 << 20
_JSON = 'a list of names, or an object with an entry for each index from 0: {"0": "cat", "1": "dog"}'


def read_labels(path: Path | None) -> tuple[str, ...]:
    """Return the names in a file; none without one.

    Raises:
        InvalidArgument: it cannot be read, is too large, or is neither text nor valid JSON.
    """
    if path is None:
        return ()
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"the labels in {path} cannot be read: {error}") from error
    return parse_labels(raw, path.name, f"the labels in {path}")


def parse_labels(raw: bytes, name: str, called: str) -> tuple[str, ...]:
    """Return the names in the content of a file.

    Args:
        raw: the content.
        name: of the file: with the suffix ``.json``, it is JSON.
        called: the labels in messages.

    Raises:
        InvalidArgument: it is too large, or neither text nor valid JSON.
    """
    if len(raw) > _MOST_BYTES:
        raise InvalidArgument(f"{called} have over {_MOST_BYTES >> 20} MiB")
    try:
        text = raw.decode()
        if name.lower().endswith(".json"):
            return _of_json(json.loads(text), called)
    except (ValueError, RecursionError) as error:  # of UnicodeDecodeError and JSONDecodeError, too
        raise InvalidArgument(f"{called} cannot be read: {error}") from error
    text = text.replace("\r\n", "\n").removesuffix("\n")
    return tuple(text.split("\n")) if text else ()


def _of_json(value: Any, called: str) -> tuple[str, ...]:
    if isinstance(value, dict):
        if value.keys() != {str(index) for index in range(len(value))}:
            raise InvalidArgument(f"{called} must be {_JSON}")
        value = [value[str(index)] for index in range(len(value))]
    if not isinstance(value, list):
        raise InvalidArgument(f"{called} must be {_JSON}")
    # TorchServe's entries may have an identifier before the name: ["n02123045", "tabby"].
    names = [entry[-1] if isinstance(entry, list) and entry else entry for entry in value]
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"{called} must be {_JSON}")
    return tuple(names)


def classes_of(signature: Signature) -> dict[str, int]:
    """Return the number of classes of each output whose size is fixed: all dimensions but the batch's count."""
    found = {}
    for spec in signature.outputs:
        rest = [dim for dim in spec.shape if dim != signature.batch]
        if spec.shape and all(isinstance(dim, int) for dim in rest):
            found[spec.name] = math.prod(dim for dim in rest if isinstance(dim, int))
    return found


def check_labels(labels: Sequence[str], signature: Signature, called: str) -> None:
    """Check that an output has as many classes as there are labels, or fewer.

    Raises:
        InvalidArgument: all outputs have more.
    """
    classes = classes_of(signature)
    if labels and len(classes) == len(signature.outputs) and min(classes.values()) > len(labels):
        name = min(classes, key=classes.__getitem__)
        raise InvalidArgument(
            f"{called} are {len(labels)} names, and output '{name}' has {classes[name]} classes; add the missing names"
        )
