"""Python loops: over the rows of a tensor, rewritten as ``torch.vmap``; and non-maximum suppression, an operator."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ingot.export.explain.code import Edit, Site, covers, expressions, loaded, stored

_ADVICE = "compute all rows at once by torch.vmap, which keeps the dimension dynamic"
NUMBER = "or declare a number instead of the dimension's name"
_NAMES = re.compile(r"(^|_)(iou|ious|nms|suppress\w*|suppression)(_|$)", re.IGNORECASE)
_SUPPRESS = (
    "this looks like non-maximum suppression: call torchvision.ops.nms or batched_nms, which becomes the graph's "
    "NonMaxSuppression, or define an operator with ingot.op (docs/guides/make/detectors.md)"
)
_SEQUENTIAL = "steps that depend on each other cannot be computed at once"
_KEPT = f"export with --capture script, which keeps the loop, {NUMBER}"


@dataclass(frozen=True)
class _Rows:
    """A loop over rows: the tensors, a parameter for a row of each, and the loop's body in terms of these."""

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    body: tuple[ast.AST, ...]


def vectorize(site: Site, line: int) -> Edit | None:
    """Return the edit for a loop on ``line``, or None."""
    statement = site.statement
    if isinstance(statement, ast.For):
        return _loop(site, statement)
    for node in expressions(statement):
        if isinstance(node, ast.Call) and covers(node, line) and (found := _comprehension(node)) is not None:
            return site.splice(_ADVICE, [(node, found)])
    return None


def _comprehension(call: ast.Call) -> str | None:
    """Return ``torch.stack([f(row) for row in x])`` as ``torch.vmap(lambda row: f(row))(x)``."""
    kind = _joins(call)
    part = call.args[0] if call.args else None
    if kind is None or not isinstance(part, ast.ListComp | ast.GeneratorExp) or len(part.generators) != 1:
        return None
    (loop,) = part.generators
    rows = None if loop.ifs else _rows(loop.target, loop.iter, [part.elt])
    if rows is None:
        return None
    function = f"lambda {', '.join(rows.parameters)}: {ast.unparse(rows.body[0])}"
    return f"{_vmap(function, rows)}{kind}"


def _loop(site: Site, loop: ast.For) -> Edit:
    """Return ``for row in x: ...; out.append(y)`` and the ``torch.stack(out)`` after it as a function of one row."""
    source = site.text(loop, loop)
    carried = [name for name in stored(loop.body) if name in loaded(loop.body) and _from_outside(site, loop, name)]
    if carried:
        return Edit(f"{_SEQUENTIAL} ('{carried[0]}' is carried from step to step): {_KEPT}", source)
    fallback = Edit(_ADVICE, source)
    *before, last = loop.body
    appended = _appended(last)
    if loop.orelse or appended is None or any(_has_effect(part) for part in before):
        return fallback
    name, value = appended
    rows = _rows(loop.target, loop.iter, [*before, ast.Return(value)])
    joins = _joined_later(site, name)
    if rows is None or joins is None:
        return fallback
    code = [f"def each({', '.join(rows.parameters)}):"]
    code += ["    " + line for part in rows.body for line in ast.unparse(part).split("\n")]
    code += ["", f"{name} = {_vmap('each', rows)}"]
    statement, call, kind = joins
    tail = Site(site.lines, site.function, site.siblings, list(site.siblings).index(statement))
    joined = tail.splice("", [(call, f"{name}{kind}")])
    between = site.lines[loop.end_lineno : statement.lineno - 1]
    source = site.text(_start(site, name), statement)
    replacement = [*(site.indent + line if line else "" for line in code), *between, joined.replacement]
    return Edit(_ADVICE, source, "\n".join(replacement))


def _start(site: Site, name: str) -> ast.stmt:
    """Return the statement before the loop if it creates the empty list, otherwise the loop."""
    before = site.siblings[site.index - 1] if site.index else site.statement
    match before:
        case ast.Assign([ast.Name(target)], ast.List([])) if target == name:
            return before
        case _:
            return site.statement


def _vmap(function: str, rows: _Rows) -> str:
    return f"torch.vmap({function})({', '.join(rows.tensors)})"


def _joins(call: ast.Call) -> str | None:
    """Return the call after vmap that equals ``torch.stack`` or ``torch.cat`` along dimension 0, or None for others."""
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return None
    rest = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    if any(not isinstance(item, ast.Constant) or item.value != 0 for item in rest):
        return None
    return {"stack": "", "cat": ".flatten(0, 1)"}.get(call.func.attr)


def _joined_later(site: Site, name: str) -> tuple[ast.stmt, ast.Call, str] | None:
    """Return the only statement after the loop that uses the list, the call that joins it, and its replacement."""
    using = [part for part in site.following if name in loaded([part])]
    if len(using) != 1:
        return None
    for node in ast.walk(using[0]):
        match node:
            case ast.Call(args=[ast.Name(joined), *_]) if joined == name and (kind := _joins(node)) is not None:
                return using[0], node, kind
    return None


def _appended(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [value])):
            return name, value
        case _:
            return None


def _has_effect(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Return | ast.Break | ast.Continue)
        or (isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        for node in ast.walk(statement)
    )


def _from_outside(site: Site, loop: ast.For, name: str) -> bool:
    """Return whether the function assigns a name before the loop."""
    nodes = ast.walk(site.function) if site.function else iter(())
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) and node.lineno < loop.lineno
        for node in nodes
    )


def _rows(target: ast.expr, over: ast.expr, body: Sequence[ast.AST]) -> _Rows | None:
    """Return the rows that are looped over, or None if the loop does not have a known form."""
    match target, over:
        case ast.Tuple([ast.Name(index), ast.Name(row)]), ast.Call(ast.Name("enumerate"), [tensor]):
            return _with_index(index, (row,), (ast.unparse(tensor),), body)
        case ast.Tuple(names), ast.Call(ast.Name("zip"), tensors) if all(isinstance(name, ast.Name) for name in names):
            return _Rows(tuple(map(ast.unparse, names)), tuple(map(ast.unparse, tensors)), tuple(body))
        case ast.Name(index), ast.Call(ast.Name("range"), [_]):
            rows = _IndexedRows(index)
            changed = [rows.visit(copy.deepcopy(part)) for part in body]
            return _with_index(index, tuple(rows.found.values()), tuple(rows.found), changed) if rows.found else None
        case ast.Name(row), ast.Name() | ast.Attribute() | ast.Subscript():
            return _Rows((row,), (ast.unparse(over),), tuple(body))
        case _:
            return None


def _with_index(index: str, rows: tuple[str, ...], tensors: tuple[str, ...], body: Sequence[ast.AST]) -> _Rows:
    if index not in loaded(body):
        return _Rows(rows, tensors, tuple(body))
    count = f"torch.arange({tensors[0]}.shape[0], device={tensors[0]}.device)"
    return _Rows((index, *rows), (count, *tensors), tuple(body))


class _IndexedRows(ast.NodeTransformer):
    """Replaces ``x[i]`` and ``x[i, ...]`` by ``x_row`` and ``x_row[...]``; ``found`` are the tensors and their rows."""

    def __init__(self, index: str):
        self._index = index
        self.found: dict[str, str] = {}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.value, ast.Name):
            return node
        match node.slice:
            case ast.Name(self._index):
                return self._row(node.value.id)
            case ast.Tuple([ast.Name(self._index), *rest]):
                inner = rest[0] if len(rest) == 1 else ast.Tuple(rest, ast.Load())
                return ast.Subscript(self._row(node.value.id), inner, ast.Load())
            case _:
                return node

    def _row(self, tensor: str) -> ast.Name:
        return ast.Name(self.found.setdefault(tensor, f"{tensor}_row"), ast.Load())


def suppress(site: Site) -> Edit | None:
    """Return the edit of a function with a loop and names of non-maximum suppression, or None."""
    function = site.function
    if function is None or not any(isinstance(node, ast.While | ast.For) for node in ast.walk(function)):
        return None
    if not any(map(_NAMES.search, _identifiers(function))):
        return None
    return Edit(_SUPPRESS, site.text(site.statement, site.statement))


def _identifiers(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Name(name) | ast.Attribute(_, name) | ast.arg(name) | ast.FunctionDef(name):
                yield name
