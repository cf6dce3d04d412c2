"""Checks that the modules which wheels have compiled keep to what mypyc compiles as Python would run it.

``python scripts/hot_modules.py`` checks the modules that pyproject.toml lists for hatch_build.py. The rules are those
that mypy accepts and mypyc does not report: the code would fail, or do something else, only when it runs compiled.
CONTRIBUTING.md states them.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parent.parent

# Classes with these bases stay interpreted, so that their bodies may hold anything.
_INTERPRETED = {"NamedTuple", "Protocol", "Enum", "IntEnum", "TypedDict"}
# mypyc puts "_" before the names of attributes, and C's compilers reserve these names behind two.
_RESERVED = re.compile(
    "_(alignof|asm|attribute|complex|const|extension|func|imag|inline|label|real|restrict|signed|thread|typeof|volatile)"
)
# Bases that add no attributes.
_EMPTY = {"Generic", "Protocol", "ABC"}


def modules(root: Path = ROOT) -> list[str]:
    """Return the paths of the modules, from the root."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    return [str(path) for path in hook["modules"]]


def faults(sources: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the faults of modules, each with its place.

    Args:
        sources: of the compiled modules, by their paths.
        others: of the modules that stay interpreted.
    """
    trees = {path: ast.parse(text) for path, text in sources.items()}
    classes = {(_module(path), node.name): node for path, tree in trees.items() for node in _classes(tree)}
    found = []
    for path, tree in trees.items():
        names = _imported(tree, _module(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found += [f"{path}:{line}: {text}" for line, text in _of_class(node, names, classes)]
            elif isinstance(node, ast.AsyncFunctionDef) and _yields(node):
                text = f"{node.name} is an async generator, which mypyc does not compile; move it to another module"
                found.append(f"{path}:{node.lineno}: {text}")
        found += _set_outside(path, tree, names, classes)
    for path, text in others.items():
        tree = ast.parse(text)
        names = _imported(tree, _module(path))
        found += _set_outside(path, tree, names, classes)
        for node in ast.walk(tree):
            for base in _bases(node) if isinstance(node, ast.ClassDef) else ():
                if _native(_resolved(base, names, classes)):
                    why = f"{base} is extended, but compiled; compile this module too, or keep the object instead"
                    found.append(f"{path}:{node.lineno}: {why}")
    return sorted(found)


Classes = Mapping[tuple[str, str], ast.ClassDef]
Names = Mapping[str, tuple[str, str]]


def _of_class(node: ast.ClassDef, names: Names, classes: Classes) -> Iterator[tuple[int, str]]:
    bases = _bases(node)
    if not _native(node):
        return
    if len([base for base in bases if base not in _EMPTY]) > 1:
        yield node.lineno, f"{node.name} has several bases; keep one, and call functions for the rest"
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    if "slots=" in decorators:
        yield node.lineno, f"{node.name} is a dataclass with slots, which replaces the class; write __init__"
    if "dataclass" not in decorators:  # whose defaults are those of its __init__
        for statement in node.body:
            yield from _default(statement)
    else:
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) == "object":
                shown = ast.unparse(statement)
                yield statement.lineno, f"'{shown}' is looked up as a global of the module on import; write Any"
    methods = set(_methods(node, names, classes))
    for part in ast.walk(node):
        if not _is_set(part) or ast.unparse(part.value) != "self":
            continue
        if part.attr in methods:
            yield part.lineno, f"self.{part.attr} replaces a method; compiled code calls the method"
        if _RESERVED.fullmatch(part.attr):
            yield part.lineno, f"self.{part.attr} becomes a keyword of C compilers; use another name"


def _default(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    """Yield the fault of a default in the body of a class."""
    if isinstance(statement, ast.Assign):
        if len(statement.targets) > 1:
            yield statement.lineno, f"'{ast.unparse(statement)}' sets the first name only; write one per line"
        elif ast.unparse(statement.targets[0]) != "__slots__" and not _is_constant(statement.value):
            yield (
                statement.lineno,
                f"'{ast.unparse(statement)}' is not a constant; set it in __init__, or write a method",
            )
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        kind = ast.unparse(statement.annotation)
        if "ClassVar" in kind or "Final" in kind:
            return
        if not _is_constant(statement.value):
            yield statement.lineno, f"'{ast.unparse(statement)}' is not a constant; set it in __init__"
        elif ast.unparse(statement.value) == "None" and _members(statement.annotation) > 2:
            yield statement.lineno, f"'{ast.unparse(statement)}' is left unset; set it in __init__"


def _members(kind: ast.expr) -> int:
    """Return how many types a union has; 1 for another type."""
    return _members(kind.left) + _members(kind.right) if isinstance(kind, ast.BinOp) else 1


def _is_constant(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return all(map(_is_constant, value.elts))
    if isinstance(value, ast.UnaryOp):
        return _is_constant(value.operand)
    return isinstance(value, ast.Constant)


def _native(node: ast.ClassDef | None) -> bool:
    return node is not None and not _INTERPRETED.intersection(_bases(node))


def _methods(node: ast.ClassDef, names: Names, classes: Classes) -> Iterator[str]:
    """Yield the names of the methods of a class and its compiled bases, without properties."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not statement.decorator_list:
            yield statement.name
    for base in _bases(node):
        other = _resolved(base, names, classes)
        if other is not None and other is not node:
            yield from _methods(other, names, classes)


def _set_outside(path: str, tree: ast.Module, names: Names, classes: Classes) -> Iterator[str]:
    """Yield the assignments to attributes of compiled classes."""
    for node in ast.walk(tree):
        if _is_set(node) and _native(_resolved(ast.unparse(node.value), names, classes)):
            text = f"{ast.unparse(node)} is set outside of its class; compiled code ignores that"
            yield f"{path}:{node.lineno}: {text}"


def _resolved(name: str, names: Names, classes: Classes) -> ast.ClassDef | None:
    """Return the compiled class that a name such as ``Class`` or ``module.Class`` is of, if any."""
    module, _, last = name.rpartition(".")
    return classes.get(names.get(name) or (".".join(names.get(module, (module,))), last))


def _is_set(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Return whether a node is an attribute that is assigned to, in whatever statement."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _yields(node: ast.AsyncFunctionDef) -> bool:
    inner = {
        part for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.Lambda) for part in ast.walk(each)
    }
    return any(isinstance(part, ast.Yield) and part not in inner for part in ast.walk(node))


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _bases(node: ast.ClassDef) -> list[str]:
    """Return the names of the bases, without type arguments."""
    return [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]


def _imported(tree: ast.Module, module: str) -> dict[str, tuple[str, str]]:
    """Return where the names of a module are defined: those that it imports, and its own classes."""
    found = {node.name: (module, node.name) for node in _classes(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):  # without another name, a module is called by its own
            found.update(
                {a.asname: (a.name.rpartition(".")[0], a.name.rpartition(".")[2]) for a in node.names if a.asname}
            )
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def main() -> None:
    """Print what breaks the rules; exit with 1 if anything does."""
    gc.disable()  # as in structure.py
    hot = modules()
    every = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "ingot").rglob("*.py"))}
    missing = [path for path in hot if path not in every]
    found = [f"pyproject.toml lists {path}, which does not exist" for path in missing]
    found += faults(
        {path: every[path] for path in hot if path in every},
        {path: text for path, text in every.items() if path not in hot},
    )
    for line in found:
        print(line, file=sys.stderr)
    print(f"compiled modules: {len(hot)}, {sum(every[path].count(chr(10)) for path in hot if path in every)} lines")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
