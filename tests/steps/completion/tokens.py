"""Tokenizers of each kind of decoder, small enough for a test to make them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ingot.steps import tokenizer

_TEXT = ["the quick brown fox jumps over the lazy dog, then it sleeps.", "größer 中文 字 🦊 é", "don't stop; the end"]
_BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}


def byte_level() -> Tokenizer:
    """Return one as GPT-2, Llama 3 and Qwen have it: every byte is a token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    made.train_from_iterator(_TEXT, trainer)
    return made


def byte_fallback() -> Tokenizer:
    """Return one as Llama 2, Mistral and Gemma have it: bytes stand for characters that have no token."""
    words = ["▁", "▁the", "▁quick", "fox", "s", "a", "▁中", "é"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **_BYTES, **{word: 259 + at for at, word in enumerate(words)}}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return made


def metaspace() -> Tokenizer:
    """Return one as T5 has it."""
    pieces = [("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), ("▁the", -1.0), ("▁fox", -2.0), ("es", -3.0), ("a", -4.0)]
    made = Tokenizer(models.Unigram(pieces, 1))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</s>", "<unk>"])
    return made


def word_piece() -> Tokenizer:
    """Return one as BERT has it."""
    words = ["[UNK]", "the", "fox", "##es", "##.", ".", "'", "n't", "a", ","]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=True)
    made.add_special_tokens(["[UNK]"])
    return made


def word_ends() -> Tokenizer:
    """Return one as CLIP and GPT have it: tokens name the ends of words."""
    words = ["<unk>", "the</w>", "fo", "x</w>", "a</w>", "b"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    made.decoder = decoders.BPEDecoder("</w>")
    made.add_tokens([AddedToken("<unk>", special=True), AddedToken("<|tool|>", special=False)])
    return made


KINDS = (byte_level, byte_fallback, metaspace, word_piece, word_ends)


def loaded(made: Tokenizer) -> tokenizer.Tokenizer:
    """Return a tokenizer in the form in which steps load it from an archive."""
    content: dict[str, Any] = json.loads(made.to_str())
    return tokenizer.load(json.dumps(content).encode(), "tokenizer.json")
