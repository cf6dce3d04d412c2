"""The settings of a server, as it uses them. The command line imports this for ``--help``, so it imports little."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from ingot import permissions
from ingot.addresses import is_path
from ingot.config.exposure import OFF, check_exposure
from ingot.config.given import Given, given
from ingot.config.model_fields import ModelFields
from ingot.config.server_fields import ServerFields
from ingot.config.setting import Setting
from ingot.errors import InvalidArgument
from ingot.report import units

if TYPE_CHECKING:
    from ingot.runtime import Settings

# Limits that grpcio does not support.
CLIENT_LIMITS = ("max_connections", "max_in_flight", "max_rate")
# Where a server listens. The command prints it as addresses, not as settings.
_ADDRESSES = ("host", "http_port", "grpc_port", "torchserve", "torchserve_ports")
_NOTHING: Mapping[str, Given] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ModelFields, ServerFields):
    """Every setting is an option of ``ingot serve``, a variable and a key: ``max_batch`` is ``INGOT_MAX_BATCH``."""

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], *, options: bool = False, file: Mapping[str, Given] = _NOTHING
    ) -> ServerConfig:
        """Return a configuration; what ``settings`` lacks comes from the environment, the file or the defaults.

        Args:
            settings: by name.
            options: whether the user gave them as options of the command, so that messages call them that.
            file: the values of a configuration file, by name.

        Raises:
            InvalidArgument: a setting is unknown or has a wrong value; the message names it as the user wrote it.
        """
        known = cls.settings()
        found = given(known, settings, options, file)

        def called(name: str) -> str:
            return found[name].called if name in found else known[name].option if options else name

        values = {}
        for name, (value, *_) in found.items():
            try:
                values[name] = known[name].read(value)
            except (ValueError, OverflowError, TypeError) as error:
                raise InvalidArgument(f"{called(name)} {known[name].fault(value, error)}") from error
        config = cls(**values)
        if config.http_port and config.http_port == config.grpc_port:
            raise InvalidArgument(
                f"{called('http_port')} and {called('grpc_port')} are both {config.http_port}; each protocol needs a "
                "separate port (0 for any free port)"
            )
        if config.share_port and not (config.http_port and config.grpc_port):
            raise InvalidArgument(
                f"{called('share_port')} needs fixed ports, as other servers cannot know a free one: give "
                f"{called('http_port')} and {called('grpc_port')}"
            )
        check_exposure(config, called)
        if config.grpc_server == "grpcio":
            for name in CLIENT_LIMITS:
                if getattr(config, name) is not None:
                    raise InvalidArgument(
                        f"{called(name)} has no effect on {called('grpc_server')} grpcio; use the server fast"
                    )
        return config

    @classmethod
    @cache
    def settings(cls) -> Mapping[str, Setting]:
        """Return the declaration of each field, by its name."""
        hints = get_type_hints(cls)
        return {field.name: _named(field, hints[field.name]) for field in dataclasses.fields(cls)}

    @property
    def content(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: str(value) if isinstance(value, Path) else value for name, value in values}

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, as JSON has them, without the addresses."""
        known = self.settings()
        return {
            name: value
            for name, value in self.content.items()
            if value != known[name].default and name not in _ADDRESSES
        }

    @property
    def summary(self) -> str:
        """The same in one line, as they can be given."""
        known = self.settings()
        return ", ".join(f"{name} {known[name].shown(value)}" for name, value in self.changed.items())

    @property
    def shows_page(self) -> bool:
        """Whether the HTTP port has the page; a management port has it instead, if there is one."""
        return self.page and (self.management in (None, OFF) or is_path(self.management))

    @property
    def torchserve_ports_by_use(self) -> tuple[int, ...]:
        """The ports of TorchServe's APIs: inference, management, metrics, and inference and management over gRPC."""
        return tuple(map(int, self.torchserve_ports.split(",")))

    @property
    def replica_name(self) -> str:
        return self.replica or socket.gethostname()

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb << 20

    @property
    def memory_by_device(self) -> Mapping[str, int]:
        """``memory_budget`` in bytes by device; a size alone is that of the CPU."""
        found = {}
        for part in self.memory_budget.split(",") if self.memory_budget else ():
            device, _, size = part.rpartition("=")
            found[device or "cpu"] = units.parse_size(size) or 0
        return found

    @property
    def runtime(self) -> Settings:
        """The settings that the runtime takes.

        Raises:
            Unsupported: there is no such engine.
        """
        # --help does not need these.
        from ingot.runtime import Limits, Settings
        from ingot.runtime.dispatch.states import parse_pairs
        from ingot.runtime.engines.opening import check_engine
        from ingot.runtime.machine import memory
        from ingot.runtime.settings.canary import Plan
        from ingot.runtime.settings.repeat import Repeat
        from ingot.runtime.settings.settings import SequenceLimits

        if self.engine is not None:
            check_engine(self.engine)
        limits = Limits(self.max_batch, self.max_queue, self.max_queue_mb << 20, self.max_delay)
        return dataclasses.replace(
            Settings(**self._named_as(Settings)),
            limits=limits,
            max_answer_bytes=self.max_answer_mb << 20,
            max_call_bytes=min(memory.engine_limit(), math.inf if self.max_call_mb is None else self.max_call_mb << 20),
            engine_call_mb=self.max_call_mb or Settings.engine_call_mb,
            engine_threads=self.threads,
            load_timeout=self.load_timeout or None,
            cache_bytes=units.parse_size(self.cache or "0") or 0,
            memory_budget=self.memory_by_device,
            canary=Plan(**self._named_as(Plan, "canary_"), steps=Plan.parse_steps(self.canary)),
            states=parse_pairs(self.states),
            permissions=permissions.parsed(self.permit),
            model_settings=dict(pair.split("=", 1) for pair in (self.model_settings or "").split(",") if pair),
            repeat=Repeat(inputs=parse_pairs(self.repeat), until=self.repeat_until or "", steps=self.max_steps),
            sequences=SequenceLimits(
                sequences=self.max_sequences,
                nbytes=self.max_state_mb << 20,
                idle=self.sequence_timeout,
                waiting=self.max_queue,
            ),
        )

    def _named_as(self, target: type, prefix: str = "") -> dict[str, Any]:
        """Return the values of the settings that have the names of a dataclass's fields, behind a prefix."""
        known = self.settings()
        names = (field.name for field in dataclasses.fields(target))
        return {name: getattr(self, prefix + name) for name in names if prefix + name in known}


def _named(field: dataclasses.Field[Any], hint: Any) -> Setting:
    """Return a field's setting, with its name and what its type says."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    choices = tuple(kinds) if isinstance(kinds[0], str) else ()
    about: Setting = field.metadata["setting"]
    return dataclasses.replace(about, name=field.name, kind=str if choices else kinds[0], choices=choices)
