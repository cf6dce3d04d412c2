"""Models by name and version, in this process or another: all that a server needs to submit requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from ingot.errors import NotFound
from ingot.model_store.references import version_key
from ingot.runtime.dispatch.pending import Submit
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.metrics import Metrics
from ingot.tensors import Signature


class Servable(Protocol):
    """One version of a model, in this process or another; see :class:`ingot.runtime.Model`."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def loaded(self) -> bool: ...
    @property
    def platform(self) -> str: ...
    @property
    def properties(self) -> Mapping[str, str]: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def submit(self) -> Submit: ...

    async def ask_statistics(self) -> Statistics: ...


ModelT_co = TypeVar("ModelT_co", bound=Servable, covariant=True)


class Catalog(Generic[ModelT_co]):
    """Models by name and version.

    Args:
        metrics: shared by all models.
    """

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self._models: dict[str, dict[str, ModelT_co]] = {}
        self._highest: dict[str, ModelT_co] = {}

    def get(self, name: str, version: str = "") -> ModelT_co:
        """Return a model; without a version, the highest version.

        Raises:
            NotFound: no such name or version is served; the message lists the names or versions that are.
        """
        versions = self._models.get(name)
        if not versions:
            raise NotFound(f"there is no model '{name}'; this server has: {', '.join(self._models) or 'none'}")
        if not version:
            return self._highest[name]
        if version not in versions:
            raise NotFound(f"model '{name}' has no version '{version}'; this server has: {', '.join(versions)}")
        return versions[version]

    def _list(self, model: ModelT_co) -> None:  # type: ignore[misc]  # covariant: only subclasses add models
        versions = self._models.setdefault(model.name, {})
        versions[model.version] = model
        self._highest[model.name] = versions[max(versions, key=version_key)]

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, ()), key=version_key)

    def __iter__(self) -> Iterator[ModelT_co]:
        return (model for versions in self._models.values() for model in versions.values())

    @property
    def ready(self) -> bool:
        """Whether there are models and all of them are loaded, also if one restarts now."""
        models = list(self)
        return bool(models) and all(model.loaded for model in models)
