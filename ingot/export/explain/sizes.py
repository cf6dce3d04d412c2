"""Tensor values used as sizes, whose bounds a graph must know, stated by ``torch._check``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from ingot.export.explain.code import Edit, Site, expressions, loaded
from ingot.export.explain.conversions import as_tensor, numbers_of

_ADVICE = "state the bounds of the size by torch._check before it is used"


def bound(site: Site) -> Edit | None:
    """Return the edit that bounds the last ``x[:n]`` up to the statement whose ``n`` is a tensor's value, or None."""
    for index in range(site.index, -1, -1):
        earlier = Site(site.lines, site.function, site.siblings, index)
        known = numbers_of(earlier, [earlier.statement])
        for tensor, axis, size in _slices(earlier.statement):
            limit = f"{tensor}.shape[{axis}]"
            if isinstance(size, ast.Name) and size.id in known:
                return _with_checks(earlier, earlier.splice(_ADVICE, []), size.id, limit)
            if not isinstance(size, ast.Name) and _is_value(size):
                made = f"{earlier.indent}size = ({ast.unparse(as_tensor(size, {}))}).item()\n"
                edit = _with_checks(earlier, earlier.splice(_ADVICE, [(size, "size")]), "size", limit)
                return replace(edit, replacement=made + edit.replacement)
    return None


def _with_checks(site: Site, edit: Edit, name: str, limit: str) -> Edit:
    checks = [f"{site.indent}torch._check({name} > 0)", f"{site.indent}torch._check({name} <= {limit})"]
    return replace(edit, replacement="\n".join([*checks, edit.replacement]))


def _slices(statement: ast.stmt) -> Iterator[tuple[str, int, ast.expr]]:
    """Yield the tensor, the axis and the end of each ``x[:end]`` in a statement."""
    for node in expressions(statement):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        axis = 0
        for part in parts:
            if isinstance(part, ast.Slice) and part.lower is None and part.upper is not None:
                yield node.value.id, axis, part.upper
            axis += not (isinstance(part, ast.Constant) and part.value is None)


def _is_value(size: ast.expr) -> bool:
    """Return whether an expression may be a tensor's value: it calls a method and does not read a shape."""
    nodes = list(ast.walk(size))
    static = any(isinstance(node, ast.Attribute) and node.attr in ("shape", "size", "ndim") for node in nodes)
    calls = any(isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) for node in nodes)
    return calls and not static and bool(loaded([size]))
