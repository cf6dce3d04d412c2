"""Models by name and version: all that a server needs to submit requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.errors import NotFound
from ingot.model_store.references import version_key
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model

LATEST = "latest"
"""The version that means the highest, unless a model has it as its version."""


class Catalog:
    """Models by name and version.

    Args:
        metrics: shared by all models.
    """

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self._models: dict[str, dict[str, Model]] = {}
        self._highest: dict[str, Model] = {}
        self._aliases: Mapping[tuple[str, str], str] = {}

    def get(self, name: str, version: str = "") -> Model:
        """Return a model; without a version or with ``latest``, the highest version. A version may be an alias of one.

        Raises:
            NotFound: no such name or version is served; the message lists the names or versions that are.
        """
        versions = self._models.get(name)
        if not versions:
            others = ", ".join(self._models) or "none"
            raise NotFound(f"Request for unknown model: '{name}' is not found; this server has: {others}")
        if not version:
            return self._highest[name]
        if version not in versions:
            version = self._aliases.get((name, version), version)
        if version not in versions:
            if version == LATEST:
                return self._highest[name]
            raise NotFound(_unknown_version(name, version, ", ".join(versions)))
        return versions[version]

    def _list(self, model: Model) -> None:
        versions = self._models.setdefault(model.name, {})
        versions[model.version] = model
        self._highest[model.name] = versions[max(versions, key=version_key)]

    def _unlist(self, model: Model) -> None:
        versions = self._models[model.name]
        del versions[model.version]
        if versions:
            self._highest[model.name] = versions[max(versions, key=version_key)]
        else:
            del self._models[model.name], self._highest[model.name]

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, ()), key=version_key)

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in self._models.values() for model in versions.values())

    @property
    def ready(self) -> bool:
        """Whether all models are loaded, also if one restarts now, and not all of them fail."""
        models = list(self)
        return all(model.loaded for model in models) and not all(model.failed for model in models)


def _unknown_version(name: str, version: str, others: str) -> str:
    """Return the error's text. Clients of Triton match its beginning, which depends on the form of the version."""
    if version.isdecimal():
        return f"Request for unknown model: '{name}' version {version} is not found; this server has: {others}"
    # triton-inference-server/core, GetModelVersionFromString, whose versions are numbers.
    failed = f"failed to get model version from specified version string '{version}'"
    return f"{failed}: it is not a version of model '{name}'; this server has: {others}"
