"""One change of the model that answers: another one is loaded and takes over, or is refused; the earlier is freed."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ingot.config import ServerConfig
from ingot.errors import IngotError, Unavailable, shortened
from ingot.faults import attempt_async
from ingot.runtime import Model
from ingot.serving import Repository, ServedModel
from ingot.serving.aliases import POLL_SECONDS
from ingot.serving.canary_decisions import Canaries
from ingot.serving.deployment import CHANGES, Deployment, Event, Result
from ingot.serving.loading import Tasks, in_thread
from ingot.serving.residency import Residency, sweep

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


class Takeovers:
    """Loads, replaces and frees the models of deployments. Everything here belongs to one event loop.

    Args:
        repository: the models.
        config: its budget of memory.
        retired: called with each model that answers no longer.
    """

    def __init__(self, repository: Repository, config: ServerConfig, retired: Callable[[ServedModel], None]):
        self.repository = repository
        self.retired = retired
        self.tasks = Tasks()
        self.canaries = Canaries(self, repository.metrics, self.tasks)
        # One model is loaded at a time: loading takes cores from those that answer, and memory.
        self._loading = asyncio.Lock()
        self.residency = Residency(repository, config.memory_by_device, self._loading)
        self._rollouts = repository.metrics.rollouts

    async def load_first(self) -> None:
        """Load the models with which the server starts.

        Raises:
            DeadlineExceeded: a model takes longer than ``load_timeout``.
            IngotError: a model cannot be loaded.
        """
        for model in [*self.repository.held]:
            async with self._loading:
                await self.residency.load(model, "start")
        for deployment in self.repository.deployments.values():
            await self.name(deployment)

    async def change(
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
            return self.failed(deployment, wanted, model)
        before, plan = deployment.digest, model.settings.canary
        if plan.steps and not at_once and deployment.current is not None:
            try:
                self.canaries.begin(deployment, model, plan)
            except IngotError as error:
                return self.failed(deployment, wanted, error)
            return rollout(deployment, wanted, result="canary", before=before)
        await self.take_over(deployment, model)
        return rollout(deployment, wanted, result="ok", before=before)

    async def take_over(self, deployment: Deployment, model: Model) -> None:
        """Let a loaded model answer from the next request on; the caller holds ``deployment.changing``."""
        old = self.repository.put(deployment, model)
        deployment.refused = deployment.skipped_digest = ""
        deployment.rolled_back = False
        deployment.note(Event(before=old.digest if old is not None else "", after=model.digest, result="ok"))
        self._rollouts.labels(deployment.name, deployment.tag, "ok").inc()
        changes_log.info("model %s version %s: %s took over", deployment.name, deployment.tag, model.digest)
        try:
            await self.name(deployment)
        finally:  # also if this task is cancelled, it answers no longer
            self.tasks.begin(self.repository.replay_pipelines)
            if old is not None:
                self.tasks.begin(lambda: self._retire(old, wait=True))

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
            self._note(deployment, digest, "stopped", self.reason(ended))
            if done:  # the source had it
                deployment.refused = digest
                changes_log.info("model %s version %s: %s", deployment.name, deployment.tag, ended)
        else:
            self.failed(deployment, digest, ended)
        if deployment.rolled_back:
            deployment.refused = ""  # if the alias is moved there again, it is tried again
        return self.reason(Unavailable(f"{reason}{done}"))

    def discard(self, model: Model) -> None:
        """Free a candidate once it has answered its requests."""
        self.tasks.begin(lambda: self._retire(model))

    async def _load(self, deployment: Deployment, model: Model) -> Model:
        """Load a candidate, and run it at the batch sizes of the model that answers; return it."""
        seen = deployment.current.statistics().by_samples if deployment.current is not None else {}
        sizes = sorted(seen, key=lambda samples: -seen[samples].running.count)[:_SIZES]
        async with self._loading:
            self.repository.held.append(model)
            deployment.candidate = model
            log.info("model %s version %s: %s is loaded", deployment.name, deployment.tag, model.digest)
            try:
                await self.residency.load(model, "rollout", sizes, earlier=deployment.current)
                return model
            except BaseException:  # also if the task is cancelled, the watchdog must not see it any longer
                self.residency.forget(model)
                self.repository.drop(model)
                raise
            finally:
                deployment.candidate = None

    def reason(self, error: IngotError) -> str:
        """Return why a change failed, as every client of management may read it."""
        return shortened(self.repository.without_places(error))

    def failed(self, deployment: Deployment, wanted: str, error: IngotError) -> Rollout:
        """Note that a change failed, and what still answers; ``wanted`` is the digest, empty if it is not known."""
        before = deployment.digest
        deployment.refused = wanted
        self._note(deployment, wanted, "failed", self.reason(error))
        stays = f"{before} still answers" if before else "it stays unloaded"
        log.error("model %s version %s cannot be changed, so %s: %s", deployment.name, deployment.tag, stays, error)
        return rollout(deployment, wanted, error)

    def _note(self, deployment: Deployment, wanted: str, result: Result, reason: str) -> None:
        deployment.note(Event(before=deployment.digest, after=wanted, result=result, reason=reason))
        self._rollouts.labels(deployment.name, deployment.tag, result).inc()

    async def _retire(self, model: Model, *, wait: bool = False) -> None:
        """Let a model that answers no longer finish its requests, then give its memory back.

        Args:
            model: it was taken off the repository.
            wait: first until its open sequences end, which its successor leaves to it.
        """
        self.retired(model)
        if (successor := self.repository.successor(model)) is not None:
            self.residency.replaced(model, successor)
        while model.keeps_sequences and wait:
            await asyncio.sleep(POLL_SECONDS)
        await model.drain()
        await in_thread("close", lambda: model.close(_CLOSE_SECONDS))
        self.residency.forget(model)
        self.repository.drop(model)
        await in_thread("sweep", sweep)
        log.info("model %s version %s: %s is unloaded", model.name, model.version, model.digest)

    async def take_off(self, deployment: Deployment) -> None:
        """Unload a deployment, if it is loaded; the caller holds ``changing``."""
        self.canaries.end(deployment, "stopped", "was stopped, as the model is unloaded")
        old = self.repository.take_off(deployment)
        if old is None:
            return
        self.repository.name(deployment, frozenset())
        deployment.note(Event(before=old.digest, after="", result="ok"))
        log.info("model %s version %s is unloaded", deployment.name, deployment.tag)
        await self._retire(old)

    async def name(self, deployment: Deployment) -> None:
        """Publish the aliases that resolve to the served archive; they stay as they are if the store cannot be read."""
        found = await attempt_async("aliases could not be read", in_thread("look", deployment.others))
        if not isinstance(found, IngotError):
            self.repository.name(deployment, found)


def rollout(
    deployment: Deployment,
    after: str,
    error: IngotError | None = None,
    result: Result = "unchanged",
    before: str | None = None,
) -> Rollout:
    """Return the outcome of a change to ``after``; without an error, with ``result``."""
    return Rollout(
        name=deployment.name,
        version=deployment.tag,
        before=deployment.digest if before is None else before,
        after=after,
        result="failed" if error is not None else result,
        reason=deployment.failure if error is not None else "",
        error=error,
    )
