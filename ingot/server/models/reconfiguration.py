"""The configuration file read again by a running server: what changes live, and what needs a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from ingot.errors import IngotError
from ingot.server.config.changes import Changes, changes
from ingot.server.config.configuration import Configuration
from ingot.server.config.model import ModelConfig
from ingot.server.models.rollout import Rollouts

log = logging.getLogger(__name__)


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

    async def apply(self) -> None:
        """Read the configuration again, and load, change and unload models accordingly.

        A model that cannot be loaded is logged, and tried again the next time; so are settings that need a restart.

        Raises:
            IngotError: the configuration has faults; nothing is changed.
        """
        old, new = self._current, await asyncio.to_thread(self._read)
        found = changes(old, new)
        for line in found.lines:
            log.warning("configuration: %s", line)
        live = {change.name: getattr(new.server, change.name) for change in found.live}
        server = dataclasses.replace(old.server, **live)
        if live:
            await self._rollouts.use(server)
        models = await self._apply(found, Configuration(server=server, models=new.models))
        self._current = dataclasses.replace(new, server=server, models=models)

    async def _apply(self, found: Changes, new: Configuration) -> tuple[ModelConfig, ...]:
        """Apply the changes of models; return those whose state is that of their configuration."""
        done = {model.address: model for model in new.models}
        for model in found.unload:
            await self._unload(model)
        for model in found.load:
            if not await self._load(model, new):
                del done[model.address]
        for before, after, _ in found.reload:
            known = self._served(before)
            if not await self._load(after, new):
                del done[after.address]
                done[before.address] = before
            elif known != self._served(after):  # its version is another one
                await self._unload(before)
        return tuple(done.values())

    async def _load(self, model: ModelConfig, new: Configuration) -> bool:
        try:
            await self._rollouts.load_source(model.address, model.runtime(new.server))
        except IngotError as error:
            log.error("configuration: %s: %s cannot be loaded: %s", model.place, model.address, error)
            return False
        return True

    async def _unload(self, model: ModelConfig) -> None:
        if (served := self._served(model)) is not None:
            await self._rollouts.unload(*served)

    def _served(self, model: ModelConfig) -> tuple[str, str] | None:
        """Return the name and version of a model."""
        known = self._rollouts.repository.deployments.items()
        return next((key for key, deployment in known if deployment.source == model.address), None)
