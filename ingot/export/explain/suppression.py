"""Non-maximum suppression written as a Python loop, for which torchvision has an operator and ONNX another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ingot.export.explain.code import Edit, Site

_NAMES = re.compile(r"(^|_)(iou|ious|nms|suppress\w*|suppression)(_|$)", re.IGNORECASE)
_ADVICE = (
    "this looks like non-maximum suppression: call torchvision.ops.nms or batched_nms, which becomes the graph's "
    "NonMaxSuppression, or define an operator with ingot.op (docs/guides/make/detectors.md)"
)


def replace_loop(site: Site) -> Edit | None:
    """Return the edit of a function with a loop and names of non-maximum suppression, or None."""
    function = site.function
    if function is None or not any(isinstance(node, ast.While | ast.For) for node in ast.walk(function)):
        return None
    if not any(map(_NAMES.search, _identifiers(function))):
        return None
    return Edit(_ADVICE, site.text(site.statement, site.statement))


def _identifiers(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Name(name) | ast.Attribute(_, name) | ast.arg(name) | ast.FunctionDef(name):
                yield name
