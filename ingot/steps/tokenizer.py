"""A tokenizer of Hugging Face's ``tokenizers`` that is loaded once, and shared by all steps and threads."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakValueDictionary

from ingot import foreign
from ingot.errors import InvalidArchive, InvalidArgument, missing_package
from ingot.steps.growth import growth

# Bytes of a file. The largest of the models on Hugging Face's hub have some 35 MB.
_LARGEST = 64 << 20
# Characters that a normalizer may make of one text. Each may be a token, which takes some hundred bytes.
_MOST_NORMALIZED = 1 << 22
CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What transformers' ``clean_up_tokenization`` replaces, one after the other."""
# Characters that no vocabulary has: for these a tokenizer needs its unknown token, or bytes.
_STRANGE = "\U0010fffd \ue000 \u0b72"


class Tokenizer:
    """An immutable tokenizer without truncation and padding.

    Settings of truncation and padding belong to the object, and changing them while a thread encodes fails
    (huggingface/tokenizers#537).

    Args:
        content: its serialization.
        name: of its file, for messages.

    Raises:
        InvalidArchive: it cannot be read, or has no token for what it does not know.
        Unsupported: the package is not installed.
    """

    def __init__(self, content: bytes, name: str):
        # Its own threads would compete with those of engines, and warn where an engine process is forked.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Imported by name: the package has few types.
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError as error:
            raise missing_package("tokenizers", "a model that is served with its tokenizer", "text") from error
        self._kind: Any = tokenizers.Tokenizer
        self.name = name
        with foreign.reported_as(InvalidArchive, f"the tokenizer '{name}' cannot be read"):
            self.whole: Any = self._kind.from_str(content.decode())
            self.whole.no_truncation()
            self.whole.no_padding()
            declared = json.loads(content)
            self.subword_prefix = declared["model"].get("continuing_subword_prefix") or ""
            self.byte_fallback = '"ByteFallback"' in json.dumps(declared.get("decoder"))
            self._growths = {name: growth(declared.get(name)) for name in ("normalizer", "decoder")}
        self.check_growth(len(_STRANGE))
        with foreign.reported_as(InvalidArchive, self._incomplete):
            self.whole.encode(_STRANGE)

    def _incomplete(self, error: Exception) -> str:
        return (
            f"the tokenizer '{self.name}' cannot encode what its vocabulary lacks: {foreign.typed(error)}; give it the "
            "token of unknown words, and export the model again"
        )

    def check_growth(self, characters: int) -> None:
        """Refuse a tokenizer that may make too much of texts with so many characters: the package ends the process.

        Raises:
            InvalidArchive: its normalizer or decoder may.
        """
        for name, (factor, worst) in self._growths.items():
            if factor > 1 and factor * characters > _MOST_NORMALIZED:
                raise InvalidArchive(
                    f"the {name} of '{self.name}' may make {factor:.3g} characters of one, most by {worst}; for texts "
                    f"of {characters} characters the most are {_MOST_NORMALIZED / characters:.3g}: lower "
                    f"max_characters of step 'tokenize', or change the {name}"
                )

    @property
    def most_characters(self) -> int:
        """The longest text of which its normalizer and decoder cannot make too much; see :meth:`check_growth`."""
        return int(_MOST_NORMALIZED / max(1, *(factor for factor, _ in self._growths.values())))

    def cutting(
        self,
        length: int,
        *,
        strategy: Literal["longest_first", "only_second"] = "longest_first",
        side: Literal["right", "left"] = "right",
        stride: int = 0,
    ) -> Any:
        """Return a copy that cuts rows at ``length`` tokens."""
        copy: Any = self._kind.from_str(self.whole.to_str())
        copy.enable_truncation(length, stride=stride, strategy=strategy, direction=side)
        return copy

    def special(self, *, pair: bool) -> int:
        """Return how many special tokens each row has."""
        count: int = self.whole.num_special_tokens_to_add(pair)
        return count

    def check_rows(self, *, pair: bool) -> None:
        """Refuse a tokenizer that repeats a text in its row, which cutting does not count.

        Raises:
            InvalidArchive: it does.
        """
        for texts in (("a",), ("a", "a"))[: 1 + pair]:
            most = found = self.special(pair=len(texts) > 1) + len(texts)
            with contextlib.suppress(InvalidArchive), foreign.reported_as(InvalidArchive, "has no token for this text"):
                found = len(self.cutting(most).encode(*texts))
            if found > most:
                raise InvalidArchive(
                    f"the tokenizer '{self.name}' cut at {most} tokens makes rows of {found}: its post-processor "
                    "repeats a text, or adds other special tokens than it states; let it have each text once"
                )

    def check_id(self, what: str, number: int) -> None:
        """Refuse an id that no token has.

        Raises:
            InvalidArgument: no token has it.
        """
        if self.whole.id_to_token(number) is None:
            raise InvalidArgument(f"{what} is {number}, which no token of '{self.name}' has; give the id of its token")

    def token(self, number: int) -> str:
        """Return the token with an id; empty if there is none."""
        return self.whole.id_to_token(number) or ""

    def joined(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens, as transformers' ``convert_tokens_to_string`` does."""
        decoder = self.whole.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode([*tokens]))

    def decode(self, rows: Sequence[Sequence[int]], *, skip_special: bool, clean_up: bool = False) -> list[str]:
        """Return the texts of rows of ids.

        Args:
            rows: ids of tokens; those that no token has are left out.
            skip_special: whether special tokens are left out.
            clean_up: whether blanks before punctuation are removed, as transformers' option
                ``clean_up_tokenization_spaces`` does.
        """
        texts = self.whole.decode_batch([[*row] for row in rows], skip_special_tokens=skip_special)
        return [_cleaned(text) if clean_up else text for text in texts]


_LOADED: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()


def load(content: bytes, name: str) -> Tokenizer:
    """Return the tokenizer of a file, which several steps may share; see :class:`Tokenizer` for the errors."""
    if len(content) > _LARGEST:
        raise InvalidArchive(
            f"the tokenizer '{name}' has {len(content) >> 20} MiB; the most are {_LARGEST >> 20}: reading it takes "
            "some ten times as much memory"
        )
    digest = hashlib.sha256(content).digest()
    if (found := _LOADED.get(digest)) is None:
        found = _LOADED[digest] = Tokenizer(content, name)
    return found


def _cleaned(text: str) -> str:
    for old, new in CLEANED:
        text = text.replace(old, new)
    return text
