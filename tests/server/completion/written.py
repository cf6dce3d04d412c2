"""A decoder that writes ASCII, one character a token, and its texts computed in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ingot.model_store import SamplingDefaults
from tests.runtime.generation import decoders as by_hand

NAME = "writer"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }}{{ '!' if shout }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
_FIRST = 2  # of the tokens with a character; those before are unknown, and the end


def tokenizer_file() -> bytes:
    """Return a tokenizer of 96 tokens: ``<unk>``, ``</s>`` and the characters from the blank on."""
    words = {"<unk>": 0, "</s>": 1, **{chr(32 + at): _FIRST + at for at in range(by_hand.VOCAB - _FIRST)}}
    made = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<unk>", "</s>"])
    return made.to_str().encode()


def archive(folder: Path, name: str = NAME, **changes: Any) -> Path:
    """Write an archive of it.

    Args:
        folder: where to.
        name: of the model.
        changes: of its declaration.
    """
    declared = {"tokenizer": "tokenizer.json", "chat_template": TEMPLATE, **changes}
    generation = by_hand.GENERATION.model_copy(update=declared)
    files = {"tokenizer.json": tokenizer_file()} if generation.tokenizer else {}
    return by_hand.archive(folder, name, generation, files)


DRAWS = SamplingDefaults(do_sample=True, temperature=3.0, top_k=0)
"""How a model chooses tokens that draws them unless a request says otherwise."""


def ids(text: str) -> list[int]:
    """Return the tokens of a text; other characters than those from the blank on have the unknown token."""
    return [max(0, _FIRST + ord(character) - 32) for character in text]


def text(prompt: str, count: int, *, stop: bool = True) -> str:
    """Return the most likely text behind a prompt; ``stop`` is whether the end token ends it."""
    found = by_hand.greedy(ids(prompt), count, by_hand.GENERATION.eos if stop else ())
    return "".join(chr(32 + number - _FIRST) for number in found if number >= _FIRST)
