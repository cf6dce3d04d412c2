"""Protobuf's text format, as far as configuration files use it: fields, messages, lists, strings, numbers, words.

Its messages are known by no schema, so fields of any later version can be read. Specification:
https://protobuf.dev/reference/protobuf/textformat-spec/
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.errors import InvalidArgument

MAX_BYTES = 1 << 20
MAX_TOKENS = 100_000
MAX_DEPTH = 32

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>-?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?)(?![\w.]))
    |(?P<word>-?[A-Za-z_][\w.\-/]*)
    |(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"{": "}", "<": ">"}
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


class Message(dict[str, list["str | int | float | Message"]]):
    """The values of each field, in order: numbers, strings and words as text, and messages."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def parse(raw: bytes, where: str) -> Message:
    """Parse a file.

    Args:
        raw: its content.
        where: what messages call it.

    Raises:
        InvalidArgument: it is not of the format, or larger or deeper than any configuration is.
    """
    if len(raw) > MAX_BYTES:
        raise InvalidArgument(f"{where} is larger than {MAX_BYTES >> 20} MiB, which no configuration is")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{where} is not text: {error.reason} at byte {error.start}") from error
    return _Parser(_tokens(text, where), where).message(None, 0)


def _tokens(text: str, where: str) -> Iterator[_Token]:
    position, line = 0, 1
    for _ in range(2 * MAX_TOKENS):  # half of them spaces
        if position == len(text):
            return
        match = _TOKEN.match(text, position)
        if match is None:
            raise InvalidArgument(f"{where}, line {line}: {text[position : position + 20]!r} cannot stand here")
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], line)
        line += match[0].count("\n")
        position = match.end()
    raise InvalidArgument(f"{where} has over {MAX_TOKENS} words, which no configuration has")


class _Parser:
    """Parses tokens, one message at a time."""

    def __init__(self, tokens: Iterator[_Token], where: str):
        self._tokens = tokens
        self._where = where
        self._line = 1
        self._next = self._advance()

    def message(self, closing: str | None, depth: int) -> Message:
        """Parse fields up to a closing mark, or to the end."""
        if depth > MAX_DEPTH:
            raise self._error(f"messages inside each other, over {MAX_DEPTH} deep")
        found = Message()
        while not (self._next is None if closing is None else self._is(closing)):
            name = self._name()
            colon = self._skip(":")
            found.setdefault(name, []).extend(self._values(depth, colon))
            if not self._skip(","):
                self._skip(";")
        self._take()
        return found

    def _name(self) -> str:
        token = self._take()
        if token is not None and token.kind == "word":
            return token.text
        if token is not None and token.text == "[":  # an extension's, or a type's
            name = self._take()
            if name is not None and name.kind == "word" and self._skip("]"):
                return f"[{name.text}]"
        raise self._unexpected(token, "the name of a field")

    def _values(self, depth: int, colon: bool) -> list[str | int | float | Message]:
        if not self._is("["):
            return [self._value(depth, colon)]
        self._take()
        values: list[str | int | float | Message] = []
        while not self._skip("]"):
            values.append(self._value(depth, colon))
            if not self._skip(",") and not self._is("]"):
                raise self._unexpected(self._next, "',' or ']'")
        return values

    def _value(self, depth: int, colon: bool) -> str | int | float | Message:
        token = self._take()
        if token is not None and token.text in _CLOSING:
            return self.message(_CLOSING[token.text], depth + 1)
        if token is None or token.kind == "mark" or not colon:
            raise self._unexpected(token, "a value" if colon else "':' or '{'")
        if token.kind == "number":
            return self._number(token.text)
        if token.kind == "word":
            return token.text
        text = self._text(token)
        while self._next is not None and self._next.kind == "string":  # neighbours are one
            text += self._text(self._next)
            self._take()
        return text

    def _number(self, text: str) -> int | float:
        if re.fullmatch(r"-?0[0-7]+", text):
            return int(text, 8)
        try:
            return int(text, 0) if len(text) < 40 else float(text)
        except ValueError:
            return float(text.rstrip("fF"))

    def _text(self, token: _Token) -> str:
        try:
            return _ESCAPE.sub(_unescaped, token.text[1:-1].encode()).decode()
        except (ValueError, OverflowError) as error:
            raise self._error(f"{token.text[:40]} is no string") from error

    def _is(self, mark: str) -> bool:
        return self._next is not None and self._next.kind == "mark" and self._next.text == mark

    def _skip(self, mark: str) -> bool:
        if self._is(mark):
            self._take()
            return True
        return False

    def _take(self) -> _Token | None:
        token = self._next
        if token is not None:
            self._line = token.line
            self._next = self._advance()
        return token

    def _advance(self) -> _Token | None:
        return next(self._tokens, None)

    def _unexpected(self, token: _Token | None, wanted: str) -> InvalidArgument:
        found = f"{token.text[:40]!r}" if token is not None else "the end of the file"
        return self._error(f"{found} stands where {wanted} should be")

    def _error(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._where}, line {self._line}: {what}")


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, letter = match.groups()
    if octal or hexadecimal:  # a byte, of which several may be one character
        return bytes([int(octal, 8) & 0xFF if octal else int(hexadecimal, 16)])
    if short or long:
        return chr(int(short or long, 16)).encode()
    return _LETTERS.get(letter, letter)
