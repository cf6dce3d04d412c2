"""Compares the tokenize step with the tokenizers of transformers, and writes the table of the reference.

``python scripts/tokenizer_classes.py`` builds each class of the installed transformers from a vocabulary that is made
here, compares the tokens of hard texts and pairs, and writes docs/reference/tokenizers.md. A test checks that the page
is current.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import string
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.export.program import quiet
from ingot.export.tasks.tokenizer import serialized
from ingot.steps import Values
from ingot.steps.samples import texts
from ingot.steps.tokenize import Tokenize

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "tokenizers.md"
_LENGTH = 128
_WORDS = [
    "a",
    "the",
    "film",
    "story",
    "cast",
    "music",
    "fine",
    "dull",
    "bright",
    "slow",
    "and",
    "but",
    "because",
    "with",
    "without",
    "of",
    "again",
    "today",
    "we",
    "they",
    "out",
]
# Texts of which vocabularies are trained: words at the start and inside of a text, in both cases.
_CORPUS = [" ".join(_WORDS), " ".join(map(str.upper, _WORDS)), "DON'T é ü ß 你 好 مرحبا 123 4567"] * 4


@dataclass(frozen=True)
class Row:
    """A class: its kind of vocabulary, and the numbers of texts with equal tokens and of all; or why it has none."""

    name: str
    model: str = ""
    equal: int = 0
    count: int = 0
    reason: str = ""


def classes() -> Iterator[tuple[str, Any]]:
    """Yield the classes of the installed transformers by their names, or why one cannot be imported."""
    import transformers
    from transformers import models

    found: dict[str, Any] = {}
    for package in pkgutil.iter_modules(models.__path__):
        folder = importlib.import_module(f"transformers.models.{package.name}")
        for module in pkgutil.iter_modules(folder.__path__):
            if module.name.startswith("tokenization_"):
                found |= _of_module(f"{folder.__name__}.{module.name}", transformers.PreTrainedTokenizerBase)
    yield from sorted(found.items())


def _of_module(name: str, base: type[Any]) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
    except (ImportError, NameError) as error:
        return {name.removeprefix("transformers.models."): error}
    own = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name)
    return {each.__name__: each for each in own if issubclass(each, base)}


def row_of(name: str, kind: Any) -> Row:
    """Compare the step with a class."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    if isinstance(kind, Exception):
        package = getattr(kind, "name", None)
        return Row(name, reason=f"needs {package if package else str(kind).split(chr(39))[1]}")
    if not issubclass(kind, TokenizersBackend):
        return Row(name, reason="Python code, which an archive cannot hold")
    if others := {"boxes", "xpaths"} & {*inspect.signature(kind.__call__).parameters}:
        return Row(name, reason=f"reads words with their {others.pop()}")
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        made = built(kind)
        if isinstance(made, str):
            return Row(name, reason=made)
        return _compared(name, made)


def _compared(name: str, own: Any) -> Row:
    model = type(own.backend_tokenizer.model).__name__
    try:
        step = Tokenize(pair="text_pair", max_length=_LENGTH, truncation_side=own.truncation_side)
        apply = step.open(lambda _: serialized(own))
    except IngotError as error:
        return Row(name, model, reason=str(error))
    equal = count = 0
    for values in texts.sets(texts.hard(), step.text, step.pair, required=False):
        columns = [[item.decode() for item in array.tolist()] for array in values.values()]
        try:
            found = own(*columns, truncation="longest_first", max_length=_LENGTH)
        except (TypeError, ValueError, AssertionError) as error:
            return Row(name, model, reason=f"reads other inputs than texts: {str(error).splitlines()[0][:90]}")
        rows = _rows(step, apply(values))
        names = [each for each in ("input_ids", "token_type_ids") if each in found]
        count += len(rows)
        equal += sum(all(row[each] == found[each][index] for each in names) for index, row in enumerate(rows))
    return Row(name, model, equal, count)


def _rows(step: Tokenize, values: Values) -> list[dict[str, list[int]]]:
    """Return the ids and types of each text, without padding."""
    masks = values[step.attention_mask] == 1
    return [
        {name: values[name][index, mask].tolist() for name in (step.ids, step.types)}
        for index, mask in enumerate(masks)
    ]


def built(kind: Any) -> Any:
    """Return a tokenizer of a class with a vocabulary that is made here, or the reason why there is none."""
    failures: list[Exception] = []
    for vocabulary in _vocabularies(kind):
        try:
            made = kind(**vocabulary)
            if len(made) > len(made.all_special_ids) + 20 and made("a film").input_ids:
                return made
        except Exception as error:  # noqa: BLE001 - constructors raise anything
            failures.append(error)
    if not failures:
        return "accepts no vocabulary"
    shown = next((error for error in failures if isinstance(error, ImportError)), failures[0])
    text = str(shown).splitlines()[0]
    package = re.search(r"install (\w+)", text)
    return f"needs {package[1]}" if package else f"cannot be built: {text.partition('. ')[0][:60]}"


def _vocabularies(kind: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments with vocabularies for a class: the kind that it names first."""
    special = [*_special(kind)]
    parameters = inspect.signature(kind.__init__).parameters
    others = {"tags_dict": {"div": 0}} if "tags_dict" in parameters else {}
    named = getattr(getattr(kind, "model", None), "__name__", "")
    made = {"WordPiece": _wordpiece, "BPE": _bpe, "Unigram": _unigram}
    for name in dict.fromkeys((named, "Unigram", "WordPiece", "BPE")):
        if name in made:
            yield {**made[name](tuple(special)), **others}


def _special(kind: Any) -> Iterator[str]:
    """Yield the special tokens that a class names; the unknown one is never missing."""
    seen = {"<pad>", "<unk>"}
    yield from ("<pad>", "<unk>")
    for each in (kind, *kind.__mro__):
        for name, parameter in inspect.signature(each.__init__).parameters.items():
            token = str(parameter.default)
            if name.endswith("_token") and isinstance(parameter.default, str) and token not in seen:
                seen.add(token)
                yield token


def _wordpiece(special: Sequence[str]) -> dict[str, Any]:
    letters = [*string.ascii_lowercase, *string.ascii_uppercase, *string.digits, *string.punctuation, *"éüß你好م"]
    words = [*special, *letters, *(f"##{letter}" for letter in letters), *_WORDS, "##s", "##ly"]
    return {"vocab": {word: index for index, word in enumerate(dict.fromkeys(words))}}


@functools.cache
def _trained() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the words and merges of a BPE that are for bytes, and for characters with both marks of words."""
    import json

    import tokenizers

    made: Any = tokenizers
    words: dict[str, None] = {}
    merges: dict[tuple[str, str], None] = {}
    for before in (made.pre_tokenizers.ByteLevel(add_prefix_space=True), made.pre_tokenizers.Metaspace()):
        one = made.Tokenizer(made.models.BPE())
        one.pre_tokenizer = before
        alphabet = made.pre_tokenizers.ByteLevel.alphabet()
        one.train_from_iterator(
            _CORPUS, made.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
        )
        content = json.loads(one.to_str())["model"]
        words |= dict.fromkeys(content["vocab"])
        merges |= dict.fromkeys(tuple(pair) for pair in content["merges"])
    return (*words, *(f"<0x{byte:02X}>" for byte in range(256))), tuple(merges)


def _bpe(special: Sequence[str]) -> dict[str, Any]:
    words, merges = _trained()
    ends = [f"{word}</w>" for word in words if len(word) == 1]
    vocabulary = dict.fromkeys((*special, *words, *ends))
    return {"vocab": {word: index for index, word in enumerate(vocabulary)}, "merges": [*merges]}


def _unigram(special: Sequence[str]) -> dict[str, Any]:
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, *"éüß你好م", "▁"]
    words = dict.fromkeys((*special, *letters, *(f"▁{word}" for word in _WORDS), *_WORDS))
    # SentencePiece gives special tokens no score.
    scores = {word: 0.0 if word in special else -float(len(words)) / (1 + len(word)) for word in words}
    return {"vocab": [*scores.items()]}


def page() -> str:
    """Return the page of the reference."""
    import tokenizers
    import transformers

    rows = []
    for name, kind in classes():
        rows.append(row_of(name, kind))
        print(rows[-1].name, rows[-1].reason or f"{rows[-1].equal} of {rows[-1].count}", file=sys.stderr)
    known = [row for row in rows if not row.reason]
    table = "\n".join(f"| {row.name} | {row.model} | {row.equal} of {row.count} |" for row in known)
    without = "\n".join(f"| {row.name} | {_cell(row.reason)} |" for row in rows if row.reason)
    return f"""# Tokenizers

Which tokenizers of transformers the [tokenize step](../guides/serve/texts.md) reproduces, written by `python
scripts/tokenizer_classes.py` with transformers {transformers.__version__} and tokenizers {tokenizers.__version__}.

Each class was built from a small vocabulary without a download. The tokenizer that it makes was stored as an export
stores it. "Equal" is the number of hard texts and pairs of which the step makes the same ids and types as the class,
cut at {_LENGTH} tokens. Of the {len(rows)} classes, {len(known)} are compared. An export compares the tokenizer of your
model once more.

| class | vocabulary | equal |
|---|---|---|
{table}

The others are not compared:

| class | reason |
|---|---|
{without}
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
