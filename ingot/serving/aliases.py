"""Aliases that may have moved: in the store they are noticed at once, in a registry at intervals."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ingot.errors import IngotError
from ingot.faults import attempt_async
from ingot.serving import Repository
from ingot.serving.deployment import Deployment, stamp
from ingot.serving.loading import Tasks, in_thread

POLL_SECONDS = 0.25
"""Time between two polls of the store, where a poll of a model is one system call."""


async def follow(
    repository: Repository,
    on_change: Callable[[Deployment], Coroutine[Any, Any, Any]],
    every: float,
    tasks: Tasks,
) -> None:
    """Watch the aliases of all loaded models until cancelled.

    Args:
        repository: the models.
        on_change: called once when the alias of a deployment may have moved, and again only after that has ended.
        every: seconds between two polls of a registry.
        tasks: runs ``on_change``.
    """
    seen: dict[Deployment, str] = {}
    checking: dict[Deployment, asyncio.Task[Any]] = {}
    while True:
        served = [each for each in repository.deployments.values() if each.current and (each.follows or each.store)]
        fingerprints = await attempt_async(
            "aliases could not be watched",
            in_thread("watch", lambda: [_fingerprint(each, every) for each in served]),  # noqa: B023 - awaited
        )
        for deployment, fingerprint in (
            zip(served, fingerprints, strict=True) if not isinstance(fingerprints, IngotError) else ()
        ):
            running = checking.get(deployment)
            if seen.get(deployment) != fingerprint and (running is None or running.done()):
                seen[deployment] = fingerprint
                checking[deployment] = tasks.begin(functools.partial(on_change, deployment))
        await asyncio.sleep(POLL_SECONDS)


def _fingerprint(deployment: Deployment, every: float) -> str:
    """Return a text that changes when a deployment's alias may have moved."""
    reference = deployment.located.reference if deployment.located is not None else None
    if deployment.store is not None and reference is not None:
        return stamp(deployment.store.of(reference.name).index)
    return str(math.floor(time.monotonic() / every))
