"""The models that a server serves, by name and version, and where they come from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied
from ingot.model_store import Archive, Store
from ingot.model_store.places import Located, locate
from ingot.model_store.references import Reference, served_name_from, written_name
from ingot.runtime.catalog import Catalog
from ingot.runtime.loading.admission import Gate
from ingot.runtime.loading.downloads import Downloads, Transferring, logged
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.settings import Settings

if TYPE_CHECKING:
    from ingot.model_store.trust.policy import Policy

_CODE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<attribute>[A-Za-z_]\w*)")
_INPUT = "'NAME:float32[batch,...]'"
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.\-]*)=(?P<source>.+)", re.DOTALL)


class Repository(Catalog[Model]):
    """The models that run in this process.

    Args:
        store: resolves references; by default the user's.
        settings: how every model is run.
        metrics: shared by all models.
        policy: whose signatures are accepted; by default no signature is required.
        transferring: displays the progress of a download; by default it is logged.
    """

    def __init__(
        self,
        store: Store | None = None,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
        policy: Policy | None = None,
        transferring: Transferring = logged,
    ):
        self._store = store or Store()
        super().__init__(metrics or Metrics())
        self._gate = Gate(policy, settings or Settings(), self.metrics)
        self._downloads = Downloads(self._store, self._gate, transferring)

    def add(self, source: str | Archive) -> Model:
        """Add a model that is still to be loaded.

        Args:
            source: a store reference (``digits:1``), a registry reference (``oci://host/digits:1``), which is pulled
                into the store under a reserved name, an archive file (``./digits.ingot``,
                ``s3://bucket/digits.ingot``), each with or without ``#variant``, or an ``.onnx`` file; ``NAME=SOURCE``
                serves it under another name.

        Raises:
            NotFound: there is no such reference or file.
            Unavailable: a registry cannot be reached, and the store has no copy that is certain to be the same.
            AlreadyExists: the name and version are served already.
            Untrusted: the policy requires a signature that is missing.
        """
        model = self._model(source)
        if model.version in self._models.get(model.name, ()):
            raise AlreadyExists(
                f"two models are called '{model.name}' version {model.version}; rename one: other=SOURCE"
            )
        self._list(model)
        return model

    async def drain(self) -> None:
        for model in self:
            await model.drain()

    def close(self, timeout: float | None = None) -> None:
        for model in self:
            model.close(timeout)

    def _model(self, source: str | Archive) -> Model:
        if isinstance(source, Archive):
            return self._of_archive(source.name, "1", source, Reference(source.name))
        match = _NAMED.fullmatch(source)
        name, source = (match["name"], match["source"]) if match else (None, source)
        with _exported_first(source):
            located = locate(source, self._store)
        if located.path is not None and located.path.suffix == ".onnx":
            if not os.path.isfile(located.path):  # noqa: PTH113 - Path.is_file raises on names that are too long
                raise NotFound(f"there is no file {located.name}")
            if located.variant is not None:
                raise InvalidArgument(f"'{source}': an .onnx file has no variants; leave #{located.variant} out")
            served = (name or served_name_from(located.path.stem), "1")
            admission = self._gate.admit_file(located.path, served)
            return Model.of_file(*served, located.path, admission, self.metrics)
        archive, found = self._find(located)
        if located.place:
            return self._of_archive(name or written_name(located.name), found.tag or "1", archive, found)
        return self._of_archive(name or found.name, found.tag or "1", archive, found, located.name)

    def _find(self, located: Located) -> tuple[Archive, Reference]:
        if located.reference is not None and located.reference.registry is not None:
            return self._downloads.pull(located)
        with _exported_first(located.name):
            return located.find()

    def _of_archive(self, name: str, version: str, archive: Archive, found: Reference, file: str = "") -> Model:
        served = (name.rpartition("/")[2], version)  # a slash would split the URL
        admission = self._gate.admit(archive, found, served, file=file)
        archive = archive.unpacked()
        if found.variant is None:
            return Model.of_archive(*served, archive, admission, self.metrics)
        return Model.of_variant(*served, archive.variant(found.variant), admission, self.metrics)


@contextmanager
def _exported_first(source: str) -> Iterator[None]:
    """If a source is not an archive but can be converted into one, name the command that does so."""
    try:
        yield
    except (NotFound, InvalidArgument, PermissionDenied) as error:
        if os.path.isdir(source):  # noqa: PTH112 - Path.is_dir raises on names that are too long
            raise InvalidArgument(f"{source} is a folder, not an archive file; {_of_folder(Path(source))}") from error
        if os.path.isfile(source) and not source.endswith((".ingot", ".onnx")):  # noqa: PTH113 - as above
            raise InvalidArgument(f"{source} is not an Ingot archive; {_of_file(Path(source))}") from error
        code = _CODE.fullmatch(source)
        if code and _is_code(code["module"]):
            raise type(error)(
                f"{error}; if {source} is Python code, run ingot export {source} --input {_INPUT} "
                f"-o {code['attribute']}.ingot first, then ingot serve {code['attribute']}.ingot"
            ) from error
        raise


def _is_code(module: str) -> bool:
    """Return whether a dotted name is a Python module: in a package or in the current folder."""
    return "." in module or Path(f"{module}.py").is_file() or Path(module, "__init__.py").is_file()


def _of_folder(folder: Path) -> str:
    name = folder.resolve().name
    if (folder / "config.json").is_file():
        return f"run ingot export {folder} -o {name}.ingot first, then ingot serve {name}.ingot"
    if any(folder.glob("config.pbtxt")) or any(folder.glob("*/config.pbtxt")) or any(folder.glob("*/*/model.*")):
        return f"run ingot import {folder} first, then serve the names that it prints"
    if (folder / "hubconf.py").is_file():
        return f"run ingot export {folder}:ENTRY --input {_INPUT} -o {name}.ingot first, then ingot serve {name}.ingot"
    return "serve takes .ingot and .onnx files and references such as digits:1"


def _of_file(path: Path) -> str:
    command = {
        ".mar": f"import {path}",
        ".pt": f"export {path} --input {_INPUT}",
        ".pth": f"export {path} --input {_INPUT}",
        ".pt2": f"export {path} --allow-code",
        ".py": f"export {path.stem}:ATTRIBUTE --input {_INPUT}",
    }.get(path.suffix)
    if command is None:
        return "serve takes .ingot and .onnx files (ingot export makes them) and references such as digits:1"
    return f"run ingot {command} -o {path.stem}.ingot first, then ingot serve {path.stem}.ingot"
