"""What ``generation_config`` of an encoder-decoder asks for: the rules that servers apply; the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.errors import Unsupported
from ingot.model_store.format.generation import TokenRules

# Settings that change which tokens are chosen, that servers do not apply, and the values that change nothing.
_NEUTRAL: dict[str, Sequence[Any]] = {
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


def rules_of(config: Any, eos: Sequence[int], start: int, *, greedy: bool) -> TokenRules:
    """Return the rules of a ``generation_config``.

    Args:
        config: of transformers.
        eos: tokens that end an answer.
        start: tokens before an answer.
        greedy: whether the most likely tokens do for a model with beam search.

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
    unknown = [name for name, neutral in _NEUTRAL.items() if own(name) is not None and own(name) not in neutral]
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
