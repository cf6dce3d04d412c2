"""The class of a model in Python: from a file of the user, or from an archive, which may hold TorchServe's handler."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.errors import NotFound, shortened
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import PythonPlan
from ingot.model_store.places import python_class
from ingot.permissions import WRITE
from ingot.runtime.engines.python import files, requirements
from ingot.runtime.engines.python.torchserve.handler import handler_class

log = logging.getLogger(__name__)

_REMEDY = "install the package, or add the file to the archive with --include"


def load_class(path: Path, permissions: Sequence[str] = ()) -> tuple[type, Path]:
    """Return the class that a path names, and the folder of its files, which becomes the current one.

    Args:
        path: ``model.py:Model``, or the plan of an archive.
        permissions: of the model; with that to write, the folder of a user's file is copied.

    Raises:
        NotFound: there is no such file or class.
        InvalidArgument: the code fails.
        Unsupported: a package is missing, or has another version than the archive requires.
    """
    sys.dont_write_bytecode = True
    if (named := python_class(str(path))) is not None:
        file, attribute = named
        if WRITE in permissions and file.is_file():
            file = files.copied(file.resolve().parent) / file.name
        return _imported(file, attribute)
    plan = manifest.decode(PythonPlan, path.read_bytes(), "the plan")
    requirements.check(plan.requirements)
    _compare_python(plan.python)
    folder = files.unpack(plan, path.parent)
    if plan.interface == "torchserve":
        return handler_class(folder, plan.file, plan.attribute), folder
    return _imported(folder / plan.file, plan.attribute)


def _compare_python(made: str) -> None:
    """Name in the log another minor version of Python than the archive was made with; most code runs in both."""
    here = platform.python_version()
    if made and made.split(".")[:2] != here.split(".")[:2]:
        log.warning("the archive was made with Python %s, and runs in %s", shortened(made), here)


def _imported(file: Path, attribute: str) -> tuple[type, Path]:
    if not file.is_file():
        raise NotFound(f"there is no file {file}")
    folder = file.resolve().parent
    sys.path.insert(0, str(folder))
    os.chdir(folder)  # relative paths mean the same files in the user's folder, in an archive and on each machine
    found = getattr(files.imported(file.resolve(), _REMEDY), attribute, None)
    if not isinstance(found, type):
        raise NotFound(f"{file.name} has no class '{attribute}'")
    return found, folder
