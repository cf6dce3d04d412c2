"""What an archive declares of a decoder: sizes, special tokens, how tokens are chosen, and the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ingot import foreign
from ingot.errors import InvalidArgument, ParityError, Unsupported
from ingot.export.decoder.attention import Shape
from ingot.export.decoder.encoders import is_encoder_decoder
from ingot.export.decoder.graph import rotary_by_length
from ingot.export.decoder.rules import rules_of, unapplied
from ingot.export.program import quiet
from ingot.export.tasks.tokenizer import has_words, serialized
from ingot.model_store import Generation, SamplingDefaults
from ingot.model_store.format.generation import Encoder, TokenRules
from ingot.steps.samples import texts
from ingot.steps.tokenizer import Tokenizer
from ingot.tasks import Generating

FILE = "tokenizer.json"
"""The name of the tokenizer's file in an archive."""
# Number of positions of a model whose configuration states none.
_UNSTATED = 2048


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder.

    Raises:
        Unsupported: it has none, or one that is Python code.
        InvalidArgument: it cannot be loaded.
    """
    import transformers

    if not has_words(folder):
        raise Unsupported(f"{folder} has no tokenizer; save it with tokenizer.save_pretrained(FOLDER)")

    def unread(error: Exception) -> str:
        return f"the tokenizer in {folder} cannot be loaded: {foreign.one_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), quiet():
        own: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not getattr(own, "is_fast", False):
        raise Unsupported(f"the tokenizer in {folder} ({type(own).__name__}) is Python code, which no archive can hold")
    return own


def stored_tokenizer(own: Any) -> tuple[bytes, int]:
    """Return the serialization of a tokenizer, and of how many texts it has the same ids as the original.

    Raises:
        ParityError: it has other ids for a text.
    """
    content = serialized(own)
    stored = Tokenizer(content, FILE)
    hard = texts.hard()
    for text in hard:
        with quiet():
            expected = list(own(text)["input_ids"])
        if (found := stored.whole.encode(text).ids) != expected:
            raise ParityError(f"the stored tokenizer has the ids {found[:8]} for {text[:40]!r}, not {expected[:8]}")
    return content, len(hard)


def declare(
    model: Any,
    shapes: list[Shape],
    vocab: int,
    tokenizer: Any,
    note: Callable[[str], None],
    *,
    task: Generating = "text-generation",
    greedy: bool = False,
) -> Generation:
    """Return the declaration of a decoder.

    Args:
        model: a causal language model of transformers, or an encoder-decoder.
        shapes: the cache of each layer.
        vocab: the number of logits.
        tokenizer: its tokenizer, or None.
        note: called with remarks for the user.
        task: as Hugging Face names it.
        greedy: whether to take the most likely tokens of an encoder-decoder with beam search.

    Raises:
        Unsupported: servers cannot choose an encoder-decoder's tokens as its ``generation_config`` says.
    """
    config, generation = model.config.get_text_config(decoder=True), model.generation_config
    ids = {name: _first(generation, config, f"{name}_token_id") for name in ("eos", "bos", "pad")}
    eos = [*ids["eos"]] if isinstance(ids["eos"], Iterable) else [ids["eos"]] * (ids["eos"] is not None)
    if wrong := [token for token in eos if not 0 <= token < vocab]:
        note(f"the configuration ends texts by token {wrong[0]}, which the model of {vocab} tokens does not have")
    most = _max_length(model, config, tokenizer, note)
    encoder, rules = None, TokenRules()
    if is_encoder_decoder(model):
        encoder = Encoder(max_length=most, start=(_start(model),))
        rules = rules_of(generation, eos, len(encoder.start), greedy=greedy)
    elif names := unapplied(generation, rules=False):
        note(f"generation_config sets {', '.join(names)}, which servers do not apply")
    return Generation(
        layers=len(shapes),
        kv_heads=shapes[0].kv_heads,
        head_size=shapes[0].head_size,
        max_length=most,
        vocab=vocab,
        eos=tuple(token for token in eos if 0 <= token < vocab),
        bos=_known(ids["bos"], vocab),
        pad=_known(ids["pad"], vocab),
        defaults=_defaults(generation, 0 if encoder is None else len(encoder.start)),
        chat_template=_template(tokenizer),
        tokenizer="" if tokenizer is None else FILE,
        special={} if tokenizer is None else _special(tokenizer),
        task=task,
        rules=rules,
        encoder=encoder,
    )


def _start(model: Any) -> int:
    """Return the token with which the decoder of an encoder-decoder begins."""
    config, generation = model.config, model.generation_config
    start = _first(generation, config, "decoder_start_token_id")
    start = _first(generation, config, "bos_token_id") if start is None else start
    if not isinstance(start, int):
        raise Unsupported(f"its decoder starts with {start}, and not with one token (decoder_start_token_id)")
    return start


def _first(generation: Any, config: Any, name: str) -> Any:
    found = getattr(generation, name, None)
    return getattr(config, name, None) if found is None else found


def _known(token: Any, vocab: int) -> int | None:
    return token if isinstance(token, int) and 0 <= token < vocab else None


def _max_length(model: Any, config: Any, tokenizer: Any, note: Callable[[str], None]) -> int:
    """Return the number of positions that the graph has."""
    stated = getattr(config, "max_position_embeddings", None)
    if stated is None and (most := getattr(tokenizer, "model_max_length", 1 << 30)) < 1 << 24:
        return int(most)  # relative positions have no limit
    if not isinstance(stated, int) or stated < 1:
        note(f"the configuration states no max_position_embeddings; texts have at most {_UNSTATED} tokens")
        return _UNSTATED
    lengths = [int(part.original_max_seq_len) for part in model.modules() if rotary_by_length(part)]
    if lengths:
        lengths.append(_original(config) or stated)
    if (least := min(lengths, default=stated)) < stated:
        note(f"longer texts have other rotary factors, so the graph is for {least} tokens instead of {stated}")
        return least
    return stated


def _original(config: Any) -> int | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    stated = parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None
    return stated if isinstance(stated, int) else None


def _defaults(generation: Any, start: int) -> SamplingDefaults:
    """Return the settings of a generation_config; those that it leaves out are those of transformers.

    ``start`` is the number of tokens before an answer of an encoder-decoder, which ``max_length`` counts too.
    """
    fields = {name: getattr(generation, name, None) for name in SamplingDefaults.model_fields}
    if start and fields["max_new_tokens"] is None and generation.max_length is not None:
        fields["max_new_tokens"] = max(1, generation.max_length - start)
    if fields["temperature"] == 0:  # generate() refuses it; it stands for the most likely token
        fields |= {"do_sample": False, "temperature": None}
    return SamplingDefaults.model_validate({name: value for name, value in fields.items() if value is not None})


def _template(tokenizer: Any) -> str:
    found = getattr(tokenizer, "chat_template", None)
    return str((found.get("default") if isinstance(found, dict) else found) or "")


def _special(tokenizer: Any) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
