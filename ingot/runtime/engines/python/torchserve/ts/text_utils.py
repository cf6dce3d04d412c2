"""``ts.handler_utils.text_utils``: torchtext's tokens of a plain text in English, and sequences of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

_SPACED = re.compile(r"(['.,()!?])")
_REPLACED = (('"', ""), ("<br />", " "), (";", " "), (":", " "))


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield tokens, and then all sequences of two and more, up to ``ngrams`` of them, joined by blanks."""
    yield from token_list
    for count in range(2, ngrams + 1):
        for start in range(len(token_list) - count + 1):
            yield " ".join(token_list[start : start + count])


def get_tokenizer(tokenizer: str | None, language: str = "en") -> Callable[[str], list[str]]:
    """Return the tokenizer ``basic_english``, or without a name one that divides texts at blanks.

    Raises:
        ValueError: it is another.
    """
    if tokenizer is None:
        return str.split
    if tokenizer != "basic_english" or language != "en":
        raise ValueError(f"the tokenizer {tokenizer!r} for {language!r} is not known; there is basic_english for 'en'")
    return _basic_english


def _basic_english(line: str) -> list[str]:
    line = line.lower()
    for old, new in _REPLACED:
        line = line.replace(old, new)
    return _SPACED.sub(r" \1 ", line).split()
