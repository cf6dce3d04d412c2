"""Tiny decoders of transformers with random weights, whose greedy tokens are far from the next best ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WORDS = ["the film was fine and the cast was bright", "hello there", "an answer to a question of the user"]
# Logits are spread so that rounding changes no token.
_SPREAD = 20.0


def save_tokenizer(folder: Path, *, ends: bool = False) -> int:
    """Write a tokenizer of bytes and some pairs, and return its number of tokens; ``ends`` adds the end to texts."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_WORDS * 3, trainer)
    if ends:
        closing: Any = processors.TemplateProcessing
        tokenizer.post_processor = closing(single=f"$A {_SPECIAL[0]}", special_tokens=[(_SPECIAL[0], 0)])
    fast: Any = transformers.PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizer, eos_token=_SPECIAL[0])
    made.chat_template = _TEMPLATE
    made.save_pretrained(folder)
    return len(made)


def save(folder: Path, family: str = "llama", *, tokenizer: bool = True, **changes: Any) -> Any:
    """Write a decoder with random weights to a folder, and return it.

    Args:
        folder: created if it is missing.
        family: a ``model_type`` of transformers.
        tokenizer: whether a tokenizer is written, too.
        changes: further fields of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = save_tokenizer(folder) if tokenizer else 96
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(family, **{**sizes, **changes})
    auto: Any = transformers.AutoModelForCausalLM
    return _saved(folder, auto, config)


def save_encoder_decoder(folder: Path, family: str = "t5", *, tokenizer: bool = True, **changes: Any) -> Any:
    """Write an encoder-decoder with random weights to a folder, and return it; see :func:`save`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = save_tokenizer(folder, ends=True) if tokenizer else 96
    special = {"decoder_start_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    sizes = {"vocab_size": vocab, "d_model": 32, **special, "forced_eos_token_id": None, "tie_word_embeddings": False}
    if "t5" in family:
        sizes |= {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    else:
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
        sizes |= {"max_position_embeddings": 128}
    config = transformers.AutoConfig.for_model(family, **{**sizes, **changes})
    auto: Any = transformers.AutoModelForSeq2SeqLM
    return _saved(folder, auto, config)


def _saved(folder: Path, auto: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)  # as initialized, the layers hardly change the embeddings
        head = model.get_output_embeddings().weight
        head.mul_(_SPREAD / head.std() / 4)
    model.save_pretrained(folder)
    return model
