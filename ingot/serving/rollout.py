"""Changes of what a running server serves: new versions are loaded, take over, or are refused."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot.config import ServerConfig
from ingot.config.model import ModelConfig
from ingot.errors import IngotError, NotFound, Unavailable, shortened
from ingot.faults import attempt_async
from ingot.runtime import Model
from ingot.runtime.settings.settings import Settings
from ingot.serving import Repository, ServedModel
from ingot.serving.aliases import POLL_SECONDS, follow
from ingot.serving.canary_decisions import Canaries
from ingot.serving.deployment import CHANGES, Deployment, Event, Result
from ingot.serving.loading import Tasks, in_thread
from ingot.serving.residency import Residency, sweep

if TYPE_CHECKING:
    from ingot.config.pipelines import PipelineConfig

log = logging.getLogger(__name__)
changes_log = logging.getLogger(CHANGES)

# Batch sizes of traffic that a candidate runs before it takes over: the most frequent.
_SIZES = 32
# Seconds that a model which is unloaded waits for an engine call that no request waits for.
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The outcome of one change; digests, result and reason as in :class:`~ingot.serving.deployment.Event`."""

    name: str
    version: str
    before: str
    after: str
    result: Result
    reason: str = ""
    error: IngotError | None = None


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
        self._retired = retired
        self.reconfigure: Callable[[], Awaitable[tuple[list[str], list[str]]]] | None = None
        self._rollouts = repository.metrics.rollouts
        self._tasks = Tasks()
        self.canaries = Canaries(self, repository.metrics, self._tasks)
        # One model is loaded at a time: loading takes cores from those that answer, and memory.
        self._loading = asyncio.Lock()
        self._pipelines: Sequence[PipelineConfig] = ()
        self._residency = Residency(repository, config.memory_by_device, self._loading)

    async def start(self) -> None:
        """Load every model, and follow aliases from then on.

        Raises:
            DeadlineExceeded: a model takes longer than ``load_timeout``.
            IngotError: a model cannot be loaded.
        """
        for model in [*self.repository.held]:
            async with self._loading:
                await self._residency.load(model, "start")
        for deployment in self.repository.deployments.values():
            await self._name(deployment)
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
            self._retired(ended)
        await self.repository.replay_pipelines()
        self.repository.complete = True

    def stop(self) -> None:
        """Follow no alias any longer, and give up changes that are under way."""
        self._tasks.cancel()

    def close(self) -> None:
        """Also give up loads for requests, once the requests have had their time."""
        self._residency.stop()

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
                await self._take_off(deployment)
            return
        ModelConfig.of_parameters({"instances": instances})  # refuses a number that the setting cannot be
        if deployment.current is None or settings.instances != instances:
            await self._load_all([deployment], replace(settings, instances=instances))

    async def remove(self, deployment: Deployment) -> None:
        """Answer the requests in flight of a deployment, free its model, and forget it."""
        async with deployment.changing:
            await self._take_off(deployment)
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
            await self._take_off(deployment)
            return None

    async def _load_with(self, deployment: Deployment, settings: Settings | None) -> Rollout:
        """Load a deployment again with other settings, or keep its own if that fails; the caller holds ``changing``."""
        wanted = await attempt_async("a model could not be found", in_thread("look", deployment.wanted))
        if isinstance(wanted, IngotError):
            return self._failed(deployment, "", wanted)
        renewed = functools.partial(self.repository.renewed, deployment, settings)
        done = await self._change(deployment, wanted, renewed, at_once=True)
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
                    done = await self._change(deployment, model.digest, lambda: model, at_once=True)
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
                done = await self._change(deployment, model.digest, lambda: model, at_once=True)
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
                await self._take_off(deployment)
        return found

    async def _take_off(self, deployment: Deployment) -> None:
        """Unload a deployment, if it is loaded; the caller holds ``changing``."""
        self.canaries.end(deployment, "stopped", "was stopped, as the model is unloaded")
        old = self.repository.take_off(deployment)
        if old is None:
            return
        self.repository.name(deployment, frozenset())
        deployment.note(Event(before=old.digest, after="", result="ok"))
        log.info("model %s version %s is unloaded", deployment.name, deployment.tag)
        await self._retire(old)

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each deployment for users, as JSON has it."""
        served = self.repository.deployments.values()
        return [
            {
                **deployment.status(),
                "canary": self.canaries.status(deployment),
                "memory": {} if deployment.current is None else self._residency.content(deployment.current),
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
                known = watched and self._reason(wanted) == deployment.failure
                return _rollout(deployment, "", wanted) if known else self._failed(deployment, "", wanted)
            if watched and wanted in (deployment.refused, deployment.skipped_digest):
                return _rollout(deployment, before)
            canary = self.canaries.running(deployment)
            if canary is not None and canary.candidate.digest == wanted and not at_once:
                return _rollout(deployment, before)
            if canary is not None and canary.found is None:
                self.canaries.end(deployment, "stopped", "was stopped, as another version is wanted")
            if wanted == before and deployment.current is not None and not again:
                deployment.refused = deployment.skipped_digest = ""
                if not (watched and deployment.rolled_back):  # the reason stays until another change
                    deployment.show("")
                await self._name(deployment)
                return _rollout(deployment, before)
            # The same archive with other settings needs no canary.
            at_once = at_once or wanted == before
            return await self._change(
                deployment, wanted, lambda: self.repository.renewed(deployment, deployment.settings), at_once=at_once
            )

    async def _change(
        self, deployment: Deployment, wanted: str, opened: Callable[[], Model], *, at_once: bool
    ) -> Rollout:
        """Let a model take over, or begin its canary; ``wanted`` is its digest, ``opened`` is called in a thread."""
        self.canaries.end(deployment, "stopped", "was stopped, as another version is loaded")
        failure = f"model {deployment.name} could not be loaded"
        model = await attempt_async(failure, in_thread("open", opened))
        if not isinstance(model, IngotError):
            wanted = model.digest
            model = await attempt_async(failure, self._load(deployment, model))
        if isinstance(model, IngotError):
            return self._failed(deployment, wanted, model)
        before, plan = deployment.digest, model.settings.canary
        if plan.steps and not at_once and deployment.current is not None:
            try:
                self.canaries.begin(deployment, model, plan)
            except IngotError as error:
                return self._failed(deployment, wanted, error)
            return _rollout(deployment, wanted, result="canary", before=before)
        await self.take_over(deployment, model)
        return _rollout(deployment, wanted, result="ok", before=before)

    async def take_over(self, deployment: Deployment, model: Model) -> None:
        """Let a loaded model answer from the next request on; the caller holds ``deployment.changing``."""
        old = self.repository.put(deployment, model)
        deployment.refused = deployment.skipped_digest = ""
        deployment.rolled_back = False
        deployment.note(Event(before=old.digest if old is not None else "", after=model.digest, result="ok"))
        self._rollouts.labels(deployment.name, deployment.tag, "ok").inc()
        changes_log.info("model %s version %s: %s took over", deployment.name, deployment.tag, model.digest)
        try:
            await self._name(deployment)
        finally:  # also if this task is cancelled, it answers no longer
            self._tasks.begin(self.repository.replay_pipelines)
            if old is not None:
                self._tasks.begin(lambda: self._retire(old, wait=True))

    async def prepare(self, deployment: Deployment, source: str) -> tuple[Deployment, Model]:
        """Load a candidate of another source for a deployment; return the source's deployment and the candidate.

        Raises:
            NotFound: there is no such source.
            IngotError: it cannot be loaded.
        """
        named = f"{deployment.name}={source}"
        opened = functools.partial(self.repository.open, named, deployment.settings, version=deployment.tag)
        found, model = await in_thread("open", opened)
        return found, await self._load(deployment, model)

    async def roll_back(self, deployment: Deployment, digest: str, reason: str, *, stopped: bool = False) -> str:
        """Record the end of a candidate, and point its alias back, so that a restart does not serve it.

        Args:
            deployment: what it was tried for; the caller holds ``changing``.
            digest: the candidate's digest.
            reason: why it ended.
            stopped: by an operator, which does not count as a failure; otherwise it was rolled back.

        Returns:
            The reason, and what users can do.
        """
        deployment.rolled_back = False
        back = functools.partial(deployment.point_back, digest, f"{digest} {reason}")
        done = await attempt_async("an alias could not be moved back", in_thread("look", back))
        if isinstance(done, IngotError):
            what = "; the alias could not be moved back, so a restart may serve it"
            done = f"{what if deployment.follows else '; the source of the model cannot be read'}: {done}"
        ended = Unavailable(f"{digest} {reason}{done}")
        if stopped:
            self._note(deployment, digest, "stopped", self._reason(ended))
            if done:  # the source had it
                deployment.refused = digest
                changes_log.info("model %s version %s: %s", deployment.name, deployment.tag, ended)
        else:
            self._failed(deployment, digest, ended)
        if deployment.rolled_back:
            deployment.refused = ""  # if the alias is moved there again, it is tried again
        return self._reason(Unavailable(f"{reason}{done}"))

    def discard(self, model: Model) -> None:
        """Free a candidate once it has answered its requests."""
        self._tasks.begin(lambda: self._retire(model))

    async def _load(self, deployment: Deployment, model: Model) -> Model:
        """Load a candidate, and run it at the batch sizes of the model that answers; return it."""
        seen = deployment.current.statistics().by_samples if deployment.current is not None else {}
        sizes = sorted(seen, key=lambda samples: -seen[samples].running.count)[:_SIZES]
        async with self._loading:
            self.repository.held.append(model)
            deployment.candidate = model
            log.info("model %s version %s: %s is loaded", deployment.name, deployment.tag, model.digest)
            try:
                await self._residency.load(model, "rollout", sizes, earlier=deployment.current)
                return model
            except BaseException:  # also if the task is cancelled, the watchdog must not see it any longer
                self._residency.forget(model)
                self.repository.drop(model)
                raise
            finally:
                deployment.candidate = None

    def _reason(self, error: IngotError) -> str:
        """Return why a change failed, as every client of management may read it."""
        return shortened(self.repository.without_places(error))

    def _failed(self, deployment: Deployment, wanted: str, error: IngotError) -> Rollout:
        before = deployment.digest
        deployment.refused = wanted
        self._note(deployment, wanted, "failed", self._reason(error))
        stays = f"{before} still answers" if before else "it stays unloaded"
        log.error("model %s version %s cannot be changed, so %s: %s", deployment.name, deployment.tag, stays, error)
        return _rollout(deployment, wanted, error)

    def _note(self, deployment: Deployment, wanted: str, result: Result, reason: str) -> None:
        deployment.note(Event(before=deployment.digest, after=wanted, result=result, reason=reason))
        self._rollouts.labels(deployment.name, deployment.tag, result).inc()

    async def _retire(self, model: Model, *, wait: bool = False) -> None:
        """Let a model that answers no longer finish its requests, then give its memory back.

        Args:
            model: it was taken off the repository.
            wait: first until its open sequences end, which its successor leaves to it.
        """
        self._retired(model)
        if (successor := self.repository.successor(model)) is not None:
            self._residency.replaced(model, successor)
        while model.keeps_sequences and wait:
            await asyncio.sleep(POLL_SECONDS)
        await model.drain()
        await in_thread("close", lambda: model.close(_CLOSE_SECONDS))
        self._residency.forget(model)
        self.repository.drop(model)
        await in_thread("sweep", sweep)
        log.info("model %s version %s: %s is unloaded", model.name, model.version, model.digest)

    async def _on_change(self, deployment: Deployment) -> None:
        """Reload a deployment that follows its alias; publish the aliases of the others."""
        if deployment.follows:
            await self.renew(deployment, watched=True)
        else:
            await self._name(deployment)

    async def _name(self, deployment: Deployment) -> None:
        """Publish the aliases that resolve to the served archive; they stay as they are if the store cannot be read."""
        found = await attempt_async("aliases could not be read", in_thread("look", deployment.others))
        if not isinstance(found, IngotError):
            self.repository.name(deployment, found)


def _rollout(
    deployment: Deployment,
    after: str,
    error: IngotError | None = None,
    result: Result = "unchanged",
    before: str | None = None,
) -> Rollout:
    return Rollout(
        name=deployment.name,
        version=deployment.tag,
        before=deployment.digest if before is None else before,
        after=after,
        result="failed" if error is not None else result,
        reason=deployment.failure if error is not None else "",
        error=error,
    )
