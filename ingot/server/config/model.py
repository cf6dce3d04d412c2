"""A model of the configuration file, with its own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ingot.server.config.given import Given
from ingot.server.config.server import ServerConfig

if TYPE_CHECKING:
    from ingot.runtime import Settings


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model to serve.

    Attributes:
        source: as on the command line; a file has an absolute path.
        name: the served name; empty for the source's own.
        given: the settings that the model has for itself.
        place: the file and line, for messages.
    """

    source: str
    name: str = ""
    given: Mapping[str, Given] = field(default_factory=dict)
    place: str = ""

    @property
    def address(self) -> str:
        """The source as the command line takes it."""
        return f"{self.name}={self.source}" if self.name else self.source

    @property
    def settings(self) -> dict[str, Any]:
        """Its own settings, by name."""
        return {name: found.value for name, found in self.given.items()}

    def config(self, server: ServerConfig) -> ServerConfig:
        """Return the server's settings with the model's own instead."""
        return dataclasses.replace(server, **self.settings)

    def runtime(self, server: ServerConfig) -> Settings:
        """Return how the model is run."""
        return self.config(server).runtime
