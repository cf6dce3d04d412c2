"""Models that answer for the tokens of texts: entities, missing words, and vectors of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, Unsupported
from ingot.export.proof import texts
from ingot.export.tasks.folder import Folder, Found, labels_of
from ingot.export.tasks.tokenizer import FolderTokenizer
from ingot.steps import Described, Values, feature_extraction, fill_mask, token_classification
from ingot.steps.after.entities import AGGREGATIONS
from ingot.steps.step import padded
from ingot.tensors import Array

# Samples of each strategy but the usual one.
_FEW = 16


def find_entities(folder: Folder, *, named: bool) -> Found | None:
    """Return a classifier of tokens; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForTokenClassification"):
        if named:
            raise folder.needs("token-classification", "a model ...ForTokenClassification")
        return None
    return Found("token-classification", folder.why, folder.path, lambda module: _entities(module, folder.path))


def find_filler(folder: Folder, *, named: bool) -> Found | None:
    """Return a model that fills masks; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForMaskedLM"):
        if named:
            raise folder.needs("fill-mask", "a model ...ForMaskedLM")
        return None
    return Found("fill-mask", f"config: {folder.architecture}", folder.path, lambda module: _fill(module, folder.path))


def find_vectors(folder: Folder, *, named: bool) -> Found | None:
    """Return a model of vectors of tokens, if the user named the task; see :func:`ingot.export.tasks.find`."""
    if not named:
        return None
    if "For" in folder.architecture:
        raise folder.needs("feature-extraction", "a model without a head, such as BertModel")
    why = f"config: {folder.architecture}"
    return Found("feature-extraction", why, folder.path, lambda module: _vectors(module, folder.path))


def _entities(module: Any, folder: Path) -> Described:
    tokenizer, config = FolderTokenizer(folder, module), module.config
    labels = labels_of(config)

    def answer(module: Any, values: Values) -> Values:
        import transformers

        made: Any = transformers.TokenClassificationPipeline
        pipeline = made(model=module, tokenizer=tokenizer.own, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tokens may not be words
            rows = [
                pipeline(text, aggregation_strategy=strategy)
                for text, strategy in _pairs(values, "aggregation_strategy")
            ]
        return {
            "entity": _bytes(rows, lambda item: item.get("entity", item.get("entity_group"))),
            "word": _bytes(rows, lambda item: item["word"]),
            "score": padded([[item["score"] for item in row] for row in rows], 0, np.float32),
            "start": padded([[item["start"] for item in row] for row in rows], -1, np.int32),
            "end": padded([[item["end"] for item in row] for row in rows], -1, np.int32),
            "index": padded([[item.get("index", -1) for item in row] for row in rows], -1, np.int32),
            "count": np.array([len(row) for row in rows], np.int32),
        }

    unknown = tokenizer.own.unk_token_id
    described = token_classification(
        tokenizer.content, labels, unknown_id=-1 if unknown is None else unknown, **tokenizer.options
    )
    usual = texts.samples()
    samples = [_chosen(usual if name == "simple" else usual[:_FEW], name) for name in AGGREGATIONS]
    return replace(described, original=tokenizer.original(answer, samples=samples))


def _chosen(items: Sequence[str], strategy: str) -> dict[str, Array]:
    return {"text": texts.as_array([*items]), "aggregation_strategy": texts.as_array([strategy] * len(items))}


def _pairs(values: Values, *names: str) -> Iterator[tuple[str, ...]]:
    columns = ([item.decode() for item in values[name].tolist()] for name in ("text", *names))
    return zip(*columns, strict=True)


def _bytes(rows: Sequence[Sequence[Mapping[str, Any]]], get: Any) -> Array:
    return padded([[str(get(item)).encode() for item in row] for row in rows], b"", object)


def _fill(module: Any, folder: Path) -> Described:
    tokenizer = FolderTokenizer(folder, module)
    own = tokenizer.own
    if own.mask_token_id is None:
        raise Unsupported(
            f"the tokenizer in {folder} has no mask token; set one before it is saved, or export the model without "
            "steps (--task none)"
        )

    def answer(module: Any, values: Values) -> Values:
        import transformers

        made: Any = transformers.FillMaskPipeline
        pipeline = made(model=module, tokenizer=own, device="cpu")
        cut = {"truncation": True, "max_length": tokenizer.max_length}
        found = [pipeline(text, tokenizer_kwargs=cut) for (text,) in _pairs(values)]
        rows = [row if isinstance(row[0], list) else [row] for row in found]
        shape = len(rows), max(map(len, rows)), max(len(masks[0]) for masks in rows)
        answers: dict[str, Array] = {"token": np.full(shape, -1, np.int64), "score": np.zeros(shape, np.float32)}
        answers |= {name: np.full(shape, b"", object) for name in ("token_str", "sequence")}
        for index, masks in enumerate(rows):
            for which, items in enumerate(masks):
                for name, array in answers.items():
                    each = [item[name] for item in items]
                    array[index, which] = [text.encode() for text in each] if array.dtype == object else each
        return {**answers, "count": np.array([len(row) for row in rows], np.int32)}

    described = fill_mask(tokenizer.content, own.mask_token_id, clean_up=tokenizer.clean_up, **tokenizer.options)
    samples = [{"text": texts.as_array(_masked(own.mask_token, count))} for count in (1, 2)]
    return replace(described, original=tokenizer.original(answer, samples=samples))


def _masked(mask: str, count: int) -> list[str]:
    """Return the samples with masks for words near the start, which is not cut."""
    found = []
    for index, text in enumerate(texts.samples()):
        words = text.split() + ["film"] * (count + 1)
        for place in range(count):
            words[index % 2 + place] = mask
        found.append(" ".join(words))
    return found


def _vectors(module: Any, folder: Path) -> Described:
    tokenizer = FolderTokenizer(folder, module)
    if not isinstance(size := getattr(module.config, "hidden_size", None), int):
        raise InvalidArgument(f"the configuration in {folder} has no hidden_size, the elements of a token's vector")

    def answer(module: Any, values: Values) -> Values:
        import transformers

        made: Any = transformers.FeatureExtractionPipeline
        pipeline = made(model=module, tokenizer=tokenizer.own, device="cpu")
        cut = {"truncation": True, "max_length": tokenizer.max_length}
        rows = [np.array(pipeline(text, tokenize_kwargs=cut)[0], np.float32) for (text,) in _pairs(values)]
        found = np.zeros((len(rows), max(map(len, rows)), size), np.float32)
        for index, row in enumerate(rows):
            found[index, : len(row)] = row
        return {"vectors": found}

    described = feature_extraction(tokenizer.content, size, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer))
