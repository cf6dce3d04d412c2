"""Steps that a TOML file declares, for models whose files do not describe them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError, validate_call

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound, quoted
from ingot.steps.tasks.described import Described
from ingot.steps.tasks.file import file_classification
from ingot.steps.tasks.image import (
    depth_estimation,
    image_classification,
    image_feature_extraction,
    image_segmentation,
    object_detection,
)
from ingot.steps.tasks.ocr import image_to_text, text_detection
from ingot.steps.tasks.sound import audio_classification, speech_recognition
from ingot.steps.tasks.text import embedding, text_classification, text_ranking
from ingot.steps.tasks.tokens import feature_extraction, fill_mask, question_answering, token_classification
from ingot.tasks import ON_TEXTS, Declared, Task


def read_steps(path: Path) -> Described:
    """Return the steps that a TOML file declares: ``task``, and the arguments of its function in :mod:`ingot.steps`.

    A ``tokenizer`` is relative to the file, and so are ``characters``, if they are the name of a file with one in each
    line instead of a list.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not TOML, or has an unknown task or argument.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    try:
        content = tomllib.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}") from error
    task = content.pop("task", None)
    if task not in TASKS:
        raise InvalidArgument(f"{path} has the task {quoted(task)}; write one of: {', '.join(TASKS)}")
    if task in ON_TEXTS:
        if not isinstance(content.get("tokenizer"), str):
            raise InvalidArgument(f"{path} has no tokenizer; write tokenizer = 'FILE', or the folder that has it")
        content["tokenizer"] = path.parent / content["tokenizer"]
    if isinstance(name := content.get("characters"), str):
        content["characters"] = _lines(path.parent / name)
    try:
        return validate_call(TASKS[task])(**content)
    except ValidationError as error:
        raise InvalidArgument(f"{path} does not describe the task {task}: {foreign.first_fault(error)}") from error
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _lines(path: Path) -> list[str]:
    with foreign.reported_as(InvalidArgument, f"{path} cannot be read as text"):
        return path.read_text(encoding="utf-8").splitlines()


TASKS: Mapping[Task | Declared, Callable[..., Described]] = {
    "text-classification": text_classification,
    "text-ranking": text_ranking,
    "sentence-similarity": embedding,
    "token-classification": token_classification,
    "question-answering": question_answering,
    "fill-mask": fill_mask,
    "feature-extraction": feature_extraction,
    "image-classification": image_classification,
    "object-detection": object_detection,
    "image-segmentation": image_segmentation,
    "depth-estimation": depth_estimation,
    "image-feature-extraction": image_feature_extraction,
    "image-to-text": image_to_text,
    "text-detection": text_detection,
    "file-classification": file_classification,
    "audio-classification": audio_classification,
    "automatic-speech-recognition": speech_recognition,
}
"""The function that describes each task of :mod:`ingot.tasks`."""
