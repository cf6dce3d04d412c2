"""Counts the structure of a package: rooms, floors and arrows of each folder, and circles of imports.

It also counts broad excepts, functions with many parameters, and imports of tests that a move inside a package breaks.

``python scripts/structure.py`` prints a line for each folder. A room is a file or folder in it; an arrow, one room that
imports another; the floors are the rooms of the longest chain of arrows. Folders count as one room, so a circle between
folders is found even where no module imports itself through others.

A broad except names ``Exception``, ``BaseException`` or nothing; ``suppress`` of these counts too. Each has its reason
in a comment on its line, after ``noqa: BLE001 -`` where ruff asks for that.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_BROAD = 0.5
"""Broad excepts per 1,000 lines."""
MANY_PARAMETERS = 9
MOST_WITH_MANY = 15
"""Functions with that many parameters, without ``self``, ``cls``, ``*`` and ``**``."""
_BROAD = {"Exception", "BaseException"}
_COUNTED = (ast.Import, ast.ImportFrom, ast.ExceptHandler, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Folder:
    """One folder's rooms, each with the rooms that it imports."""

    name: str
    rooms: Mapping[str, frozenset[str]]

    @property
    def arrows(self) -> int:
        return sum(map(len, self.rooms.values()))

    @property
    def floors(self) -> int:
        """Return the length of the longest chain of arrows.

        Raises:
            graphlib.CycleError: the rooms import each other in a circle.
        """
        heights: dict[str, int] = {}
        for room in TopologicalSorter(self.rooms).static_order():
            heights[room] = 1 + max((heights[below] for below in self.rooms[room]), default=0)
        return max(heights.values(), default=0)

    @property
    def circle(self) -> list[str]:
        """Return rooms that import each other in a circle; empty if there is none."""
        try:
            TopologicalSorter(self.rooms).prepare()
        except CycleError as error:
            return list(error.args[1])
        return []


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return every module of ``ingot`` by its dotted name."""
    found = {}
    for path in sorted((root / "ingot").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that any of the counts looks at."""
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _COUNTED))


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports, at its top, inside functions and for types alone."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def folders(root: Path = ROOT) -> list[Folder]:
    """Return every folder of ``ingot``, the outermost first.

    A folder's own ``__init__`` names what it offers to others and is not a room of it.
    """
    known = modules(root)
    rooms: dict[str, dict[str, set[str]]] = {}
    for module in known:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            rooms.setdefault(".".join(parts[:depth]), {}).setdefault(parts[depth], set())
    for module, path in known.items():
        for name in set(imports(path, known)) & set(known):
            here, there = module.split("."), name.split(".")
            depth = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0)
            if depth:
                rooms[".".join(here[:depth])][here[depth]].add(there[depth])
    return [
        Folder(name, {room: frozenset(below) for room, below in found.items()}) for name, found in sorted(rooms.items())
    ]


def broad_excepts(root: Path = ROOT) -> dict[str, str]:
    """Return the reason of each broad except of ``ingot``, by its place; empty if it has none."""
    found = {}
    for path in modules(root).values():
        lines = path.read_text().splitlines()
        for node in _nodes(path):
            if any(part is None or (isinstance(part, ast.Name) and part.id in _BROAD) for part in _caught(node)):
                line = node.lineno  # type: ignore[attr-defined]
                comment = lines[line - 1].partition("  # ")[2]
                found[f"{path.relative_to(root)}:{line}"] = re.sub(r"^noqa: BLE001( - )?", "", comment)
    return found


def _caught(node: ast.AST) -> list[ast.expr | None]:
    """Return the types that an ``except`` or ``suppress`` names; None is a bare ``except``."""
    if isinstance(node, ast.ExceptHandler):
        return [*node.type.elts] if isinstance(node.type, ast.Tuple) else [node.type]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return [*node.args]
    return []


def broad_per_1000(root: Path = ROOT) -> float:
    """Return the number of broad excepts per 1,000 lines of ``ingot``."""
    return 1000 * len(broad_excepts(root)) / sum(path.read_text().count("\n") for path in modules(root).values())


def with_many_parameters(root: Path = ROOT) -> list[str]:
    """Return the places of functions with many parameters."""
    found = []
    for path in modules(root).values():
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if sum(each.arg not in ("self", "cls") for each in every) >= MANY_PARAMETERS:
                    found.append(f"{path.relative_to(root)}:{node.lineno} {node.name}")
    return found


def imports_below_faces(root: Path = ROOT) -> dict[str, int]:
    """Return how many imports of each test file break if a module of ``ingot`` moves inside its package.

    A package's face is its ``__init__`` and the modules that the docstring there names, as in "Start in scheduler.py".
    """
    known, found = modules(root), {}
    documented: dict[str, str] = {
        name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in known.items() if _is_face(path)
    }
    for test in sorted((root / "tests").rglob("*.py")):
        below = 0
        for name in imports(test, known):
            package, _, module = name.rpartition(".")
            if package.count(".") and name in known and not _is_face(known[name]):
                below += re.search(rf"\b{module}\.py\b", documented[package]) is None
        if below:
            found[str(test.relative_to(root))] = below
    return found


def _is_face(path: Path) -> bool:
    return path.name == "__init__.py"


def main() -> None:
    """Print the figures; exit with 1 if there is a circle, or if one of the figures is over its limit."""
    gc.disable()  # syntax trees have no cycles, and the collector would visit all of them again and again
    found = folders()
    width = max(len(folder.name) for folder in found)
    print(f"{'folder':{width}}  rooms  floors  arrows")
    for folder in found:
        floors = "circle" if folder.circle else str(folder.floors)
        print(f"{folder.name:{width}}  {len(folder.rooms):5}  {floors:>6}  {folder.arrows:6}")
    for folder in found:
        if folder.circle:
            print(f"{folder.name}: a circle of imports: {' -> '.join(folder.circle)}", file=sys.stderr)
    bare = [place for place, reason in broad_excepts().items() if not reason]
    for place in bare:
        print(f"{place}: a broad except without its reason; write it in a comment on the line", file=sys.stderr)
    share = broad_per_1000()
    print(f"broad excepts: {len(broad_excepts())}, {share:.2f} per 1,000 lines; at most {MOST_BROAD}")
    tests = imports_below_faces()
    print(f"test files that import below the face of a package: {len(tests)}, by {sum(tests.values())} imports")
    many = with_many_parameters()
    print(f"functions with {MANY_PARAMETERS} or more parameters: {len(many)}; at most {MOST_WITH_MANY}")
    if len(many) > MOST_WITH_MANY:
        print("\n".join(many), file=sys.stderr)
    sys.exit(any(folder.circle for folder in found) or bool(bare) or share > MOST_BROAD or len(many) > MOST_WITH_MANY)


if __name__ == "__main__":
    main()
