"""The tasks that steps are known for, and the forms of their answers.

A new task is a name here, its function in :data:`ingot.steps.tasks.declared.TASKS` and, if folders of transformers
describe it, its finder in :mod:`ingot.export.tasks`. A new form is an entry here and what draws it in three places:
in ``server/plane/apis`` for ``POST /models/NAME``, in ``cli/serving/answers.py`` as lines, and in
``server/page/answers.js``. A test names what is missing. ``server/torchserve/values.py`` has those of TorchServe's
handlers. This module imports nothing else of Ingot, so that ``--help`` and clients stay fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

OnTexts = Literal[
    "text-classification",
    "text-ranking",
    "sentence-similarity",
    "token-classification",
    "question-answering",
    "fill-mask",
    "feature-extraction",
]
Generating = Literal["text-generation", "text2text-generation", "translation", "summarization"]
"""Tasks whose answers a decoder generates token by token; the archive declares no steps, but how it is run."""
OnFiles = Literal[
    "image-classification",
    "object-detection",
    "image-segmentation",
    "depth-estimation",
    "image-feature-extraction",
    "audio-classification",
    "automatic-speech-recognition",
]
Declared = Literal["image-to-text", "text-detection", "file-classification"]
"""Further tasks, whose steps are declared: no folder of transformers describes them."""
Task = Literal["auto", "none", OnTexts, Generating, OnFiles]
"""What an export is asked for: a task as Hugging Face names it, ``auto`` to find it, or ``none``."""
GENERATING: Final[tuple[Generating, ...]] = get_args(Generating)
ON_TEXTS: Final[tuple[OnTexts, ...]] = get_args(OnTexts)
"""Tasks on texts, which have a tokenizer."""

FORMS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "boxes": frozenset({"label", "score", "box", "count"}),
        "masks": frozenset({"label", "mask", "count"}),
        "depths": frozenset({"depth", "predicted_depth", "original_size"}),
        "entities": frozenset({"entity", "word", "score", "start", "end", "count"}),
        "spans": frozenset({"answer", "score", "start", "end", "count"}),
        "words": frozenset({"token", "token_str", "score", "sequence", "count"}),
        "classes": frozenset({"label", "score"}),
        "transcripts": frozenset({"text", "seconds"}),
        "lines": frozenset({"text", "score"}),
    }
)
"""The forms of answers, each with the outputs that it needs. The first that fits is the form of a model's answers."""


# The dimensions of outputs that pipelines may have for each of several parts of an item, which is another form.
_RANKS: Final[Mapping[str, int]] = MappingProxyType({"label": 2, "text": 1})


def form_of(outputs: Mapping[str, int]) -> str:
    """Return the form of answers with these outputs and numbers of dimensions; empty if none fits, as for vectors."""
    names = frozenset(name for name, rank in outputs.items() if _RANKS.get(name, rank) == rank)
    return next((form for form, needed in FORMS.items() if needed <= names), "")
