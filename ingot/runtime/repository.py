"""The models that a server serves, by name and version, and where they come from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ingot.errors import AlreadyExists, InvalidArgument, NotFound
from ingot.model_store import Archive, Store
from ingot.model_store.places import open_place
from ingot.model_store.references import Reference, name_from, version_key
from ingot.model_store.trust import Policy
from ingot.runtime.admission import Gate
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.settings import Settings

log = logging.getLogger(__name__)

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.\-]*)=(?P<source>.+)", re.DOTALL)


class Repository:
    """Models by name and version.

    Args:
        store: where references are looked up; by default the user's.
        settings: how every model is run.
        metrics: where all models count.
        policy: whose signatures are accepted; by default none is asked for.
    """

    def __init__(
        self,
        store: Store | None = None,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
        policy: Policy | None = None,
    ):
        self._store = store or Store()
        self.metrics = metrics or Metrics()
        self._gate = Gate(policy, settings or Settings(), self.metrics)
        self._models: dict[str, dict[str, Model]] = {}

    def add(self, source: str | Archive) -> Model:
        """Add a model that is yet to be loaded.

        Args:
            source: a store reference (``digits:1``), one of a registry (``oci://host/digits:1``), which is pulled into
                the store, an archive file (``./digits.ingot``), each with or without ``#variant``, or an ``.onnx``
                file; ``NAME=SOURCE`` serves it under another name.

        Raises:
            NotFound: there is no such reference or file.
            AlreadyExists: the name and version are served already.
            Untrusted: the policy asks for a signature that is not there.
        """
        model = self._model(source)
        versions = self._models.setdefault(model.name, {})
        if model.version in versions:
            raise AlreadyExists(
                f"two models are called '{model.name}' version {model.version}; give one another name: other=SOURCE"
            )
        versions[model.version] = model
        return model

    def get(self, name: str, version: str = "") -> Model:
        """Return a model; without a version, the highest one that is served.

        Raises:
            NotFound: no such name or version is served; the message lists what is.
        """
        versions = self._models.get(name)
        if not versions:
            raise NotFound(f"there is no model '{name}'; this server has: {', '.join(self._models) or 'none'}")
        if not version:
            return versions[max(versions, key=version_key)]
        if version not in versions:
            raise NotFound(f"model '{name}' has no version '{version}'; this server has: {', '.join(versions)}")
        return versions[version]

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, ()), key=version_key)

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in self._models.values() for model in versions.values())

    @property
    def ready(self) -> bool:
        """Whether there are models and every one of them answers."""
        models = list(self)
        return bool(models) and all(model.ready for model in models)

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
        location, _, chosen = source.partition("#")
        path = _user_path(location)
        if path.suffix == ".onnx":
            if not path.is_file():
                raise NotFound(f"there is no file {location}")
            if chosen:
                raise InvalidArgument(f"'{source}': an .onnx file has no variants; leave #{chosen} out")
            served = (name or name_from(path.stem), "1")
            return Model.of_file(*served, path, self._gate.admit_file(path, served), self.metrics)
        if path.suffix == ".ingot" or location.startswith((".", "/", "~")):
            archive = Archive.open(path)
            return self._of_archive(name or archive.name, "1", archive, Reference(archive.name, variant=chosen or None))
        archive, reference = self._find(source)
        return self._of_archive(name or reference.name, str(reference.tag), archive, reference)

    def _of_archive(self, name: str, version: str, archive: Archive, found: Reference) -> Model:
        served = (name.rpartition("/")[2], version)  # a slash in a name would be one in the URL
        admission = self._gate.admit(archive, found, found.variant, served)
        archive = archive.unpacked()
        if found.variant is None:
            return Model.of_archive(*served, archive, admission, self.metrics)
        return Model.of_variant(*served, archive.variant(found.variant), admission, self.metrics)

    def _find(self, source: str) -> tuple[Archive, Reference]:
        try:
            place, reference = open_place(source, self._store)
            archive, found = place.find(reference)
            return (archive, found) if place is self._store else self._pull(archive, found)
        except (NotFound, InvalidArgument) as error:
            if os.path.isfile(source):  # noqa: PTH113 - Path.is_file raises on names that are too long
                raise InvalidArgument(
                    f"{source} is a file that cannot be served; serve takes .ingot and .onnx files (ingot export makes "
                    "them) and references such as digits:1"
                ) from error
            raise

    def _pull(self, archive: Archive, found: Reference) -> tuple[Archive, Reference]:
        """Return an archive of a registry from the store, which it is brought to: files there can be mapped."""
        self._gate.check(archive, found)
        if found.tag is None:
            raise InvalidArgument(f"'{found}' has no tag; promote it to one, or pull it and serve it from the store")
        log.info("pulling %s, %.1f MB in all, into the store", found, archive.size / 1e6)
        pushed = self._store.push(archive, Reference(found.name, found.tag))
        return self._store.get(pushed), found


def _user_path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise NotFound(f"'{text}': {error}") from error
