"""The settings of a ``generation_config`` that choose tokens: the rules that servers apply, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.errors import Unsupported
from ingot.model_store.format.generation import TokenRules

# Settings that change which tokens are chosen, and that servers do not apply, with the values that change nothing.
_UNAPPLIED: dict[str, Sequence[Any]] = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_decoder_ids": ([],),
    "guidance_scale": (1, 1.0),
    "penalty_alpha": (0, 0.0),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}
# The same for those that are applied for encoder-decoders only, as TokenRules, or are refused there: num_beams.
_RULES: dict[str, Sequence[Any]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "suppress_tokens": ([],),
}


def unapplied(config: Any, *, rules: bool) -> list[str]:
    """Return the settings that a ``generation_config`` changes and that servers do not apply.

    Args:
        config: of transformers.
        rules: whether the archive has :class:`TokenRules`, as those of encoder-decoders have.
    """
    table = _UNAPPLIED if rules else _UNAPPLIED | _RULES
    return [name for name, neutral in table.items() if getattr(config, name, None) not in (None, *neutral)]


def rules_of(config: Any, eos: Sequence[int], start: int, *, greedy: bool) -> TokenRules:
    """Return the rules of a ``generation_config``.

    Args:
        config: of transformers.
        eos: tokens that end an answer.
        start: number of tokens before an answer.
        greedy: whether to take the most likely tokens of a model with beam search.

    Raises:
        Unsupported: it asks for something that servers do not do.
    """

    def own(name: str) -> Any:
        return getattr(config, name, None)

    if (own("num_beams") or 1) > 1 and not greedy:
        raise Unsupported(
            f"generation_config has a beam search (num_beams {own('num_beams')}), which servers do not do: set "
            "num_beams to 1, or give --greedy to take the most likely token at each place instead"
        )
    words = [list(word) for word in own("bad_words_ids") or () if list(word) not in [[token] for token in eos]]
    last = own("forced_eos_token_id")
    unknown = unapplied(config, rules=True)
    unknown += ["bad_words_ids of several tokens"] if any(len(word) > 1 for word in words) else []
    unknown += ["several forced_eos_token_id"] if isinstance(last, list) and len(last) > 1 else []
    if unknown:
        raise Unsupported(f"generation_config sets {', '.join(unknown)}, which servers do not do: remove the setting")
    begin = own("forced_bos_token_id")
    return TokenRules(
        begin=() if begin is None else ((begin,),),
        last=last[0] if isinstance(last, list) else last,
        suppress=tuple(sorted({*(own("suppress_tokens") or ()), *(word[0] for word in words)})),
        begin_suppress=tuple(own("begin_suppress_tokens") or ()),
        min_tokens=max((own("min_length") or 0) - start, own("min_new_tokens") or 0),
        no_repeat=own("no_repeat_ngram_size") or 0,
    )
