"""Which build of Ingot runs: ``compiled``, with the request path as machine code, or ``pure``, its source.

A compiled wheel has both. :data:`PURE` chooses the source; processes that the server starts inherit it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType

PURE = "INGOT_PURE"
"""The environment variable that makes a compiled wheel run its source; unset, empty or 0 otherwise."""
# What mypyc names the library of all compiled modules; the build hook names its group.
_LIBRARY = "ingot._compiled__mypyc"


class _SourceFinder(MetaPathFinder):
    """Finds Ingot's modules in their source, which the usual finders put behind extension modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith("ingot."):
            return None
        specs = (_finder(folder).find_spec(fullname) for folder in path)
        return next((spec for spec in specs if spec is not None and spec.loader is not None), None)


@functools.cache
def _finder(folder: str) -> FileFinder:
    return FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))


def _choose() -> str:
    """Return the name of the build, and arrange that its modules are loaded from now on."""
    if importlib.util.find_spec(_LIBRARY) is None:
        return "pure"
    if os.environ.get(PURE, "") in ("", "0"):
        return "compiled"
    sys.meta_path.insert(0, _SourceFinder())
    return "pure"


BUILD = _choose()
"""``compiled`` or ``pure``."""
