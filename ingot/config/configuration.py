"""The whole configuration of a server: its settings from every source, and the models and pipelines of its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.config.given import Given, given
from ingot.config.model import ModelConfig
from ingot.config.server import ServerConfig

if TYPE_CHECKING:
    from ingot.config.pipelines import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The settings of a server, and the models of its file.

    Attributes:
        server: the settings.
        models: those of the file.
        pipelines: those of the file.
        given: the settings that were given, with where; the others have their defaults.
        path: the file, if there is one.
    """

    server: ServerConfig
    models: tuple[ModelConfig, ...] = ()
    pipelines: tuple[PipelineConfig, ...] = ()
    given: Mapping[str, Given] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], path: str | os.PathLike[str] | None = None, *, options: bool = False
    ) -> Configuration:
        """Return the configuration: ``settings`` first, then ``INGOT_...`` variables, the file, and the defaults.

        Args:
            settings: by name.
            path: the configuration file; None for that of ``INGOT_CONFIG``, if it is set.
            options: whether the user gave the settings as options of the command, so that messages call them that.

        Raises:
            NotFound: there is no such file.
            InvalidConfig: the file has faults.
            InvalidArgument: a setting is unknown or has a wrong value.
        """
        path = path or os.environ.get("INGOT_CONFIG")
        if not path:  # most servers have none, and start without importing pydantic
            return cls(
                server=ServerConfig.of(settings, options=options),
                given=given(ServerConfig.settings(), settings, options, {}),
            )
        from ingot.config.file import ConfigFile

        file = ConfigFile.load(Path(path))
        return cls(
            server=ServerConfig.of(settings, options=options, file=file.server),
            models=file.models,
            pipelines=file.pipelines,
            given=given(ServerConfig.settings(), settings, options, file.server),
            path=Path(path),
        )
