"""Pieces of text, joined, against the tokenizer's own text of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ingot.steps.completion.detokenizer import Detokenizer, TokenTexts
from tests.steps.completion import tokens

_MADE = {kind: kind() for kind in tokens.KINDS}
_TEXTS = {kind: TokenTexts(tokens.loaded(made)) for kind, made in _MADE.items()}


def pieces_of(texts: TokenTexts, ids: Sequence[int]) -> list[str]:
    stream = Detokenizer(texts)
    return [*map(stream.add, ids), stream.end()]


def number_of(made: Tokenizer, token: str) -> int:
    number = made.token_to_id(token)
    assert number is not None
    return number


@pytest.mark.parametrize("kind", tokens.KINDS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_text_of_all(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    made = _MADE[kind]
    ids = data.draw(st.lists(st.integers(0, made.get_vocab_size() + 3), max_size=120))
    assert "".join(pieces_of(_TEXTS[kind], ids)) == made.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", [tokens.byte_level, tokens.byte_fallback])
def test_no_piece_has_half_a_character(kind: Callable[[], Tokenizer]) -> None:
    text = "the 中🦊é fox"
    pieces = pieces_of(_TEXTS[kind], _MADE[kind].encode(text, add_special_tokens=False).ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_characters_are_returned_with_their_last_byte() -> None:
    fox = _MADE[tokens.byte_level].encode("🦊 a").ids
    pieces = pieces_of(_TEXTS[tokens.byte_level], fox)
    assert pieces[pieces.index("🦊") + 1 :][:1] != [""]


@pytest.mark.parametrize("kind", tokens.KINDS)
def test_the_work_for_a_token_does_not_grow(kind: Callable[[], Tokenizer]) -> None:
    ids = [token for token in range(_MADE[kind].get_vocab_size()) if not _TEXTS[kind].pending(token)]
    stream = Detokenizer(_TEXTS[kind])
    for _ in range(max(3, 600 // len(ids))):
        for token in ids:
            stream.add(token)
            assert len(stream._window) < 64


def test_endless_wrong_bytes_are_returned_as_they_come() -> None:
    wrong = number_of(_MADE[tokens.byte_level], "ÿ")
    stream = Detokenizer(_TEXTS[tokens.byte_level])
    returned = sum(len(stream.add(wrong)) for _ in range(500))
    assert returned == 499
    assert len(stream._window) < 64
    assert stream.end() == "\ufffd"


def test_a_token_alone_has_its_blank() -> None:
    texts = _TEXTS[tokens.byte_fallback]
    made = _MADE[tokens.byte_fallback]
    assert texts.alone(number_of(made, "▁the")) == " the"
    assert texts.alone(number_of(made, "fox")) == "fox"
    assert texts.alone(number_of(made, "</s>")) == "</s>"
