"""The text of tokens while they arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ingot.steps.tokenizer import Tokenizer

# Tokens of the text so far that are decoded again with each new one, so that it has its blanks: from 4 to some 8.
_CONTEXT = 4
# Tokens of a window whose text ends in the middle of a character, from which on the window is divided.
_UNDIVIDED = 32
# Bytes of a character in UTF-8.
_LONGEST = 4
# What decoders write for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"
# The form of tokens that decoders of the kind ByteFallback read as bytes.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# A text whose last token is not empty, after which a token has its leading blank.
_ANCHOR = "a"


class TokenTexts:
    """The texts of a tokenizer's tokens; immutable, for any number of threads.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer):
        whole = tokenizer.whole
        self._decode = whole.decode
        self._token = whole.id_to_token
        self._special = frozenset(number for number, added in whole.get_added_tokens_decoder().items() if added.special)
        vocabulary = whole.get_vocab(with_added_tokens=False) if tokenizer.byte_fallback else {}
        self._bytes = frozenset(number for token, number in vocabulary.items() if _BYTE.fullmatch(token))
        self._anchor = whole.encode(_ANCHOR, add_special_tokens=False).ids[-1:]
        self._before = len(self.of(self._anchor))

    def of(self, ids: Sequence[int]) -> str:
        """Return the text of a row, without special tokens."""
        text: str = self._decode(ids, skip_special_tokens=True)
        return text

    def alone(self, token: int) -> str:
        """Return the text of one token as it is behind others; a special token's is its name."""
        if token in self._special:
            return self._token(token) or ""
        return self.of([*self._anchor, token])[self._before :]

    def silent(self, token: int) -> bool:
        """Return whether a token has no text."""
        return token in self._special or self._token(token) is None

    def pending(self, token: int) -> bool:
        """Return whether the text of a token may depend on what follows, as one wrong byte of a run spoils all."""
        return token in self._bytes


class Detokenizer:
    """Turns the tokens of one answer into pieces of text: joined, they are the text of all tokens decoded at once.

    No piece ends in the middle of a character.

    Args:
        texts: of the model's tokenizer.
    """

    def __init__(self, texts: TokenTexts):
        self._texts = texts
        self._window: list[int] = []  # the last tokens
        self._returned = 0  # characters of the window's text
        self._context = 0  # tokens of the window, the text of which was whole when they were decoded,
        self._length = 0  # and the characters of that text

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        if self._texts.silent(token):
            return ""
        self._window.append(token)
        return "" if self._texts.pending(token) else self._advance()

    def end(self) -> str:
        """Return the rest of the text; there are no more tokens."""
        return self._texts.of(self._window)[self._returned :]

    def _advance(self) -> str:
        text = self._texts.of(self._window)
        whole = not text.endswith(_REPLACEMENT)
        piece = text[self._returned :] if whole else text[self._returned : -1]
        self._returned += len(piece)
        new = len(self._window) - self._context
        if whole and new >= _CONTEXT and len(text) > self._length:
            del self._window[: self._context]
            self._context, self._length = new, len(self._texts.of(self._window))
            self._returned = self._length
        elif not whole and new > _UNDIVIDED:
            self._divide(text)
        return piece

    def _divide(self, text: str) -> None:
        """Drop the tokens before the incomplete character, which has its first byte in one of the last tokens."""
        of, window = self._texts.of, self._window
        for place in range(len(window) - 1, len(window) - _LONGEST, -1):
            before = of(window[:place])
            if before + of(window[place:]) == text:
                del window[:place]
                self._returned -= len(before)
                self._context = self._length = 0
                return
