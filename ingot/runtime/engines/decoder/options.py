"""The cache of a decoder's engine: its sizes, and its memory."""

from __future__ import annotations

from typing import Any, TypedDict

from ingot.errors import InvalidArgument, Unsupported
from ingot.model_store import Generation
from ingot.runtime.settings.settings import Settings

_MOST_CONTEXT = 2048


class DecoderOptions(TypedDict):
    """The cache of a decoder, in a form that JSON has: an engine process receives it.

    Attributes:
        slots: rows that the cache has room for.
        context: tokens of each row, prompt and answer.
        layers: of the model.
        kv_heads: heads of keys and values.
        head_size: elements of a head.
        vocab: tokens that the model knows.
        nbytes: of the cache.
        rules: :class:`~ingot.model_store.format.generation.TokenRules`, with ``eos``.
        encoder: the file of the encoder's graph, next to the decoder's; empty without one.
        source: tokens of each row that the encoder reads.
        start: the tokens before each answer of an encoder-decoder.
    """

    slots: int
    context: int
    layers: int
    kv_heads: int
    head_size: int
    vocab: int
    nbytes: int
    rules: dict[str, Any]
    encoder: str
    source: int
    start: list[int]


def options_of(generation: Generation, settings: Settings) -> DecoderOptions:
    """Return the cache of an archive's decoder.

    Args:
        generation: of the archive.
        settings: its ``slots``, and the ``context`` of each; None for all positions that the model knows, up to 2048.

    Raises:
        InvalidArgument: the model knows fewer positions.
        Unsupported: the settings ask for several instances, or for states or repetitions of other models.
    """
    slots, context, most = settings.slots, settings.context, generation.max_length
    if context is not None and context > most:
        raise InvalidArgument(f"--context {context} is more than the {most} positions that the model knows; lower it")
    if settings.instances > 1:
        raise Unsupported(
            f"--instances {settings.instances}: a decoder has one instance, whose requests share its steps; leave it "
            "out, or raise --slots"
        )
    if settings.states or settings.repeat.inputs:
        raise Unsupported("--states and --repeat are for other models: a decoder keeps its own cache; leave them out")
    tokens = min(most, _MOST_CONTEXT) if context is None else context
    encoder = generation.encoder
    source = 0 if encoder is None else min(encoder.max_length, context or _MOST_CONTEXT)
    return DecoderOptions(
        slots=slots,
        context=tokens,
        layers=generation.layers,
        kv_heads=generation.kv_heads,
        head_size=generation.head_size,
        vocab=generation.vocab,
        nbytes=slots * (tokens + source) * generation.cache_bytes,
        rules={**generation.rules.model_dump(mode="json"), "eos": [*generation.eos]},
        encoder="" if encoder is None else encoder.blob,
        source=source,
        start=[] if encoder is None else [*encoder.start],
    )
