"""Conversions of tensor values to Python numbers, rewritten with tensors."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence

from ingot.export.explain.code import Edit, Site, covers, expressions, loaded

_ADVICE = "compute with the tensor, and call .item() last, on an integer tensor"
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
