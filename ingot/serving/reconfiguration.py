"""The configuration file read again by a running server: what changes live, and what needs a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ingot.config.changes import Changes, changes
from ingot.config.configuration import Configuration
from ingot.config.model import ModelConfig
from ingot.errors import IngotError
from ingot.serving.deployment import CHANGES
from ingot.serving.rollout import Rollouts

if TYPE_CHECKING:
    from ingot.config.pipelines import PipelineConfig

log = logging.getLogger(__name__)
changes_log = logging.getLogger(CHANGES)


class Reconfiguration:
    """Applies changes of the configuration file.

    Args:
        rollouts: changes the models.
        current: what is applied.
        read: reads the configuration again, in a thread; raises IngotError if it has faults.
    """

    def __init__(self, rollouts: Rollouts, current: Configuration, read: Callable[[], Configuration]):
        self._rollouts = rollouts
        self._current = current
        self._read = read

    async def apply(self) -> tuple[list[str], list[str]]:
        """Read the configuration again, and load, change and unload models accordingly.

        Returns:
            A line for each change, also of those that need a restart; and one for each model that could not be loaded.

        A model that cannot be loaded is logged, and tried again the next time; so are settings that need a restart.

        Raises:
            IngotError: the configuration has faults; nothing is changed.
        """
        old, new = self._current, await asyncio.to_thread(self._read)
        found = changes(old, new)
        for line in found.lines:
            changes_log.info("configuration: %s", line)
        live = {change.name: getattr(new.server, change.name) for change in found.live}
        server = dataclasses.replace(old.server, **live)
        if live:
            await self._rollouts.use(server)
        models, failures = await self._apply(found, Configuration(server=server, models=new.models))
        pipelines = new.pipelines
        if failure := await self._serve(pipelines):
            failures, pipelines = [*failures, failure], old.pipelines
        self._current = dataclasses.replace(new, server=server, models=models, pipelines=pipelines)
        return found.lines, failures

    async def _serve(self, pipelines: Sequence[PipelineConfig]) -> str:
        """Serve these pipelines; return why that failed, or an empty text."""
        try:
            await self._rollouts.serve_pipelines(pipelines)
        except IngotError as error:
            log.error("configuration: the pipelines stay as they are: %s", error)
            return f"failed: the pipelines stay as they are: {error}"
        return ""

    async def _apply(self, found: Changes, new: Configuration) -> tuple[tuple[ModelConfig, ...], list[str]]:
        """Apply the changes of models; return those whose state is that of their configuration, and failures."""
        failures = []
        done = {model.address: model for model in new.models}
        for model in found.unload:
            await self._unload(model)
        for model in found.load:
            if failure := await self._load(model, new):
                failures.append(failure)
                del done[model.address]
        for before, after, _ in found.reload:
            known = self._served(before)
            if failure := await self._load(after, new):
                failures.append(failure)
                del done[after.address]
                done[before.address] = before
            elif known != self._served(after):  # its version is another one
                await self._unload(before)
        return tuple(done.values()), failures

    async def _load(self, model: ModelConfig, new: Configuration) -> str:
        """Load a model; return why that failed, or an empty text."""
        try:
            await self._rollouts.load_source(model.address, model.runtime(new.server))
        except IngotError as error:
            failure = f"failed: {model.place}: {model.address} cannot be loaded: {error}"
            log.error("configuration: %s", failure)
            return failure
        return ""

    async def _unload(self, model: ModelConfig) -> None:
        if (served := self._served(model)) is not None:
            await self._rollouts.unload(*served)

    def _served(self, model: ModelConfig) -> tuple[str, str] | None:
        """Return the name and version of a model."""
        known = self._rollouts.repository.deployments.items()
        return next((key for key, deployment in known if deployment.source == model.address), None)
