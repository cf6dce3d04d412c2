"""Parts of a syntax tree, as the reader of handlers needs them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from ingot.importing.recognition.form import UNKNOWN, Value

CLASSIFIER, VISION = "ImageClassifier", "VisionHandler"
_BASES = ("BaseHandler", VISION, CLASSIFIER)
_LONGEST = 100
SKIPPED = (
    ast.Import | ast.ImportFrom | ast.Pass | ast.Assert | ast.Raise | ast.Delete | ast.Continue | ast.Break
    | ast.FunctionDef | ast.ClassDef | ast.Global
)  # fmt: skip
"""Statements without an effect on values that are followed."""
PASSING = ("staticmethod", "no_grad", "inference_mode")
"""Decorators that leave a function's result as it is."""


@dataclass
class Scope:
    """The variables of a function, its returns, and the value of them that comes furthest."""

    values: dict[str, Value] = field(default_factory=dict)
    returned: Value = UNKNOWN
    returns: list[tuple[ast.Return, Value]] = field(default_factory=list)


def functions_of(body: Sequence[ast.stmt]) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module, or the methods of a class, by name."""
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef)}


def base_of(handler: ast.ClassDef) -> str:
    """Return TorchServe's class that a class derives from; empty for none."""
    return next((name for each in handler.bases if (name := ast.unparse(each).rpartition(".")[2]) in _BASES), "")


def shown(node: ast.AST) -> str:
    """Return code in one short line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
