"""Decides whether a candidate that is tried takes over or is rolled back; canary.py compares it with its limits."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ingot.config import ServerConfig
from ingot.config.given import nearest
from ingot.errors import (
    AlreadyExists,
    IngotError,
    InternalError,
    InvalidArgument,
    NotFound,
    Unsupported,
    quoted,
    shortened,
)
from ingot.protocol.arguments import version_text
from ingot.runtime import Metrics, Model
from ingot.runtime.settings.canary import Plan
from ingot.serving import Repository
from ingot.serving.canary import Canary, Outcome
from ingot.serving.deployment import CHANGES, Deployment, Event
from ingot.serving.loading import Tasks, in_thread
from ingot.serving.traffic_split import TrafficSplit
from ingot.tensors import TensorSpec

log = logging.getLogger(__name__)
changes_log = logging.getLogger(CHANGES)

_POLL_SECONDS = 0.1
# Share of the requests in percent that a canary gets if nothing else is said.
_WEIGHT = 10.0


class Changes(Protocol):
    """The interface of :class:`ingot.serving.takeover.Takeovers` that a canary uses."""

    repository: Repository

    async def prepare(self, deployment: Deployment, source: str) -> tuple[Deployment, Model]: ...

    async def take_over(self, deployment: Deployment, model: Model) -> None: ...

    async def roll_back(self, deployment: Deployment, digest: str, reason: str, *, stopped: bool = False) -> str: ...

    def discard(self, model: Model) -> None: ...


class Canaries:
    """The canaries of a server. All of it belongs to its event loop.

    Args:
        changes: loads candidates, and lets them take over.
        metrics: where to count.
        tasks: runs the judgement of candidates.
    """

    def __init__(
        self,
        changes: Changes,
        metrics: Metrics,
        tasks: Tasks,
    ):
        self._changes = changes
        self._metrics = metrics
        self._tasks = tasks
        self._last: dict[Deployment, Canary] = {}

    def running(self, deployment: Deployment) -> Canary | None:
        """Return the canary of a deployment, if there is one now."""
        canary = self._last.get(deployment)
        return canary if canary is not None and canary.outcome == "running" else None

    def status(self, deployment: Deployment) -> dict[str, Any] | None:
        """Return the present or last canary of a deployment."""
        canary = self._last.get(deployment)
        return canary.content if canary is not None else None

    async def ask(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a canary, or change the one that runs; return its status.

        Args:
            name: of the model, with ``:version`` if several are served.
            parameters: ``source`` of a new candidate, or ``version`` in the repository whose alias the model follows,
                detached from the alias until it moves; ``shadow``, to compare only; ``weight`` in percent, where 100
                takes over; and the settings ``canary_...`` without that prefix.

        Raises:
            NotFound: there is no such model or source, or nothing to change.
            AlreadyExists: another candidate is tried.
            InvalidArgument: a parameter is unknown or wrong, or the candidate has other inputs or outputs.
            IngotError: the candidate cannot be loaded.
        """
        deployment = self._deployment(name)
        given = dict(parameters)
        source, shadow, weight = given.pop("source", None), given.pop("shadow", False), given.pop("weight", None)
        skipped = ""
        if (version := given.pop("version", None)) is not None:
            if source is not None:
                raise InvalidArgument("give a source or a version, not both")
            source, skipped = deployment.source_of(version_text(version)), await in_thread("look", deployment.wanted)
        if source is not None and (not isinstance(source, str) or not source):
            raise InvalidArgument(f"'source' is {quoted(source)}; it must be a reference such as digits:2")
        if not isinstance(shadow, bool):
            raise InvalidArgument(f"'shadow' is {quoted(shadow)}; it must be true or false")
        weight = 0.0 if shadow else _percent(weight)
        async with deployment.changing:
            canary = self.running(deployment)
            if source is None and canary is None:
                raise NotFound(f"no candidate is tried for model '{name}'; name its source, such as digits:2")
            if source is not None and canary is not None:
                raise AlreadyExists(f"model '{name}' has a candidate, {canary.candidate.digest}; stop its canary first")
            if source is not None:
                current = _current(deployment)
                plan = changed(current.settings.canary, given)
                steps = plan.steps if "steps" in given or weight is None else ()
                found, model = await self._changes.prepare(deployment, source)
                weight = _WEIGHT if weight is None else weight
                self.begin(deployment, model, dataclasses.replace(plan, steps=steps), found, weight, skipped)
            elif canary is not None:
                canary.split.plan = changed(canary.plan, given)
                if weight is not None:
                    canary.split.plan = dataclasses.replace(canary.plan, steps=())
                    canary.enter(0, weight)
            canary = self._last[deployment]
            if weight == 100:
                await self._pass(canary)
        return canary.content

    async def stop(self, name: str) -> dict[str, Any]:
        """Stop a canary; the current model gets all requests, and an alias that resolves to it is moved back.

        Raises:
            NotFound: there is no such model, or no canary.
        """
        deployment = self._deployment(name)
        async with deployment.changing:
            canary = self.running(deployment)
            if canary is None:
                raise NotFound(f"no candidate is tried for model '{name}'")
            reason, digest = "was stopped by an operator", canary.candidate.digest
            self.end(deployment, "stopped", reason)
            # Otherwise the next look at the alias begins it again.
            canary.reason = await self._changes.roll_back(deployment, digest, reason, stopped=True)
        return canary.content

    def begin(
        self,
        deployment: Deployment,
        model: Model,
        plan: Plan,
        found: Deployment | None = None,
        weight: float = 0.0,
        skipped: str = "",
    ) -> None:
        """Give a loaded candidate its first share of the requests; the caller holds ``deployment.changing``.

        Args:
            deployment: what it is tried for.
            model: the candidate; it is discarded if it cannot be tried.
            plan: the steps, which go before ``weight``, and the limits.
            found: see :class:`Canary`.
            weight: percent of the requests, if there are no steps.
            skipped: the ``skipped_digest`` of :class:`Canary`.

        Raises:
            InvalidArgument: its inputs or outputs differ from those of the current model.
            Unsupported: one of them keeps states or answers several times.
        """
        current = _current(deployment)
        try:
            _check(current, model)
        except IngotError:
            self._changes.discard(model)
            raise
        canary = Canary(
            deployment=deployment,
            split=TrafficSplit(current, model, plan, self._metrics),
            found=found,
            skipped_digest=skipped,
        )
        self._last[deployment] = canary
        canary.enter(0, plan.steps[0] if plan.steps else weight)
        self._show(canary)
        current.split(canary.split)
        deployment.note(Event(before=current.digest, after=model.digest, result="canary"))
        changes_log.info(
            "model %s version %s: %s is tried with %g %% of the requests%s",
            deployment.name,
            deployment.tag,
            model.digest,
            canary.split.weight,
            "; a restart of the server serves it at once" if found is None else "",
        )
        self._tasks.begin(lambda: self._judge(canary))

    def end(self, deployment: Deployment, outcome: Outcome, reason: str = "") -> None:
        """End the canary of a deployment, if there is one, and free its candidate; the caller holds ``changing``."""
        canary = self.running(deployment)
        if canary is not None:
            self._settle(canary, outcome, reason)
            self._changes.discard(canary.candidate)

    def _settle(self, canary: Canary, outcome: Outcome, reason: str = "") -> None:
        canary.outcome, canary.reason, canary.split.weight = outcome, reason, 0.0
        canary.split.current.split(None)
        labels = (canary.deployment.name, canary.deployment.tag)
        for gauge in (
            self._metrics.canary_weight,
            self._metrics.canary_worst_error,
            self._metrics.canary_latency_ratio,
        ):
            gauge.remove(*labels)
        level = logging.WARNING if outcome == "rolled back" else logging.INFO
        changes_log.log(
            level, "model %s version %s: the canary of %s %s", *labels, canary.candidate.digest, reason or outcome
        )

    async def _pass(self, canary: Canary) -> None:
        """Let the candidate take over; the caller holds ``changing``."""
        deployment = canary.deployment
        self._settle(canary, "passed")
        await self._changes.take_over(deployment, canary.candidate)
        if canary.skipped_digest:
            deployment.skipped_digest = canary.skipped_digest
        elif canary.found is not None:
            deployment.source, deployment.located = canary.found.source, canary.found.located

    async def _judge(self, canary: Canary) -> None:
        """Check a canary every 0.1 seconds until it ends."""
        while canary.outcome == "running":
            self._show(canary)
            await asyncio.sleep(_POLL_SECONDS)
            if canary.fault() or (canary.plan.steps and canary.passed):
                async with canary.deployment.changing:
                    if canary.outcome == "running":
                        await self._decide(canary)

    async def _decide(self, canary: Canary) -> None:
        deployment, plan = canary.deployment, canary.plan
        if fault := canary.fault():
            share = f"at {canary.split.weight:g} %" if canary.split.weight else "as a shadow"
            digest, reason = canary.candidate.digest, f"was rolled back {share}: {fault}"
            self.end(deployment, "rolled back", reason)
            canary.reason = await self._changes.roll_back(deployment, digest, reason)
        elif plan.steps and canary.passed:
            if canary.step + 1 < len(plan.steps) and plan.steps[canary.step + 1] < 100:
                canary.enter(canary.step + 1, plan.steps[canary.step + 1])
                share = f"{canary.split.weight:g} %"
                log.info("model %s: %s gets %s of the requests", deployment.name, canary.candidate.digest, share)
            else:
                await self._pass(canary)

    def _show(self, canary: Canary) -> None:
        labels = (canary.deployment.name, canary.deployment.tag)
        self._metrics.canary_weight.labels(*labels).set(canary.split.weight)
        self._metrics.canary_worst_error.labels(*labels).set(canary.split.drift.worst)
        current, candidate = canary.split.sides.values()
        self._metrics.canary_latency_ratio.labels(*labels).set(candidate.latency(0.99) / current.latency(0.99))

    def _deployment(self, name: str) -> Deployment:
        return self._changes.repository.one(name)


def changed(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """Return a plan with some of its values changed.

    Raises:
        InvalidArgument: a name or value is wrong.
    """
    fields = [each.name for each in dataclasses.fields(Plan)]
    settings, values = ServerConfig.settings(), {}
    for name, value in given.items():
        if name not in fields:
            near = nearest(name, dict.fromkeys([*fields, "source", "shadow", "weight"]))
            raise InvalidArgument(f"'{shortened(name)}' is not known" + (f"; did you mean '{near}'?" if near else ""))
        setting = settings["canary" if name == "steps" else f"canary_{name}"]
        try:
            values[name] = setting.read(value)
        except (ValueError, OverflowError, TypeError) as error:
            raise InvalidArgument(f"{name} {setting.fault(value, error)}") from error
    if "steps" in values:
        values["steps"] = Plan.parse_steps(values["steps"])
    return dataclasses.replace(plan, **values)


def _percent(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= 100:
        raise InvalidArgument(f"'weight' is {quoted(value)}; it must be a percentage, from 0 to 100")
    return number


def _current(deployment: Deployment) -> Model:
    if deployment.current is None:
        raise InternalError(f"model '{deployment.name}' is unloaded")
    return deployment.current


def _stated(model: Model) -> tuple[Sequence[TensorSpec], ...]:
    """Return inputs and outputs without the ranges that a graph shows, such as that of a table of another size."""
    signature, steps = model.signature, model.steps
    inputs = [
        spec if spec.values is None or spec.values.source is None else dataclasses.replace(spec, values=None)
        for spec in signature.inputs
    ]
    raw = (steps.inputs, steps.outputs) if steps is not None else ()
    return inputs, signature.outputs, *raw


def _check(current: Model, candidate: Model) -> None:
    if current.sequential or candidate.sequential or current.decoupled or candidate.decoupled:
        raise Unsupported(
            f"model '{current.name}' keeps states of sequences or answers several times, so its requests cannot be "
            "shared with a candidate; replace it at once by ingot server load"
        )
    if _stated(current) != _stated(candidate):
        raise InvalidArgument(
            f"the candidate of model '{current.name}' has other inputs or outputs, so they cannot share requests; "
            "replace it at once by ingot server load"
        )
