"""Conversions of tensor values to Python numbers, rewritten with tensors; numbers used as sizes get bounds."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ingot.export.explain.code import Edit, Site, covers, expressions, loaded

_ADVICE = "compute with the tensor, and call .item() last, on an integer tensor"
_BOUNDS = "state the bounds of the size by torch._check before it is used"
_NUMBERS = ("int", "float", "bool")


def convert(site: Site, line: int) -> Edit | None:
    """Return the edit for a statement that converts a tensor's value to a number on ``line``, or None."""
    changes = [
        (node, _converted(node))
        for node in expressions(site.statement)
        if isinstance(node, ast.Call) and covers(node, line) and _is_conversion(node)
    ]
    inside = {id(part) for node, _ in changes for part in ast.walk(node) if part is not node}
    outer = [(node, code) for node, code in changes if id(node) not in inside]
    return site.splice(_ADVICE, outer) if outer else None


def _is_conversion(node: ast.Call) -> bool:
    if _kind(node) not in _NUMBERS or len(node.args) != 1:
        return False
    argument = node.args[0]
    names = loaded([argument])
    static = any(isinstance(part, ast.Attribute) and part.attr in ("shape", "ndim") for part in ast.walk(argument))
    return bool(names) and not static and (names != ["self"] or _calls_item(argument))


def _converted(node: ast.Call) -> str:
    value = as_tensor(node.args[0], {})
    return f"{ast.unparse(_integer(value))}.item()" if _kind(node) == "int" else f"({ast.unparse(value)})"


def _kind(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _integer(value: ast.expr) -> ast.expr:
    return ast.parse(f"({ast.unparse(value)}).to(torch.int64)", mode="eval").body


def as_tensor(value: ast.expr, numbers: Mapping[str, str]) -> ast.expr:
    """Return an expression without its conversions to numbers; ``numbers`` are names and the tensors they come from."""
    return _Tensors(numbers).visit(copy.deepcopy(value))  # type: ignore[no-any-return]


class _Tensors(ast.NodeTransformer):
    def __init__(self, numbers: Mapping[str, str]):
        self._numbers = numbers

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return node.func.value
        if not _is_conversion(node):
            return node
        return _integer(node.args[0]) if _kind(node) == "int" else node.args[0]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._numbers:
            return node
        return ast.parse(self._numbers[node.id], mode="eval").body


def numbers_of(site: Site, nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Return the names in ``nodes`` of numbers from ``.item()``, each with the expression of the tensor."""
    found: dict[str, str] = {}
    statements = ast.walk(site.function) if site.function else iter(())
    for statement in statements:
        if not isinstance(statement, ast.Assign) or statement.lineno >= site.statement.lineno:
            continue
        target = statement.targets[0]
        if not isinstance(target, ast.Name) or target.id not in loaded(nodes) or not _calls_item(statement.value):
            continue
        value = as_tensor(statement.value, {})
        if not _changes(site, loaded([value]), statement.lineno):
            found[target.id] = ast.unparse(value)
    return found


def _changes(site: Site, names: Sequence[str], line: int) -> bool:
    """Return whether names are assigned between a line and the statement."""
    nodes = ast.walk(site.function) if site.function else iter(())
    return any(
        isinstance(node, ast.Name)
        and node.id in names
        and isinstance(node.ctx, ast.Store)
        and line < node.lineno < site.statement.lineno
        for node in nodes
    )


def _calls_item(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "item" for node in ast.walk(value))


def bound(site: Site) -> Edit | None:
    """Return the edit that bounds the last ``x[:n]`` up to the statement whose ``n`` is a tensor's value, or None."""
    for index in range(site.index, -1, -1):
        earlier = Site(site.lines, site.function, site.siblings, index)
        known = numbers_of(earlier, [earlier.statement])
        for tensor, axis, size in _slices(earlier.statement):
            limit = f"{tensor}.shape[{axis}]"
            if isinstance(size, ast.Name) and size.id in known:
                return _with_checks(earlier, earlier.splice(_BOUNDS, []), size.id, limit)
            if not isinstance(size, ast.Name) and _is_value(size):
                made = f"{earlier.indent}size = ({ast.unparse(as_tensor(size, {}))}).item()\n"
                edit = _with_checks(earlier, earlier.splice(_BOUNDS, [(size, "size")]), "size", limit)
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
