"""The tasks of folders of transformers and sentence-transformers: the steps of each, and the original to compare with.

One file holds the tasks of one kind of input. A new task is a name in :mod:`ingot.tasks`, a function that finds it in a
folder, and an entry in the table here.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.export.program import quiet
from ingot.export.tasks import (
    depth,
    detection,
    embedding,
    features,
    filetypes,
    generation,
    pictures,
    questions,
    segmentation,
    sounds,
    texts,
    tokens,
)
from ingot.export.tasks.folder import Folder, Found
from ingot.steps import Described
from ingot.tasks import Task

__all__ = ["Found", "Task", "find", "of_folder"]


class _Find(Protocol):
    def __call__(self, folder: Folder, *, named: bool) -> Found | None:
        """Return the task if the folder has it; raise InvalidArgument if it does not, and the user named the task."""


# In the order in which a folder is tried.
_FINDERS: Mapping[Task, _Find] = {
    "sentence-similarity": embedding.find_embedding,
    "image-classification": pictures.find_classifier,
    "object-detection": detection.find_detector,
    "image-segmentation": segmentation.find_segmentation,
    "depth-estimation": depth.find_depth,
    "image-feature-extraction": features.find_features,
    "audio-classification": sounds.find_classifier,
    "automatic-speech-recognition": sounds.find_recognizer,
    "text-ranking": texts.find_ranker,
    "text-classification": texts.find_classifier,
    "token-classification": tokens.find_entities,
    "question-answering": questions.find_questions,
    "fill-mask": tokens.find_filler,
    "feature-extraction": tokens.find_vectors,
    "text-generation": generation.find_decoder,
    "text2text-generation": partial(generation.find_encoder_decoder, task="text2text-generation"),
    "translation": partial(generation.find_encoder_decoder, task="translation"),
    "summarization": partial(generation.find_encoder_decoder, task="summarization"),
}


def find(path: Path, task: Task = "auto") -> Found | None:
    """Return the task of a folder; None if it has no task that steps are known for.

    Args:
        path: a folder of transformers or sentence-transformers.
        task: ``auto`` finds it from the files, ``none`` looks for none.

    Raises:
        InvalidArgument: a file is damaged, the task does not fit the folder, or a module of sentence-transformers has
            no step.
    """
    if task == "none" or not path.is_dir():
        return None
    folder = Folder(path)
    if task != "auto":
        return _FINDERS[task](folder, named=True)
    tried = (finder(folder, named=False) for finder in _FINDERS.values())
    return next((found for found in tried if found is not None), None)


def of_folder(path: Path, task: Task = "auto") -> Described:
    """Return the steps that a folder describes, for a model from elsewhere, such as an ``.onnx`` file.

    The graph's inputs have an original, the answers have none, unless the folder is of magika.

    Args:
        path: a folder with ``config.json``, and the files of a tokenizer or an image processor; or one of magika.
        task: as for :func:`find`.

    Raises:
        InvalidArgument: as for :func:`find`; or the folder has no task.
        Unsupported: the tokenizer or processor has no steps.
    """
    if (path / filetypes.FILE).is_file():
        return filetypes.of_magika(path)
    found = find(path, task)
    if found is None:
        raise InvalidArgument(
            f"{path} has no task that steps are known for: its config.json must name the architecture; or declare the "
            "steps in a TOML file"
        )
    described = found.describe(_outline(found.folder))
    original = described.original
    return described if original is None else replace(described, original=replace(original, answers=False))


def _outline(path: Path) -> Any:
    """Return the model of a folder's configuration, without weights, of the class that tasks look at."""
    import torch
    import transformers

    def unread(error: Exception) -> str:
        return f"the configuration in {path} cannot be loaded: {foreign.one_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), quiet(), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model: Any = getattr(transformers, Folder(path).architecture, None)
        known = isinstance(model, type) and issubclass(model, transformers.PreTrainedModel)
        auto: Any = transformers.AutoModel
        outline: Any = model(config) if known else auto.from_config(config)
    outline.config = config
    return outline
