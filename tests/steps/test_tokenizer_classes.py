"""The tokenize step against the tokenizers of transformers, built from vocabularies that are made here."""

from __future__ import annotations

import pytest
import transformers

from scripts import tokenizer_classes
from scripts.tokenizer_classes import Row


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("BertTokenizer", "WordPiece"),
        ("RobertaTokenizer", "BPE"),
        ("LlamaTokenizer", "BPE"),
        ("T5Tokenizer", "Unigram"),
    ],
)
def test_tokens_equal_those_of_transformers(name: str, model: str) -> None:
    row = tokenizer_classes.row_of(name, getattr(transformers, name))
    assert row == Row(name, model, 624, 624)


def test_a_class_in_python_has_no_step() -> None:
    row = tokenizer_classes.row_of("ByT5Tokenizer", transformers.ByT5Tokenizer)
    assert row.reason == "Python code, which an archive cannot hold"


@pytest.mark.matrix
def test_the_page_lists_every_tokenizer_of_transformers() -> None:
    assert tokenizer_classes.PAGE.read_text() == tokenizer_classes.page(), "run python scripts/tokenizer_classes.py"
