"""What a management client can do, as JSON has it; both protocols call it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.config import ServerConfig
from ingot.errors import Code, IngotError, InvalidArgument, NotFound, PermissionDenied, Unsupported, quoted
from ingot.protocol.arguments import version_text
from ingot.runtime.metrics import Metrics
from ingot.serving.deployment import Deployment
from ingot.serving.loading import in_thread
from ingot.serving.rollout import Rollouts
from ingot.serving.takeover import Rollout

ELSEWHERE = (
    "models are loaded and unloaded on the server's management listener, not on this port: ingot server finds a "
    "socket without --server, and ingot serve prints the address after admin"
)
"""Why other listeners refuse repository control."""

# What a server trusts is decided where it is started.
_FIXED = frozenset(("allow_code", "install_requirements", "isolate", "ort_library", "permit"))


class Control:
    """Loads and unloads models for management clients.

    Args:
        rollouts: the server's rollouts.
        local: whether clients are the user of the server, who may also load files and from registries.
        metrics: where actions are counted.
    """

    def __init__(self, rollouts: Rollouts, metrics: Metrics, *, local: bool):
        self._rollouts = rollouts
        self._local = local
        self._count = metrics.management.labels

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Return Triton's index of the repository; with ``ready`` only models that are ready."""
        listed = [
            {
                "name": each["name"],
                "version": each["version"],
                "state": each["state"].upper(),
                "reason": each["update_failed"] or each["reason"],
            }
            for each in self._rollouts.status()
        ]
        return [each for each in listed if not ready or each["state"] == "READY"]

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each deployment; see :meth:`Rollouts.status`."""
        return self._rollouts.status()

    async def reload(self, name: str = "") -> dict[str, Any]:
        """Load what sources refer to now; without a name of all models, after changes of the configuration file.

        Raises:
            NotFound: there is no such model, or it is unloaded.
        """
        with self._counting_failures("reload"):
            done = await self._rollouts.reload(name or None)
        failed = bool(done.failures) or any(each.error for each in done.models)
        self._count("reload", "failed" if failed else "ok").inc()
        return {
            "configuration": done.changes + done.failures,
            "models": [_content(each) for each in done.models],
            "failed": failed,
        }

    async def load(self, name: str, parameters: Mapping[str, Any]) -> Deployment:
        """Load a model.

        Args:
            name: of a model of this server, with or without ``:version``, or the name of a new one.
            parameters: ``source`` of a new model; ``version``, to load that version of the repository whose alias the
                model follows, detached from the alias until it moves; ``config``, a model configuration of Triton
                as JSON, of which the batch size and the number of instances are read; and settings of a model by name.

        Raises:
            NotFound: there is no such model or source.
            PermissionDenied: the client may not load this.
            IngotError: it cannot be loaded.
        """
        with self._counting_failures("load", name):
            settings = _settings(parameters)
            source, version = settings.pop("source", None), settings.pop("version", None)
            if version is not None:
                if source is not None or settings:
                    raise InvalidArgument("a version is loaded with the model's source and settings; give only that")
                deployment = await self._rollouts.load_detached(name, version_text(version))
                self._count("load", "ok").inc()
                return deployment
            wanted = name if source is None else f"{name}={_text(source)}"
            if wanted != name or not self._is_known(name):
                self._check(wanted)
            self._check_settings(settings)
            deployment = await self._rollouts.load(wanted, settings)
        self._count("load", "ok").inc()
        return deployment

    async def open_new(self, source: str) -> Deployment:
        """Return the deployment that a source would have, without loading it; errors as for :meth:`load`."""
        with self._counting_failures("load"):
            self._check(source)
            found, _ = await in_thread("open", lambda: self._rollouts.repository.open(source))
            return found

    async def register(self, source: str, parameters: Mapping[str, Any]) -> Deployment:
        """Load a source that is not served; errors as for :meth:`load`.

        Args:
            source: ``NAME=SOURCE`` or a source.
            parameters: settings of a model by name.
        """
        with self._counting_failures("load"):
            self._check(source)
            deployment = await self._rollouts.load_new(source, parameters)
        self._count("load", "ok").inc()
        return deployment

    async def scale(self, deployment: Deployment, instances: int) -> None:
        """Run a deployment with another number of engines; see :meth:`Rollouts.scale`."""
        with self._counting_failures("load"):
            await self._rollouts.scale(deployment, instances)
        self._count("load", "ok").inc()

    async def remove(self, deployment: Deployment) -> None:
        """Free a deployment and forget it; see :meth:`Rollouts.remove`."""
        with self._counting_failures("unload"):
            await self._rollouts.remove(deployment)
        self._count("unload", "ok").inc()

    async def unload(self, name: str, version: str = "", dependents: bool = False) -> None:
        """Answer the requests in flight of a model, then free it.

        Raises:
            NotFound: there is no such model.
        """
        with self._counting_failures("unload"):
            await self._rollouts.unload(name, version, dependents)
        self._count("unload", "ok").inc()

    async def canary(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Try a candidate for a model, or change how; arguments and errors as for :meth:`Canaries.ask`."""
        with self._counting_failures("canary"):
            if (source := parameters.get("source")) is not None:
                self._check(_text(source))
            done = await self._rollouts.canaries.ask(name, parameters)
        self._count("canary", "ok").inc()
        return done

    async def stop_canary(self, name: str) -> dict[str, Any]:
        """Stop a canary; arguments and errors as for :meth:`Canaries.stop`."""
        with self._counting_failures("stop_canary"):
            done = await self._rollouts.canaries.stop(name)
        self._count("stop_canary", "ok").inc()
        return done

    @contextlib.contextmanager
    def _counting_failures(self, action: str, loaded: str = "") -> Iterator[None]:
        """Count an action that fails, and let the client see why.

        Args:
            action: the label of the metric.
            loaded: the model that a request loads; its error then begins with the words that Triton's clients match.
        """
        try:
            yield
        except IngotError as found:
            error = found
            if not self._local:
                error = found.unhinted
                error.args = (self._rollouts.repository.without_places(found),)
            self._count(action, error.code.value).inc()
            if loaded and error.code is Code.NOT_FOUND:
                error.args = (f"failed to load '{loaded}', failed to poll from model repository: {error}",)
            elif loaded:
                error.args = (f"load failed for model '{loaded}': {error}",)
            if error.code is Code.INTERNAL:  # such as goldens that do not hold; other clients do not see its text
                raise InvalidArgument(str(error)) from error
            raise error from found.__cause__

    def _is_known(self, name: str) -> bool:
        try:
            return bool(self._rollouts.repository.find(name))
        except NotFound:
            return False

    def _check(self, source: str) -> None:
        if not self._local and not self._rollouts.repository.is_stored(source):
            raise PermissionDenied(
                f"'{source}' is not in the server's store; over the network only models of the store can be "
                "loaded. Copy it there first (ingot copy), or use the server's Unix socket"
            )

        if self._rollouts.repository.runs_code(source):
            raise PermissionDenied(
                f"'{source}' is code in Python, which a request can load only where ingot serve runs with --allow-code "
                "(INGOT_ALLOW_CODE=1)"
            )

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse files of the server as settings: by the names of classes, say, their content could be read."""
        known = ServerConfig.settings()
        for name in settings:
            if not self._local and name in known and known[name].kind is Path:
                raise PermissionDenied(
                    f"'{name}' is a file, which cannot be named over the network; use the server's Unix socket"
                )


def _text(source: object) -> str:
    if not isinstance(source, str) or not source:
        raise InvalidArgument(f"parameter 'source' is {quoted(source)}; it must be a reference such as digits:1")
    return source


def _settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that load parameters stand for, and the source."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if name.startswith("file:"):
            raise Unsupported("a request cannot carry a model's files; copy an archive to the store, and load that")
        if name in _FIXED:
            raise PermissionDenied(f"'{name}' cannot be changed by a request; it is a setting of ingot serve")
        found.update(_of_triton(value) if name == "config" else {name: value})
    return found


def _of_triton(text: object) -> dict[str, Any]:
    try:
        config = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise InvalidArgument("parameter 'config' must be a model configuration as JSON text")
    known = {"name", "platform", "backend", "max_batch_size", "instance_group"}
    if unknown := sorted(config.keys() - known):
        raise InvalidArgument(
            f"the configuration has '{unknown[0]}', which this server does not read; it reads max_batch_size and the "
            "count of instance_group. Give other settings as parameters by their names, such as max_delay"
        )
    settings: dict[str, Any] = {}
    if config.get("max_batch_size"):
        settings["max_batch"] = config["max_batch_size"]
    groups = config.get("instance_group") or []
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise InvalidArgument("'instance_group' must be a list of objects")
    for group in groups:
        if "count" in group:
            settings["instances"] = group["count"]
    return settings


def _content(done: Rollout) -> dict[str, str]:
    return {
        "name": done.name,
        "version": done.version,
        "from": done.before,
        "to": done.after,
        "result": done.result,
        "reason": done.reason,
    }
