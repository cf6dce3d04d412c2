"""The files of a model in Python: unpacked from an archive, imported, and named in messages."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

from ingot import foreign
from ingot.errors import IngotError, InvalidArgument
from ingot.model_store.format.partition import PythonPlan

# Larger files are linked. Smaller ones are copied, since code finds its folder by Path(__file__).resolve().
_COPIED = 16 << 20


def place(error: BaseException, folder: Path) -> str:
    """Return the innermost line of the model's own files in a traceback, as ``model.py, line 12``; empty if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(folder):
            return f"{path.relative_to(folder)}, line {frame.lineno}"
    return ""


def describe(error: Exception, folder: Path) -> str:
    """Return an error's type, message and place in one line."""
    found = place(error, folder)
    return f"{foreign.typed(error)}{f' ({found})' if found else ''}"


def unpack(plan: PythonPlan, blobs: Path) -> Path:
    """Make the model's folder in the temporary one of this process, which is removed with it."""
    folder = Path(tempfile.mkdtemp(prefix="model-")).resolve()
    for name, blob in plan.files.items():
        source, target = blobs / blob, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.stat().st_size > _COPIED:
            target.symlink_to(source)
        else:
            shutil.copyfile(source, target)
    return folder


def imported(file: Path, remedy: str) -> ModuleType:
    """Import a file as a module of its name.

    Args:
        file: its resolved path; its folder is on the module path.
        remedy: against a module that is not found.

    Raises:
        InvalidArgument: its code fails, or its name is taken.
    """
    if file.stem in sys.modules and getattr(sys.modules[file.stem], "__file__", "") != str(file):
        raise InvalidArgument(f"{file.name} has the name of a module that is in use, {file.stem}; rename the file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # before it runs, as for any import

    def failure(error: Exception) -> str:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f"; {remedy}"
        return f"{file.name} cannot be imported: {describe(error, file.parent)}{hint}"

    with foreign.reported_as(InvalidArgument, failure, keep=IngotError):
        spec.loader.exec_module(module)
    return module
