"""Models by name and version: all that a server needs to submit requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ingot.errors import AlreadyExists, InvalidConfig, NotFound, Unsupported
from ingot.model_store.references import version_key
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.settings.settings import Settings
from ingot.serving.pipelines.pipeline import Pipeline

if TYPE_CHECKING:
    from ingot.config.pipelines import PipelineConfig

LATEST = "latest"
"""The version that means the highest, unless a model has it as its version."""


ServedModel = Model | Pipeline
"""What answers under a name and version."""


class Catalog:
    """Models and pipelines by name and version.

    ``complete`` is False while pipelines wait for their models to be loaded for the first time.

    Args:
        metrics: shared by all models.
    """

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self._models: dict[str, dict[str, ServedModel]] = {}
        self._highest: dict[str, ServedModel] = {}
        self._aliases: Mapping[tuple[str, str], str] = {}
        self._pipelines: dict[str, Pipeline] = {}
        self.complete = True

    def get(self, name: str, version: str = "") -> ServedModel:
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

    def model(self, name: str, version: str = "") -> Model:
        """Return a model; errors as for :meth:`get`.

        Raises:
            Unsupported: it is a pipeline.
        """
        found = self.get(name, version)
        if isinstance(found, Pipeline):
            raise Unsupported(f"'{name}' is a pipeline; name its models instead")
        return found

    def check_pipelines(self, configs: Sequence[PipelineConfig]) -> None:
        """Check the names of pipelines and of their models, which need not be loaded.

        Raises:
            InvalidConfig: a model has the name of a pipeline, or a node's model is not served.
        """
        models = {name for name in self._models if name not in self._pipelines}
        for config in configs:
            if config.name in models:
                raise InvalidConfig([f"{config.place}: '{config.name}' is also the name of a model; rename one"])
            for name, node in config.table.nodes.items():
                if node.model and (base := node.address[0]) not in models:
                    place = config.node_places.get(name, "")
                    needs = f"{place}: node '{name}' of pipeline '{config.name}' needs model '{base}'"
                    raise InvalidConfig([f"{needs}, which is {self.absence(base)}"])

    def absence(self, name: str) -> str:
        """Return why no model of a name can answer, and the remedy, for users."""
        others = ", ".join(name for name in self._models if name not in self._pipelines) or "none"
        return f"not served; add a [[model]] with that name, or use one of: {others}"

    def serve_pipelines(self, configs: Sequence[PipelineConfig], settings: Settings) -> list[Pipeline]:
        """Serve these pipelines instead of those so far, and return those that answer no longer.

        Their models are loaded. A changed pipeline keeps its metrics.

        Raises:
            InvalidConfig: as for :meth:`check_pipelines`, or one does not fit its models; those so far still answer.
            Unsupported: a package that a step needs is missing.
        """
        self.check_pipelines(configs)
        made = {config.name: self._pipeline(config, settings) for config in configs}
        ended = [old for name, old in self._pipelines.items() if made.get(name) is not old]
        for old in ended:
            self._unlist(old)
            old.close()
            if old.name not in made:
                self.metrics.forget(old.name, old.version)
        for name, pipeline in made.items():
            if self._pipelines.get(name) is not pipeline:
                self._list(pipeline)
                pipeline.publish()
        self._pipelines = made
        return ended

    async def replay_pipelines(self) -> None:
        """Replay the goldens of pipelines whose models they were not replayed on; those that fail are not ready."""
        for pipeline in [*self._pipelines.values()]:
            await pipeline.replay()

    def _pipeline(self, config: PipelineConfig, settings: Settings) -> Pipeline:
        known = self._pipelines.get(config.name)
        same = known is not None and known.config == config
        return known if known is not None and same else Pipeline(config, self.model, settings, self.metrics)

    def check_free(self, name: str) -> None:
        """Check that no pipeline has the name of a model.

        Raises:
            AlreadyExists: one has.
        """
        if name in self._pipelines:
            raise AlreadyExists(f"'{name}' is the name of a pipeline; serve the model under another: other=SOURCE")

    def _list(self, model: ServedModel) -> None:
        versions = self._models.setdefault(model.name, {})
        versions[model.version] = model
        self._highest[model.name] = versions[max(versions, key=version_key)]

    def _unlist(self, model: ServedModel) -> None:
        versions = self._models[model.name]
        del versions[model.version]
        if versions:
            self._highest[model.name] = versions[max(versions, key=version_key)]
        else:
            del self._models[model.name], self._highest[model.name]

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, ()), key=version_key)

    def __iter__(self) -> Iterator[ServedModel]:
        return (model for versions in self._models.values() for model in versions.values())

    @property
    def ready(self) -> bool:
        """Whether all models are loaded, also if one restarts now, and not all of them fail.

        Pipelines do not count: the others must be served while one lacks a model.
        """
        models = [model for model in self if isinstance(model, Model)]
        return self.complete and all(model.loaded for model in models) and not all(model.failed for model in models)


def _unknown_version(name: str, version: str, others: str) -> str:
    """Return the error's text. Clients of Triton match its beginning, which depends on the form of the version."""
    if version.isdecimal():
        return f"Request for unknown model: '{name}' version {version} is not found; this server has: {others}"
    # triton-inference-server/core, GetModelVersionFromString, whose versions are numbers.
    failed = f"failed to get model version from specified version string '{version}'"
    return f"{failed}: it is not a version of model '{name}'; this server has: {others}"
