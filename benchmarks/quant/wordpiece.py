"""BERT's tokenizer for lower-case English: words at spaces and punctuation, then the longest known pieces."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.tensors import Array

_LONGEST_WORD = 100


class Tokenizer:
    """Reads ``vocab.txt``: one piece per line, numbered from 0."""

    def __init__(self, vocabulary: Path):
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self._ids = {piece: index for index, piece in enumerate(lines)}

    def encode(self, texts: Sequence[str], length: int) -> tuple[Array, Array]:
        """Return token ids and the mask, both int64 [texts, length], cut or padded with 0."""
        ids = np.zeros((len(texts), length), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            pieces = [piece for word in split_words(text) for piece in self._pieces(word)][: length - 2]
            found = [self._ids[piece] for piece in ("[CLS]", *pieces, "[SEP]")]
            ids[row, : len(found)] = found
            mask[row, : len(found)] = 1
        return ids, mask

    def _pieces(self, word: str) -> list[str]:
        pieces: list[str] = []
        begin = 0
        while begin < len(word):
            ends = range(len(word), begin, -1)
            found = (("##" if begin else "") + word[begin:end] for end in ends)
            piece = next((piece for piece in found if piece in self._ids), None)
            if piece is None or len(word) > _LONGEST_WORD:
                return ["[UNK]"]
            pieces.append(piece)
            begin += len(piece) - (2 if begin else 0)
        return pieces


def split_words(text: str) -> Iterator[str]:
    """Yield the words and the punctuation marks of a text, lower-case and without accents."""
    plain = unicodedata.normalize("NFD", text.lower())
    yield from _join(character for character in plain if unicodedata.category(character) != "Mn")


def _join(characters: Iterable[str]) -> Iterator[str]:
    word = ""
    for character in characters:
        mark = _is_mark(character)
        if (mark or character.isspace()) and word:
            yield word
            word = ""
        if mark:
            yield character
        elif not character.isspace():
            word += character
    if word:
        yield word


def _is_mark(character: str) -> bool:
    # ASCII symbols such as $ and + count as punctuation in BERT, though Unicode calls them symbols.
    ascii_mark = character.isascii() and character.isprintable() and not character.isalnum() and character != " "
    return ascii_mark or unicodedata.category(character).startswith("P")
