"""``ts.torch_handler.text_handler``: a vocabulary, and what handlers of texts do to them.

Source: ts/torch_handler/text_handler.py of https://github.com/pytorch/serve 0.12.
"""

from __future__ import annotations

import abc
import re
import string
import unicodedata
from pathlib import Path
from typing import Any

from ingot.runtime.engines.python.torchserve.ts.base_handler import BaseHandler
from ingot.runtime.engines.python.torchserve.ts.context import Context
from ingot.runtime.engines.python.torchserve.ts.text_utils import get_tokenizer

VOCABULARY = "source_vocab.pt"
# The word of a vocabulary that stands for all others.
_OTHERS = "<unk>"
# What contracted words in lower case stand for, in the order in which they are looked for; from contractions.py of the
# same source (Apache-2.0).
_FULL = dict(line.split(": ") for line in Path(__file__).with_name("contractions.txt").read_text("utf-8").splitlines())
_CONTRACTIONS = re.compile(f"({'|'.join(_FULL)})", re.IGNORECASE)
_MARKUP = re.compile(r"<.*?>|&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class _Numbers(dict[str, int]):
    """The numbers of words in a dictionary; those that it lacks have the number of ``<unk>``."""

    def __missing__(self, word: str) -> int:
        return self[_OTHERS]


def _numbers(vocabulary: Any, name: str) -> Any:
    """Return a vocabulary that has a number for each word, as one of torchtext's classes with a default does."""
    if type(vocabulary) is not dict:
        return vocabulary
    if _OTHERS not in vocabulary:
        raise ValueError(
            f"{name} is a dictionary without '{_OTHERS}', so that a text with any other word would fail; add its "
            "number for words that are not in it"
        )
    return _Numbers(vocabulary)


class TextHandler(BaseHandler, abc.ABC):
    """Loads the vocabulary of an archive."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = get_tokenizer("basic_english")

    def initialize(self, context: Context) -> None:
        """Load the model and the vocabulary, which may be a pickle: code of the archive, as the handler itself.

        Raises:
            ValueError: the vocabulary is a dictionary without a number for other words.
        """
        super().initialize(context)
        import torch

        path = self.get_source_vocab_path(context)
        self.source_vocab = _numbers(torch.load(path, map_location="cpu", weights_only=False), Path(path).name)

    def get_source_vocab_path(self, ctx: Context) -> str:
        named = self.manifest["model"].get("sourceVocab", VOCABULARY)
        path = Path(ctx.system_properties["model_dir"], named)
        if not path.is_file():
            raise FileNotFoundError(f"the archive has no vocabulary {named}; pack it (--extra-files)")
        return str(path)

    def _expand_contractions(self, text: str) -> str:
        def expanded(found: re.Match[str]) -> str:
            word = found[0]
            return word[0] + _FULL[word.lower()][1:]

        return _CONTRACTIONS.sub(expanded, text).replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return _MARKUP.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(_PUNCTUATION)

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)
