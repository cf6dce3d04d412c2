"""Changes of what a running server serves, as operators and aliases ask for them; takeover.py makes each."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot.config import ServerConfig
from ingot.config.model import ModelConfig
from ingot.errors import IngotError, NotFound
from ingot.faults import attempt_async
from ingot.runtime.settings.settings import Settings
from ingot.serving import Repository, ServedModel
from ingot.serving.aliases import follow
from ingot.serving.deployment import Deployment
from ingot.serving.loading import in_thread
from ingot.serving.takeover import Rollout, Takeovers, rollout

if TYPE_CHECKING:
    from ingot.config.pipelines import PipelineConfig


class Reload(NamedTuple):
    """The outcome of a reload: of each model, and a line for each change of the configuration file and its failures."""

    models: list[Rollout]
    changes: list[str]
    failures: list[str]


class Rollouts:
    """Loads, replaces and unloads models while the server runs. Everything here belongs to one event loop.

    Args:
        repository: the models.
        config: the settings of models that have none themselves.
        retired: called with each model or pipeline that answers no longer.
    """

    def __init__(
        self,
        repository: Repository,
        config: ServerConfig,
        retired: Callable[[ServedModel], None] = lambda _: None,
    ):
        self.repository = repository
        self._config = config
        self.reconfigure: Callable[[], Awaitable[tuple[list[str], list[str]]]] | None = None
        self._takeovers = Takeovers(repository, config, retired)
        self.canaries = self._takeovers.canaries
        self._tasks = self._takeovers.tasks
        self._pipelines: Sequence[PipelineConfig] = ()

    async def start(self) -> None:
        """Load every model, and follow aliases from then on.

        Raises:
            DeadlineExceeded: a model takes longer than ``load_timeout``.
            IngotError: a model cannot be loaded.
        """
        await self._takeovers.load_first()
        await self.serve_pipelines(self._pipelines)
        if (every := self._config.watch) is not None:
            self._tasks.begin(lambda: follow(self.repository, self._on_change, every, self._tasks))

    def prepare_pipelines(self, configs: Sequence[PipelineConfig]) -> None:
        """Check pipelines that are served from the start on; errors as for :meth:`Catalog.check_pipelines`."""
        self.repository.check_pipelines(configs)
        self._pipelines, self.repository.complete = configs, False

    async def serve_pipelines(self, configs: Sequence[PipelineConfig]) -> None:
        """Serve these pipelines instead of those so far, and replay their goldens.

        Errors are those of :meth:`Catalog.serve_pipelines`.
        """
        for ended in self.repository.serve_pipelines(configs, self._config.runtime):
            self._takeovers.retired(ended)
        await self.repository.replay_pipelines()
        self.repository.complete = True

    def stop(self) -> None:
        """Follow no alias any longer, and give up changes that are under way."""
        self._tasks.cancel()

    def close(self) -> None:
        """Also give up loads for requests, once the requests have had their time."""
        self._takeovers.residency.stop()

    async def reload(self, name: str | None = None) -> Reload:
        """Load what sources refer to now, if that differs from what answers; a candidate that failed is tried again.

        Args:
            name: ``name`` or ``name:version``; None for all that are loaded, after changes of the configuration file.

        Raises:
            NotFound: there is no such model, or it is unloaded.
            InvalidConfig: the configuration file has faults; nothing is changed.
        """
        changes: list[str] = []
        failures: list[str] = []
        if name is None and self.reconfigure is not None:
            changes, failures = await self.reconfigure()
        served = [*self.repository.deployments.values()] if name is None else self.repository.find(name)
        loaded = [deployment for deployment in served if deployment.current is not None]
        if name is not None and not loaded:
            raise NotFound(f"model '{name}' is unloaded; load it instead")
        return Reload(list(await asyncio.gather(*map(self.renew, loaded))), changes, failures)

    async def load(self, source: str, parameters: Mapping[str, Any] | None = None) -> Deployment:
        """Load a model, or load it again.

        Args:
            source: ``name`` or ``name:version`` of a deployment, unloaded or not; or a new source, as for ``ingot
                serve``. A source with a known name and version takes over from the known one.
            parameters: settings for this model alone, by name; they stay until the next ones. If one of several
                versions cannot be loaded with them, the others return to what they were.

        Raises:
            NotFound: there is no such source.
            InvalidArgument: a parameter is not a setting of a model, or has a wrong value.
            IngotError: it cannot be loaded; what answered before still answers.
        """
        settings = ModelConfig.of_parameters(parameters).runtime(self._config) if parameters else None
        try:
            known = self.repository.find(source)
        except NotFound:
            return await self.load_source(source, settings)
        if settings is not None:
            await self._load_all(known, settings)
            return known[-1]
        for deployment in known:
            if (error := (await self.renew(deployment, at_once=True)).error) is not None:
                raise error
        return known[-1]

    async def load_new(self, source: str, parameters: Mapping[str, Any]) -> Deployment:
        """Load a source that is not served; arguments and errors as for :meth:`load`."""
        return await self.load_source(source, ModelConfig.of_parameters(parameters).runtime(self._config))

    async def scale(self, deployment: Deployment, instances: int) -> None:
        """Run a deployment with another number of engines; with none it is unloaded, and stays known.

        Raises:
            InvalidArgument: there are too many.
            IngotError: it cannot be loaded; what answered before still answers.
        """
        settings = deployment.settings or self._config.runtime
        if not instances:
            async with deployment.changing:
                await self._takeovers.take_off(deployment)
            return
        ModelConfig.of_parameters({"instances": instances})  # refuses a number that the setting cannot be
        if deployment.current is None or settings.instances != instances:
            await self._load_all([deployment], replace(settings, instances=instances))

    async def remove(self, deployment: Deployment) -> None:
        """Answer the requests in flight of a deployment, free its model, and forget it."""
        async with deployment.changing:
            await self._takeovers.take_off(deployment)
            self.repository.forget(deployment)

    async def _load_all(self, deployments: Sequence[Deployment], settings: Settings) -> None:
        """Load deployments again with other settings; if one fails, the others return to what they were."""
        changed: list[tuple[Deployment, Settings | None, bool]] = []
        for deployment in deployments:
            async with deployment.changing:
                before, loaded = deployment.settings, deployment.current is not None
                error = (await self._load_with(deployment, settings)).error
            if error is not None:
                for earlier, own, answered in changed:
                    if (other := await self._restore(earlier, settings, own, loaded=answered)) is not None:
                        kept = f"model {earlier.name} version {earlier.tag} keeps the new settings"
                        error.args = (f"{error}; {kept}, as it could not be loaded with the earlier ones: {other}",)
                raise error
            changed.append((deployment, before, loaded))

    async def _restore(
        self, deployment: Deployment, settings: Settings, before: Settings | None, *, loaded: bool
    ) -> IngotError | None:
        """Undo a change to ``settings``, unless another change followed; return why that failed."""
        async with deployment.changing:
            if deployment.settings is not settings:
                return None
            if loaded and deployment.current is not None:
                return (await self._load_with(deployment, before)).error
            deployment.settings = before
            await self._takeovers.take_off(deployment)
            return None

    async def _load_with(self, deployment: Deployment, settings: Settings | None) -> Rollout:
        """Load a deployment again with other settings, or keep its own if that fails; the caller holds ``changing``."""
        wanted = await attempt_async("a model could not be found", in_thread("look", deployment.wanted))
        if isinstance(wanted, IngotError):
            return self._takeovers.failed(deployment, "", wanted)
        renewed = functools.partial(self.repository.renewed, deployment, settings)
        done = await self._takeovers.change(deployment, wanted, renewed, at_once=True)
        if done.error is None:
            deployment.settings = settings
        return done

    async def use(self, config: ServerConfig) -> None:
        """Use other settings for the models that have none themselves, which are loaded again."""
        self._config = config
        self.repository.use(config.runtime)
        for deployment in [*self.repository.deployments.values()]:
            if deployment.settings is None and deployment.current is not None:
                await self.renew(deployment, again=True)

    async def load_source(self, source: str, settings: Settings | None) -> Deployment:
        """Load a source with settings; arguments and errors as for :meth:`load`."""
        found, model = await in_thread("open", lambda: self.repository.open(source, settings))
        served, deployment = self.repository.deployments, None
        while deployment is None or served.get((found.name, found.tag)) is not deployment:
            deployment = served.setdefault((found.name, found.tag), found)
            async with deployment.changing:
                if served.get((found.name, found.tag)) is not deployment:
                    continue  # another request had begun it, and it was forgotten, as its first load failed
                try:
                    done = await self._takeovers.change(deployment, model.digest, lambda: model, at_once=True)
                finally:
                    if deployment is found and deployment.current is None:
                        self.repository.forget(deployment)
            if done.error is not None:
                raise done.error
        deployment.source, deployment.located, deployment.settings = source, found.located, settings
        return deployment

    async def load_detached(self, name: str, version: str) -> Deployment:
        """Load a version and detach the model from the alias that it follows, until the alias moves.

        Args:
            name: ``name`` or ``name:version`` of one deployment.
            version: a version in the same repository.

        Raises:
            NotFound: there is no such model or version.
            InvalidArgument: the model follows no alias, or ``version`` is not a version.
            IngotError: it cannot be loaded; what answered before still answers.
        """
        deployment = self.repository.one(name)
        async with deployment.changing:
            source = f"{deployment.name}={deployment.source_of(version)}"
            skipped = await in_thread("look", deployment.wanted)
            opened = functools.partial(self.repository.open, source, deployment.settings, version=deployment.tag)
            model = (await in_thread("open", opened))[1]
            if model.digest != deployment.digest:
                done = await self._takeovers.change(deployment, model.digest, lambda: model, at_once=True)
                if done.error is not None:
                    raise done.error
            deployment.skipped_digest = skipped if skipped != model.digest else ""
        return deployment

    async def unload(self, name: str, version: str = "", dependents: bool = False) -> list[Deployment]:
        """Answer the requests in flight of a model, then free it.

        Args:
            name: the model's, or ``name:version``.
            version: one version; by default all.
            dependents: as in the protocol; no model of Ingot depends on another.

        Raises:
            NotFound: there is no such model.
        """
        found = self.repository.find(name, version)
        for deployment in found:
            async with deployment.changing:
                await self._takeovers.take_off(deployment)
        return found

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each deployment for users, as JSON has it."""
        served = self.repository.deployments.values()
        return [
            {
                **deployment.status(),
                "canary": self.canaries.status(deployment),
                "memory": {} if deployment.current is None else self._takeovers.residency.content(deployment.current),
            }
            for deployment in served
        ]

    async def renew(
        self, deployment: Deployment, *, again: bool = False, watched: bool = False, at_once: bool = False
    ) -> Rollout:
        """Load the model that a deployment's source now resolves to; if that fails, the earlier model still answers.

        Args:
            deployment: loaded or not.
            again: load it also if it is the same.
            watched: do nothing if the same failed before.
            at_once: without a canary.
        """
        async with deployment.changing:
            before = deployment.digest
            wanted = await attempt_async("a model could not be found", in_thread("look", deployment.wanted))
            if isinstance(wanted, IngotError):
                known = watched and self._takeovers.reason(wanted) == deployment.failure
                return rollout(deployment, "", wanted) if known else self._takeovers.failed(deployment, "", wanted)
            if watched and wanted in (deployment.refused, deployment.skipped_digest):
                return rollout(deployment, before)
            canary = self.canaries.running(deployment)
            if canary is not None and canary.candidate.digest == wanted and not at_once:
                return rollout(deployment, before)
            if canary is not None and canary.found is None:
                self.canaries.end(deployment, "stopped", "was stopped, as another version is wanted")
            if wanted == before and deployment.current is not None and not again:
                deployment.refused = deployment.skipped_digest = ""
                if not (watched and deployment.rolled_back):  # the reason stays until another change
                    deployment.show("")
                await self._takeovers.name(deployment)
                return rollout(deployment, before)
            # The same archive with other settings needs no canary.
            at_once = at_once or wanted == before
            return await self._takeovers.change(
                deployment, wanted, lambda: self.repository.renewed(deployment, deployment.settings), at_once=at_once
            )

    async def _on_change(self, deployment: Deployment) -> None:
        """Reload a deployment that follows its alias; publish the aliases of the others."""
        if deployment.follows:
            await self.renew(deployment, watched=True)
        else:
            await self._takeovers.name(deployment)
