"""What differs between two configurations, and what of it a running server can change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ingot.config.configuration import Configuration
from ingot.config.model import ModelConfig
from ingot.config.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting with its values before and after, as a user would write them."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between two configurations.

    Attributes:
        load: models that are new.
        unload: models that are gone.
        reload: models whose source or settings differ, before and after, with what differs.
        pipelines: a line for each pipeline that is new, gone or different.
        live: settings of the server that a running server changes by loading models again.
        restart: settings that only take effect when the server starts again.
    """

    load: tuple[ModelConfig, ...] = ()
    unload: tuple[ModelConfig, ...] = ()
    reload: tuple[tuple[ModelConfig, ModelConfig, tuple[Change, ...]], ...] = ()
    pipelines: tuple[str, ...] = ()
    live: tuple[Change, ...] = ()
    restart: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.load or self.unload or self.reload or self.pipelines or self.live or self.restart)

    @property
    def lines(self) -> list[str]:
        """A line for each difference: first what changes live."""
        return [
            *(f"live: load {model.address}" for model in self.load),
            *(f"live: unload {model.address}" for model in self.unload),
            *(f"live: load {model.address} again: {', '.join(map(str, found))}" for _, model, found in self.reload),
            *(f"live: {line}" for line in self.pipelines),
            *(f"live: {change}" for change in self.live),
            *(f"restart: {change}" for change in self.restart),
        ]


def changes(old: Configuration, new: Configuration) -> Changes:
    """Compare two configurations. Models are the same if they have the same name, or without one the same source."""
    known = ServerConfig.settings()
    server = _differences(old.server, new.server)
    before, after = _keyed(old.models), _keyed(new.models)
    both = (
        (before[key], model, _of_model(before[key], model, old, new)) for key, model in after.items() if key in before
    )
    return Changes(
        load=tuple(model for key, model in after.items() if key not in before),
        unload=tuple(model for key, model in before.items() if key not in after),
        reload=tuple(each for each in both if each[-1]),
        pipelines=tuple(_of_pipelines(old, new)),
        live=tuple(change for name, change in server.items() if known[name].per_model),
        restart=tuple(change for name, change in server.items() if not known[name].per_model),
    )


def _keyed(models: Sequence[ModelConfig]) -> dict[str, ModelConfig]:
    """Return models by name; without one, or if several versions have it, by their address."""
    names = Counter(model.name for model in models if model.name)
    return {model.name if names[model.name] == 1 else model.address: model for model in models}


def _of_model(before: ModelConfig, after: ModelConfig, old: Configuration, new: Configuration) -> tuple[Change, ...]:
    """Return the changes of one model: of its source, and of its settings with those of the server."""
    known = ServerConfig.settings()
    found = _differences(before.config(old.server), after.config(new.server))
    source = Change(name="source", before=before.source, after=after.source)
    own = (change for name, change in found.items() if known[name].per_model)
    return (*((source,) if before.source != after.source else ()), *own)


def _of_pipelines(old: Configuration, new: Configuration) -> Iterator[str]:
    before, after = ({pipeline.name: pipeline for pipeline in each.pipelines} for each in (old, new))
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            verb = "unload" if name not in after else "load" if name not in before else "change"
            yield f"{verb} pipeline {name}"


def _differences(old: ServerConfig, new: ServerConfig) -> Mapping[str, Change]:
    return {
        name: Change(name=name, before=setting.shown(before), after=setting.shown(after))
        for name, setting in ServerConfig.settings().items()
        if (before := getattr(old, name)) != (after := getattr(new, name))
    }
