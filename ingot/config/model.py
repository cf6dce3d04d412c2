"""A model of the configuration file, with its own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ingot.config.given import Given, nearest
from ingot.config.server import ServerConfig
from ingot.errors import InvalidArgument, shortened

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

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, Any]) -> ModelConfig:
        """Return a model without a source whose settings come from a client.

        Raises:
            InvalidArgument: a parameter is not a setting of a model, or has a wrong value.
        """
        known = {name: setting for name, setting in ServerConfig.settings().items() if setting.per_model}
        given = {}
        for name, value in parameters.items():
            if name not in known:
                near = nearest(name, known)
                raise InvalidArgument(
                    f"'{shortened(name)}' is not a setting of a model; "
                    + (f"did you mean '{near}'?" if near else f"there are: {', '.join(known)}")
                )
            try:
                given[name] = Given(known[name].read(value), name)
            except (ValueError, OverflowError, TypeError) as error:
                raise InvalidArgument(f"{name} {known[name].fault(value, error)}") from error
        return cls(source="", given=given)

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
