"""TorchServe's management: register, scale, describe, list, set the default, unregister; for HTTP and gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from ingot.config import ServerConfig
from ingot.errors import AlreadyExists, DefaultVersionKept, IngotError, InvalidArgument, ModelNotFound, quoted
from ingot.faults import attempt_async
from ingot.report.units import written
from ingot.server.torchserve.versions import Versions
from ingot.serving.control import Control
from ingot.serving.deployment import Deployment
from ingot.serving.rollout import Rollouts

log = logging.getLogger(__name__)

_PAGE = 100
# Seconds that the answer to an asynchronous change waits for an error.
_AT_ONCE = 1.0
_ONLY_STORE = (
    "only models of the server's store are registered, by their names, such as url=net:1.0; ingot import and ingot "
    "copy put models there"
)
_RUNTIMES = ("python", "python2", "python3")
_SUFFIXES = (".mar", ".ingot", ".tar.gz")
_FIRST_WORKER = 9000
_STATES = {True: "READY", False: "UNLOADING"}


class Status(NamedTuple):
    """An outcome: its HTTP status, and its text."""

    code: int
    text: str


_STARTED = Status(202, "Processing worker updates...")


class Parameters:
    """The parameters of a request; a number that cannot be read is its default, as in TorchServe.

    Args:
        values: by name.
    """

    def __init__(self, values: Mapping[str, str]):
        self._values = values

    @classmethod
    def of(cls, query: str) -> Parameters:
        """Return those of a URL; the first of several with one name."""
        return cls({name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()})

    def text(self, name: str) -> str:
        """Return a parameter; empty without, or if it has no value."""
        return self._values.get(name, "")

    def has(self, name: str) -> bool:
        """Return whether a parameter is there, with a value or without."""
        return name in self._values

    def number(self, name: str, default: int) -> int:
        """Return a whole number, or the default."""
        value = self._values.get(name, "")
        return int(value) if value.removeprefix("-").isdecimal() and len(value) <= 9 else default

    def synchronous(self, *, default: bool) -> bool:
        """Return whether the client waits until workers have changed."""
        return (self.text("synchronous") or str(default)).lower() == "true"


class Management:
    """The changes that clients can make, and what they can read. Only archives of the server's store are registered.

    Args:
        rollouts: the server's rollouts.
        versions: finds the models.
        config: the server's configuration.
    """

    def __init__(self, rollouts: Rollouts, versions: Versions, config: ServerConfig):
        self._repository = rollouts.repository
        self._versions = versions
        self._config = config
        self._control = Control(rollouts, rollouts.repository.metrics, local=False)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def register(self, given: Parameters) -> Status:
        """Register a model of the store.

        Raises:
            InvalidArgument: ``url`` is missing or not a name in the store, or another parameter is wrong.
            NotFound: the store has no such model.
            AlreadyExists: its version is registered.
            IngotError: it cannot be loaded.
        """
        source = _source(given)
        found = await self._control.open_new(source)
        if (found.name, found.tag) in self._repository.deployments:
            raise AlreadyExists(f"Model version {found.tag} is already registered for model {found.name}")
        workers = max(0, given.number("initial_workers", 0))
        registered = f'Model "{found.name}" Version: {found.tag} registered with {workers} initial workers'
        if workers:
            work = self._control.register(source, _settings(given, workers))
            return await self._done(work, Status(200, registered), synchronous=given.synchronous(default=True))
        loaded = await self._control.register(source, _settings(given, 1))
        await self._control.scale(loaded, 0)
        return Status(200, f"{registered}. Use scale workers API to add workers for the model.")

    async def _done(self, work: Awaitable[Any], status: Status, *, synchronous: bool) -> Status:
        """Return the status of work; of asynchronous work that takes longer, that it has begun."""
        task = asyncio.ensure_future(attempt_async("a change failed", work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=None if synchronous else _AT_ONCE)
        if not task.done():
            task.add_done_callback(_logged)
            return _STARTED
        if isinstance(outcome := task.result(), IngotError):
            raise outcome
        return status if synchronous else _STARTED

    async def scale(self, name: str, version: str, given: Parameters) -> Status:
        """Run as many engines as there are to be workers; without workers a model is unloaded, and stays registered.

        Raises:
            NotFound: there is no such model or version.
            InvalidArgument: ``min_worker`` is negative, or ``max_worker`` less than it.
            IngotError: it cannot be loaded.
        """
        least = given.number("min_worker", 1)
        if least < 0:
            raise InvalidArgument(f"min_worker is {least}; send 0 or more")
        if given.number("max_worker", least) < least:
            raise InvalidArgument("max_worker cannot be less than min_worker.")
        deployment = self._versions.find(name, version or given.text("model_version"))
        named = f", version: {version}" if version else ""
        status = Status(200, f"Workers scaled to {least} for model: {name}{named}")
        work = self._control.scale(deployment, least)
        return await self._done(work, status, synchronous=given.synchronous(default=False))

    async def unregister(self, name: str, version: str) -> Status:
        """Answer the requests in flight of a version, free it, and forget it.

        Raises:
            NotFound: there is no such model or version.
            DefaultVersionKept: it is the default version, and there are others.
        """
        deployment = self._versions.find(name, version)
        if deployment is self._versions.find(name) and len(self._versions.all(name)) > 1:
            raise DefaultVersionKept(f"Cannot remove default version for model {name}")
        await self._control.remove(deployment)
        return Status(200, f'Model "{name}" unregistered')

    def set_default(self, name: str, version: str) -> Status:
        """Let a version answer requests that name none, on TorchServe's ports.

        Raises:
            NotFound: there is no such model or version.
        """
        self._versions.choose(name, version)
        return Status(200, f'Default version successfully updated for model "{name}" to "{version}"')

    def page(self, given: Parameters) -> dict[str, Any]:
        """Return a page of the models."""
        limit, start = given.number("limit", _PAGE), max(0, given.number("next_page_token", 0))
        limit = limit if 0 <= limit <= _PAGE else _PAGE
        models = self._versions.defaults()
        listed = [{"modelName": each.name, "modelUrl": _url(each)} for each in models[start : start + limit]]
        more = {"nextPageToken": str(start + limit)} if start + limit <= len(models) else {}
        return {**more, "models": listed}

    def describe(self, name: str, version: str) -> list[dict[str, Any]]:
        """Describe a version, the default one, or ``all``.

        Raises:
            NotFound: there is no such model or version.
        """
        found = self._versions.all(name) if version == "all" else [self._versions.find(name, version)]
        return [self._described(each) for each in found]

    def _described(self, deployment: Deployment) -> dict[str, Any]:
        model = deployment.current
        settings = (deployment.settings or self._repository.settings) if model is None else model.settings
        limits = settings.limits
        workers = 0 if model is None else settings.instances
        waiting = 0 if model is None else model.waiting
        return {
            "modelName": deployment.name,
            "modelVersion": deployment.tag,
            "modelUrl": _url(deployment),
            "runtime": "python",
            "minWorkers": workers,
            "maxWorkers": workers,
            "batchSize": limits.max_batch,
            "maxBatchDelay": round(1000 * (limits.max_delay or 0)),
            "responseTimeout": round(self._config.engine_timeout or 0),
            "startupTimeout": round(self._config.load_timeout or 0),
            "loadedAtStartup": (deployment.name, deployment.tag) in self._versions.started,
            "workers": [_worker(deployment, index, self._versions.began) for index in range(workers)],
            "jobQueueStatus": {"remainingCapacity": limits.max_queue - waiting, "pendingRequests": waiting},
        }


def _source(given: Parameters) -> str:
    """Return the source that a request names: a model of the store, as ``NAME=SOURCE`` with another name."""
    url, name, runtime = given.text("url"), given.text("model_name"), given.text("runtime")
    if not given.has("url"):
        raise InvalidArgument("Parameter url is required.")
    if not url:
        raise ModelNotFound(f"Model not found at: the url is empty; {_ONLY_STORE}")
    if "://" in url:
        raise InvalidArgument(f"Given URL {url} does not match any allowed URL(s): {_ONLY_STORE}")
    if ".." in url or "/" in url or "\\" in url:
        raise ModelNotFound(f"Relative path is not allowed in url: {url}: {_ONLY_STORE}")
    if given.text("handler"):
        raise InvalidArgument("Parameter handler is not accepted: an archive has the steps that its import made")
    if runtime and runtime.lower() not in _RUNTIMES:
        raise InvalidArgument(f"Invalid RuntimeType value: {runtime}")
    reference = next((url.removesuffix(end) for end in _SUFFIXES if url.endswith(end)), url)
    return f"{name}={reference}" if name else reference


def _settings(given: Parameters, instances: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"instances": instances}
    if (batch := given.number("batch_size", 0)) > 0:
        settings["max_batch"] = batch
    if (delay := given.number("max_batch_delay", -1)) >= 0:
        settings["max_delay"] = written(delay / 1000)
    return settings


def _url(deployment: Deployment) -> str:
    """Return the name of what was registered, without the folder of a file."""
    source = deployment.source if isinstance(deployment.source, str) else deployment.name
    return source.rpartition("=")[2].rpartition("/")[2]


def _worker(deployment: Deployment, index: int, began: datetime) -> dict[str, Any]:
    model, loaded = deployment.current, [event.time for event in deployment.history if event.result == "ok"]
    start = [began, *loaded][-1]
    return {
        "id": str(_FIRST_WORKER + index),
        "startTime": start.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "status": _STATES[model is not None and model.ready],
        "memoryUsage": 0 if model is None else model.size,
        "pid": os.getpid(),
        "gpu": model is not None and not model.device.startswith("cpu"),
        "gpuUsage": "N/A",
    }


def _logged(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and isinstance(error := task.result(), IngotError):
        log.warning("a change that TorchServe's API began failed: %s", quoted(str(error)))
