"""Texts by which decoders are compared: each row is a part of a text, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.errors import InvalidArgument, NotFound
from ingot.model_store import Generation, Variant
from ingot.quant.data.samples import Data, Samples
from ingot.quant.data.sources import traffic
from ingot.runtime.generation.requests import PROMPT
from ingot.runtime.generation.requests import TOKENS as ANSWER
from ingot.steps.samples import texts
from ingot.tensors import Array, DType, Range, Signature, TensorSpec

TOKENS = "tokens"
"""The input: texts, INT64[rows, length]."""
LIKELIEST = "likeliest"
"""The output INT64[rows, length - 1]: the most likely token behind each token of a text."""
LOGPROBS = "logprobs"
"""The output FP32[rows, length - 1]: the natural logarithm of the probability of each token but the first."""
_INPUT = TensorSpec(TOKENS, DType.INT64, ("rows", "length"))
_OUTPUTS = (
    TensorSpec(LIKELIEST, DType.INT64, ("rows", "predicted")),
    TensorSpec(LOGPROBS, DType.FP32, ("rows", "predicted")),
)
ROWS, LENGTH = 32, 128
"""Most rows that are read at once, and most tokens of a row."""
SIGNATURE = Signature((_INPUT,), _OUTPUTS, "rows", ranges={"rows": Range(1, ROWS), "length": Range(1, LENGTH)})
"""The interface by which decoders are compared."""
# Tokens of a part of a text, and most parts: reading takes as many calls as a part has tokens.
_LENGTH, _PARTS = 64, 64
# Characters of a text that are read: tokens have fewer each.
_CHARACTERS = _LENGTH * _PARTS * 16


def read(variant: Variant, data: Data, purpose: str) -> Samples:
    """Return the parts of a text for a decoder.

    Args:
        variant: the decoder.
        data: the path of a text (.txt), or of recorded traffic; or tokens, in the forms of :meth:`Samples.read`.
        purpose: what the data is for, for messages.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: the text is too short, or the model has no tokenizer, or lacks a token.
    """
    generation = _declared(variant)
    path = Path(data) if isinstance(data, str | Path) else Path()
    if path.suffix.lower() == ".txt":
        samples = _cut(generation, _encoded(variant, path), purpose, f" in {data}")
    elif recorded := [path] if path.suffix == ".safetensors" else traffic.find(path) if path.name else []:
        samples = _cut(generation, _recorded(recorded), purpose, f" in {data}")
    else:
        samples = Samples.read(SIGNATURE, data, purpose=purpose).take(_PARTS, 0)
    for batch in samples.batches():
        tokens = batch.inputs[TOKENS]
        if not 0 <= tokens.min() <= tokens.max() < generation.vocab or not 1 < tokens.shape[1] <= generation.max_length:
            raise InvalidArgument(
                f"the {purpose}{samples.where} has rows of {tokens.shape[1]} tokens from {tokens.min()} to "
                f"{tokens.max()}; the model has the tokens 0 to {generation.vocab - 1}, and {generation.max_length} "
                "positions"
            )
    return samples


def generated(variant: Variant, seed: int) -> Samples:
    """Return generated texts for a decoder; random tokens if it has no tokenizer."""
    generation = _declared(variant)
    if (opened := variant.opened_texts()) is None:
        ids = np.random.default_rng(seed).integers(0, generation.vocab, _LENGTH * _PARTS // 2)
    else:
        ids = np.array([token for text in texts.samples() for token in opened.encode(text)], np.int64)
    return _cut(generation, ids, "generated data", "")


def _declared(variant: Variant) -> Generation:
    if variant.serving.generation is None:
        raise InvalidArgument(f"'{variant.serving.name}' is not a decoder")
    return variant.serving.generation


def _encoded(variant: Variant, path: Path) -> Array:
    """Return the tokens of a text."""
    if (opened := variant.opened_texts()) is None:
        raise InvalidArgument(f"'{variant.serving.name}' has no tokenizer for {path}; pass tokens as an .npz (--data)")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_CHARACTERS)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as a text in UTF-8: {error}") from error
    return np.array(opened.encode(text), np.int64)


def _recorded(files: Sequence[Path]) -> Array:
    """Return the prompts and answers of recorded requests, one after the other."""
    parts = [np.zeros(0, np.int64)]
    for path in files:
        for case in traffic.cases(path):
            if not (PROMPT in case.inputs and ANSWER in case.outputs):
                raise InvalidArgument(f"{path} has requests of another kind of model: they have no '{PROMPT}'")
            parts += [case.inputs[PROMPT], case.outputs[ANSWER]]
        if sum(map(len, parts)) > _LENGTH * _PARTS:
            break
    return np.concatenate(parts)


def _cut(generation: Generation, ids: Array, purpose: str, where: str) -> Samples:
    length = min(_LENGTH, generation.max_length)
    rows = min(_PARTS, ids.size // length)
    if not rows:
        raise InvalidArgument(f"the {purpose}{where} has {ids.size} tokens; pass a text of {length} or more")
    parts = {TOKENS: ids[: rows * length].reshape(rows, length)}
    return Samples.read(SIGNATURE, parts, purpose=purpose)
