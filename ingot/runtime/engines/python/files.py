"""The files of a model in Python: unpacked from an archive, imported, and named in messages."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

from ingot import foreign
from ingot.errors import IngotError, InvalidArgument
from ingot.model_store.format.partition import PythonPlan
from ingot.permissions import WRITE

# Larger files are linked. Smaller ones are copied, since code finds its folder by Path(__file__).resolve().
_COPIED = 16 << 20
# Most bytes of a user's folder that is copied.
_MOST_COPIED = 1 << 30


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
    """Make the model's folder in the temporary one of this process, which is removed with it.

    Large files are links to the archive's, unless the model has the permission to write.
    """
    folder, own = _private_folder(), WRITE in plan.permissions
    for name, blob in plan.files.items():
        source, target = blobs / blob, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.stat().st_size > _COPIED and not own:
            target.symlink_to(source)
        else:
            shutil.copyfile(source, target)
    return folder


def copied(folder: Path) -> Path:
    """Copy a user's folder into the temporary one of this process, without hidden files.

    Raises:
        InvalidArgument: it is large, or cannot be read.
    """
    target, left = _private_folder(), _MOST_COPIED
    with foreign.reported_as(InvalidArgument, f"{folder} cannot be copied (--permit write)", keep=IngotError):
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            (here := target / Path(place).relative_to(folder)).mkdir(exist_ok=True)
            for name in names:
                source = Path(place, name)
                if name.startswith(".") or not source.is_file():
                    continue
                if (left := left - source.stat().st_size) < 0:
                    raise InvalidArgument(
                        f"{folder} has more than {_MOST_COPIED >> 20} MiB, and --permit write copies it; move the "
                        "class and its files into a folder that has nothing else"
                    )
                shutil.copyfile(source, here / name)  # not its mode, which the process may not change
    return target


def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="model-")).resolve()


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

    with foreign.reported_as(InvalidArgument, failure, keep=IngotError, cancels=True):
        spec.loader.exec_module(module)
    return module
