"""The user's source code: the statement at a line, its context, and replacements of it."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Edit:
    """A change of the user's code: advice, the lines that it replaces, and the new lines if they are known."""

    advice: str
    source: str = ""
    replacement: str = ""


@dataclass(frozen=True)
class Site:
    """A statement, its index among its siblings, and the function around it (None at module level)."""

    lines: tuple[str, ...]
    function: Function | None
    siblings: Sequence[ast.stmt]
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.siblings[self.index]

    @property
    def following(self) -> Sequence[ast.stmt]:
        return self.siblings[self.index + 1 :]

    @property
    def indent(self) -> str:
        line = self.lines[self.statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def text(self, first: ast.stmt, last: ast.stmt) -> str:
        """Return the source lines from one statement to another."""
        return "\n".join(self.lines[first.lineno - 1 : last.end_lineno])

    def replace(self, advice: str, code: Sequence[str], last: ast.stmt | None = None) -> Edit:
        """Return the edit that replaces the statement, or all statements up to ``last``, by lines of code."""
        source = self.text(self.statement, last or self.statement)
        return Edit(advice, source, "\n".join(self.indent + line if line else "" for line in code))

    def splice(self, advice: str, changes: Iterable[tuple[ast.expr, str]]) -> Edit:
        """Return the edit that replaces expressions of the statement by code."""
        source = self.text(self.statement, self.statement)
        lines = [line.encode() for line in source.split("\n")]  # columns are counted in bytes
        offset = self.statement.lineno
        for node, code in sorted(changes, key=lambda change: (-change[0].lineno, -change[0].col_offset)):
            first, end = node.lineno - offset, (node.end_lineno or node.lineno) - offset
            joined = lines[first][: node.col_offset] + code.encode() + lines[end][node.end_col_offset :]
            lines[first : end + 1] = [joined]
        return Edit(advice, source, b"\n".join(lines).decode())


def find(file: str, line: int) -> Site | None:
    """Return the innermost statement that covers a line, or None if the file cannot be parsed as Python."""
    linecache.checkcache(file)  # the user may have edited it since it was read
    lines = tuple(text.rstrip("\n") for text in linecache.getlines(file))
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return None
    return _locate(tree, line, None, lines)


def line_of(file: str, line: int) -> str:
    """Return one line of a file."""
    return linecache.getline(file, line).rstrip("\n")


def _locate(node: ast.AST, line: int, function: Function | None, lines: tuple[str, ...]) -> Site | None:
    for _, items in ast.iter_fields(node):
        if not isinstance(items, list):
            continue
        for index, item in enumerate(items):
            if not isinstance(item, ast.stmt | ast.excepthandler) or not covers(item, line):
                continue
            inner = _locate(item, line, item if isinstance(item, Function) else function, lines)
            if inner is not None and not _heads(item, line):
                return inner
            return Site(lines, function, items, index) if isinstance(item, ast.stmt) else None
    return None


def _heads(node: ast.AST, line: int) -> bool:
    """Return whether a line is in the head of a statement, which may share it: ``if x.sum() > 0: return x``."""
    head = getattr(node, "test", getattr(node, "iter", None))
    return isinstance(head, ast.expr) and covers(head, line)


def covers(node: ast.stmt | ast.expr | ast.excepthandler, line: int) -> bool:
    """Return whether a node covers a line."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, from the outside in, without the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def loaded(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that are read, in order of appearance; ``x += 1`` reads its target too."""
    nodes = list(nodes)
    added = [item.target for node in nodes for item in ast.walk(node) if isinstance(item, ast.AugAssign)]
    return _names(nodes, ast.Load) + _names(added, ast.Store)


def stored(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that are assigned, in order of appearance."""
    return _names(nodes, ast.Store)


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> list[str]:
    found = [
        item.id
        for node in nodes
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, context)
    ]
    return list(dict.fromkeys(found))


def defined_before(site: Site) -> set[str]:
    """Return the parameters of the function, and the names that it assigns before the statement."""
    if site.function is None:
        return set()
    arguments = site.function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {parameter.arg for parameter in parameters if parameter is not None}
    earlier = (node for node in ast.walk(site.function) if isinstance(node, ast.Name))
    return names | {
        node.id for node in earlier if isinstance(node.ctx, ast.Store) and node.lineno < site.statement.lineno
    }
