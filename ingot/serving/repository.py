"""The models that a server serves, by name and version, and where they come from."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.errors import AlreadyExists, IngotError, InvalidArgument, NotFound, PermissionDenied
from ingot.model_store import Archive, Store
from ingot.model_store.places import Located, is_file, locate, python_class, served_classes, split_name, split_variant
from ingot.model_store.references import Reference, name_from, served_name_from, written_name
from ingot.runtime.loading.downloads import Downloads, Transferring, logged
from ingot.runtime.loading.source import ModelSource
from ingot.runtime.loading.trust_check import TrustCheck
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.settings.settings import Settings
from ingot.serving.catalog import Catalog
from ingot.serving.deployment import Deployment, stamp
from ingot.serving.model_calls import ModelCalls

if TYPE_CHECKING:
    from ingot.model_store.trust.policy import Policy

_CODE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<attribute>[A-Za-z_]\w*)")
_INPUT = "'NAME:float32[batch,...]'"


class Repository(Catalog):
    """The models that run in this process.

    ``deployments`` are the served sources by name and version, also those that are unloaded. ``held`` are all models
    that may have engines: also those that are loaded to take over, and those that drain.

    Args:
        store: resolves references; by default the user's.
        settings: how models without their own settings are run.
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
        self._trust = TrustCheck(policy, settings or Settings(), self.metrics)
        self._downloads = Downloads(self._store, self._trust, transferring)
        self.deployments: dict[tuple[str, str], Deployment] = {}
        self.held: list[Model] = []
        self.calls = ModelCalls(self.get)

    def add(self, source: str | Archive, settings: Settings | None = None) -> Model:
        """Add a model that is still to be loaded.

        Args:
            source: a store reference (``digits:1``), a registry reference (``oci://host/digits:1``), which is pulled
                into the store under a reserved name, an archive file (``./digits.ingot``,
                ``s3://bucket/digits.ingot``), each with or without ``#variant``, or an ``.onnx`` file; ``NAME=SOURCE``
                serves it under another name.
            settings: how this model is run, instead of the repository's.

        Raises:
            NotFound: there is no such reference or file.
            Unavailable: a registry cannot be reached, and the store has no copy that is certain to be the same.
            AlreadyExists: the name and version are served already, or a pipeline has the name.
            Untrusted: the policy requires a signature that is missing.
        """
        deployment, model = self.open(source, settings)
        if (model.name, model.version) in self.deployments:
            raise AlreadyExists(
                f"two models are called '{model.name}' version {model.version}; rename one: other=SOURCE"
            )
        self.deployments[model.name, model.version] = deployment
        self.put(deployment, model)
        return model

    def find(self, name: str, version: str = "") -> list[Deployment]:
        """Return the deployments of a name, or of ``name:version``.

        Raises:
            NotFound: there is none.
        """
        name, _, tag = name.partition(":")
        wanted = version or tag
        found = [
            deployment
            for deployment in self.deployments.values()
            if deployment.name == name and wanted in ("", deployment.tag)
        ]
        if not found:
            served = ", ".join(f"{each.name}:{each.tag}" for each in self.deployments.values()) or "none"
            raise NotFound(f"there is no model '{name}{wanted and f':{wanted}'}'; this server has: {served}")
        return found

    def absence(self, name: str) -> str:
        if any(each.name == name for each in self.deployments.values()):
            return f"unloaded; load it with ingot server load {name}"
        return super().absence(name)

    def one(self, name: str) -> Deployment:
        """Return the only loaded deployment of a name, or of ``name:version``.

        Raises:
            NotFound: there is none, or it is unloaded.
            InvalidArgument: there are several.
        """
        found = [each for each in self.find(name) if each.current is not None]
        if not found:
            raise NotFound(f"model '{name}' is unloaded")
        if len(found) > 1:
            names = ", ".join(f"{each.name}:{each.tag}" for each in found)
            raise InvalidArgument(f"model '{name}' has several versions; name one: {names}")
        return found[0]

    def successor(self, model: Model) -> Model | None:
        """Return the model that answers instead of one that was replaced."""
        found = self.deployments.get((model.name, model.version))
        return None if found is None or found.current is model else found.current

    @property
    def settings(self) -> Settings:
        """How models without their own settings are run."""
        return self._trust.settings

    def use(self, settings: Settings) -> None:
        """Run models without their own settings with these, from the next one on."""
        self._trust.settings = settings

    def name(self, deployment: Deployment, aliases: frozenset[str]) -> None:
        """Let clients use aliases as the version of a deployment."""
        deployment.aliases = aliases
        self._aliases = {
            (each.name, alias): each.tag
            for each in self.deployments.values()
            for alias in each.aliases
            if each.current is not None
        }

    def put(self, deployment: Deployment, model: Model) -> Model | None:
        """Let a model answer from the next request on; return the one that did before, which is to be drained."""
        old, deployment.current = deployment.current, model
        if model not in self.held:
            self.held.append(model)
        if old is not None:
            old.withdraw(successor=True)
            model.succeed(old)
        self._list(model)
        model.publish()
        return old

    def take_off(self, deployment: Deployment) -> Model | None:
        """Let no model answer for a deployment; return the one that did, which is to be drained."""
        old, deployment.current = deployment.current, None
        if old is not None:
            self._unlist(old)
            old.withdraw(successor=False)
        return old

    def without_places(self, error: IngotError) -> str:
        """Return an error's text without the path of the store, and without names of files."""
        return str(error.unhinted).replace(f"the store at {self._store.root}", "the store")

    def forget(self, deployment: Deployment) -> None:
        """Drop a deployment that is not loaded, with its metrics.

        Clients choose these names, so they must not accumulate.
        """
        del self.deployments[deployment.name, deployment.tag]
        self.metrics.forget(deployment.name, deployment.tag)

    def drop(self, model: Model) -> None:
        """Forget a model that is closed."""
        self.held.remove(model)

    async def drain(self) -> None:
        for model in self.calls.callers_first(self.held):
            await model.drain()

    def close(self, timeout: float | None = None) -> None:
        for model in [*self.held]:
            model.close(timeout)
        self.serve_pipelines((), self._trust.settings)

    def open(
        self, source: str | Archive, settings: Settings | None = None, *, tag: str = "", version: str = ""
    ) -> tuple[Deployment, Model]:
        """Return the model that a source resolves to, not loaded; arguments and errors as for :meth:`add`.

        Args:
            source: see :meth:`add`.
            settings: see :meth:`add`.
            tag: for a reference without tag and digest, instead of its highest version.
            version: served instead of the source's tag, for a candidate of a deployment with another one.
        """
        located, model = self._model(source, settings, tag, version)
        self.check_free(model.name)
        return Deployment(name=model.name, tag=model.version, source=source, located=located, settings=settings), model

    def is_stored(self, source: str) -> bool:
        """Return whether a source is a reference to the store: not a file, an object or one of a registry.

        Raises:
            InvalidArgument: it is not a source.
        """
        name, _ = split_variant(split_name(source)[1])
        return not is_file(name) and Reference.parse(name).registry is None

    def runs_code(self, source: str) -> bool:
        """Return whether a source is a class in Python that the server's settings do not allow to load.

        The sources of the command and of its configuration file are the user's own; those of requests are not.

        Raises:
            InvalidArgument: it is not a source.
        """
        name, _ = split_variant(split_name(source)[1])
        return python_class(name) is not None and not self._trust.settings.allow_code

    def renewed(self, deployment: Deployment, settings: Settings | None) -> Model:
        """Return a model of the source's present archive, not loaded; arguments and errors as for :meth:`add`."""
        # The source may be that of a canary that took over, which has another version.
        return self._model(deployment.source, settings, deployment.tag, deployment.tag)[1]

    def _model(
        self, source: str | Archive, settings: Settings | None, tag: str, version: str
    ) -> tuple[Located | None, Model]:
        of_archive = functools.partial(self._of_archive, settings)
        if isinstance(source, Archive):
            return None, of_archive(source.name, version or "1", source, Reference(source.name))
        name, source = split_name(source)
        with _exported_first(source):
            located = locate(source, self._store)
        if located.bare is not None:
            return located, self._of_file(located, name, settings, version or "1")
        if tag and located.reference is not None and located.reference.tag is located.reference.digest is None:
            located = replace(located, reference=replace(located.reference, tag=tag))
        archive, found = self._find(located)
        version = version or found.tag or "1"
        if located.place:
            return located, of_archive(name or written_name(located.name), version, archive, found)
        return located, of_archive(name or found.name, version, archive, found, located.name)

    def _of_file(self, located: Located, name: str | None, settings: Settings | None, version: str) -> Model:
        file, path, code = located.bare, located.path, located.code
        if file is None or path is None or not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises on names that are too long
            raise NotFound(f"there is no file {located.name if code is None else file}")
        if located.variant is not None:
            kind = "an .onnx file" if code is None else "a class in Python"
            raise InvalidArgument(
                f"'{located.name}#{located.variant}': {kind} has no variants; leave #{located.variant} out"
            )
        served = (name or (served_name_from(path.stem) if code is None else name_from(code[1])), version)
        terms = self._trust.admit_file(file, served, settings)
        of_file = ModelSource.of_file if code is None else ModelSource.of_class
        model = Model(*served, of_file(path, terms.settings, served[0]), terms, self.metrics, stamp(file))
        return self.calls.connected(model)

    def _find(self, located: Located) -> tuple[Archive, Reference]:
        if located.reference is not None and located.reference.registry is not None:
            return self._downloads.pull(located)
        with _exported_first(located.name):
            return located.find()

    def _of_archive(
        self,
        settings: Settings | None,
        name: str,
        version: str,
        archive: Archive,
        found: Reference,
        file: str = "",
    ) -> Model:
        served = (name.rpartition("/")[2], version)  # a slash would split the URL
        terms = self._trust.admit(archive, found, served, file=file, settings=settings)
        archive = archive.unpacked()
        if found.variant is None:
            source = ModelSource.of_archive(archive, terms.settings, served[0])
        else:
            source = ModelSource.of_variant(archive.variant(found.variant), terms.settings, served[0])
        return self.calls.connected(Model(*served, source, terms, self.metrics))


@contextmanager
def _exported_first(source: str) -> Iterator[None]:
    """If a source is not an archive but can be converted into one, name the command that does so."""
    try:
        yield
    except (NotFound, InvalidArgument, PermissionDenied) as error:
        if os.path.isdir(source):  # noqa: PTH112 - Path.is_dir raises on names that are too long
            hint = f"{source} is a folder, not an archive file; {_of_folder(Path(source))}"
            raise InvalidArgument(hint).hinting(error) from error
        if os.path.isfile(source) and not source.endswith((".ingot", ".onnx")):  # noqa: PTH113 - as above
            hint = f"{source} is not an Ingot archive; {_of_file(source)}"
            raise InvalidArgument(hint).hinting(error) from error
        code = _CODE.fullmatch(source)
        if code and _is_code(code["module"]):
            raise type(error)(
                f"{error}; if {source} is Python code, run ingot export {source} --input {_INPUT} "
                f"-o {code['attribute']}.ingot first, then ingot serve {code['attribute']}.ingot"
            ).hinting(error) from error
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


def _of_file(source: str) -> str:
    path = Path(source)
    if path.suffix == ".py" and (classes := served_classes(path)):
        return f"name its class: ingot serve {' or '.join(f'{source}:{name}' for name in classes)}"
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
