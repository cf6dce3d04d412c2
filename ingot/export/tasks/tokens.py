"""Models that answer for the tokens of texts: entities, missing words, and vectors of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, Unsupported
from ingot.export.tasks.folder import Folder, Found, labels_of
from ingot.export.tasks.tokenizer import FolderTokenizer
from ingot.steps import Described, Values, feature_extraction, fill_mask, token_classification
from ingot.steps.after.entities import AGGREGATIONS
from ingot.steps.ragged import columns, padded
from ingot.steps.samples import texts
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
        return columns(
            rows,
            {
                "entity": (lambda item: _encoded(item.get("entity", item.get("entity_group"))), object),
                "word": (lambda item: _encoded(item["word"]), object),
                "score": (itemgetter("score"), np.float32),
                "start": (itemgetter("start"), np.int32),
                "end": (itemgetter("end"), np.int32),
                "index": (lambda item: item.get("index", -1), np.int32),
            },
        )

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


def _encoded(text: object) -> bytes:
    return str(text).encode()


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
        number = len(rows[0][0])
        parts = {"token": np.int64, "token_str": object, "score": np.float32, "sequence": object}
        return columns(rows, {name: (_of_words(name), np.dtype((dtype, number))) for name, dtype in parts.items()})

    described = fill_mask(tokenizer.content, own.mask_token_id, clean_up=tokenizer.clean_up, **tokenizer.options)
    samples = [{"text": texts.as_array(_masked(own.mask_token, count))} for count in (1, 2)]
    return replace(described, original=tokenizer.original(answer, samples=samples))


def _of_words(name: str) -> Callable[[Sequence[Mapping[str, Any]]], list[Any]]:
    """Return the function that returns a part of each word of a mask."""
    return lambda words: [_encoded(item[name]) if isinstance(item[name], str) else item[name] for item in words]


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
        return {"vectors": padded(rows, np.dtype((np.float32, size)))}

    described = feature_extraction(tokenizer.content, size, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer))
