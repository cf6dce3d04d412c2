"""A folder of transformers or sentence-transformers: what its configuration says, and what a task makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.steps import Described, Values
from ingot.tasks import Task


@dataclass(frozen=True)
class Found:
    """A folder's task: why it is that, the folder of the transformers model, and how its steps are described."""

    task: Task
    why: str
    folder: Path
    describe: Callable[[Any], Described]


@dataclass(frozen=True)
class Folder:
    """A folder, whose files are read once.

    Properties raise InvalidArgument if a file is damaged.
    """

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; empty without one."""
        return read_json(self.path / "config.json")

    @property
    def architecture(self) -> str:
        """The class of the model, such as ``BertForSequenceClassification``; empty if it is not known."""
        return str((self.config.get("architectures") or [""])[0])

    @property
    def why(self) -> str:
        """What shows that a folder has a classifier."""
        labels = self.config.get("id2label") or {}
        return f"config: id2label with {len(labels)} names" if labels else f"config: {self.architecture}"

    @cached_property
    def own(self) -> dict[str, Any]:
        """The configuration that sentence-transformers writes since its version 6; empty without one."""
        return read_json(self.path / "config_sentence_transformers.json")

    @property
    def is_cross_encoder(self) -> bool:
        """Whether sentence-transformers wrote a cross-encoder."""
        config: Mapping[str, Any] = self.config | self.own
        keys = ("sentence_transformers", "sbert_ce_default_activation_function")
        return config.get("model_type") == "CrossEncoder" or any(key in config for key in keys)

    def needs(self, task: Task, what: str) -> InvalidArgument:
        """Return the error for a task that the folder's model is not for."""
        return InvalidArgument(f"task {task} needs {what}; {self.path} has {self.architecture or 'no model'}")


def labels_of(config: Any) -> list[str]:
    """Return the names of a model's classes, in the order of its logits."""
    return [str(config.id2label[index]) for index in range(config.num_labels)]


def classes_of(rows: Sequence[Sequence[Mapping[str, Any]]]) -> Values:
    """Return the answers of a pipeline that names all classes of each item, best first."""
    label = np.array([[item["label"].encode() for item in row] for row in rows], object)
    return {"label": label, "score": np.array([[item["score"] for item in row] for row in rows], np.float32)}


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file: empty without the file, and ``{"": ...}`` if it is not an object.

    Raises:
        InvalidArgument: it cannot be read.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read: {foreign.one_line(error)}") from error
    return found if isinstance(found, dict) else {"": found}
