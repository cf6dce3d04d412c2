"""Classifiers of texts, and cross-encoders, which score pairs of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ingot.errors import InvalidArgument
from ingot.export.tasks.folder import Folder, Found, classes_of, labels_of
from ingot.export.tasks.tokenizer import FolderTokenizer
from ingot.steps import Described, Values, text_classification, text_ranking
from ingot.steps.after.classify import Function

_FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
_MODEL = "a model ...ForSequenceClassification"


def find_classifier(folder: Folder, *, named: bool) -> Found | None:
    """Return a classifier of texts; see :func:`ingot.export.tasks.find`."""
    if not _is_classifier(folder):
        if named:
            raise folder.needs("text-classification", _MODEL)
        return None
    if folder.is_cross_encoder and not named:
        return None
    return Found("text-classification", folder.why, folder.path, lambda module: _classify(module, folder.path))


def find_ranker(folder: Folder, *, named: bool) -> Found | None:
    """Return a cross-encoder; see :func:`ingot.export.tasks.find`."""
    if not _is_classifier(folder):
        if named:
            raise folder.needs("text-ranking", _MODEL)
        return None
    if not folder.is_cross_encoder and not named:
        return None
    activation = _activation(folder)
    return Found("text-ranking", folder.why, folder.path, lambda module: _rank(module, folder.path, activation))


def _is_classifier(folder: Folder) -> bool:
    return folder.architecture.endswith("ForSequenceClassification")


def _activation(folder: Folder) -> str | None:
    """Return the activation that a cross-encoder's configuration names; None if it names none."""
    config = folder.config | folder.own
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or config.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    return None if name is None else str(name).rpartition(".")[2]


def _classify(module: Any, folder: Path) -> Described:
    tokenizer, config = FolderTokenizer(folder, module), module.config
    labels = labels_of(config)
    function: Function = "softmax"
    if config.problem_type == "regression":
        function = "none"
    elif config.problem_type == "multi_label_classification" or config.num_labels == 1:
        function = "sigmoid"

    def answer(module: Any, values: Values) -> Values:
        import transformers

        made: Any = transformers.TextClassificationPipeline
        columns = {name: [item.decode() for item in array.tolist()] for name, array in values.items()}
        rows = made(model=module, tokenizer=tokenizer.own, device="cpu")(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            top_k=None,
            truncation=True,
            max_length=tokenizer.max_length,
        )
        return classes_of(rows)

    described = text_classification(tokenizer.content, labels, function=function, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer, "optional"))


def _rank(module: Any, folder: Path, activation: str | None) -> Described:
    tokenizer, count = FolderTokenizer(folder, module), module.config.num_labels
    if activation is not None and activation not in _FUNCTIONS:
        raise InvalidArgument(f"the activation {activation} of the cross-encoder in {folder} has no step (--task none)")
    function: Any = _FUNCTIONS[activation] if activation else ("sigmoid" if count == 1 else "none")

    def answer(module: Any, values: Values) -> Values:
        with torch.no_grad():
            logits = module(**tokenizer.prepare(values, "pt")).logits.float()
        if function == "sigmoid":
            logits = logits.sigmoid()
        elif function == "softmax":
            logits = logits.softmax(-1)
        return {"score": (logits[:, 0] if count == 1 else logits).numpy()}

    described = text_ranking(tokenizer.content, classes=count, function=function, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer, "required"))
