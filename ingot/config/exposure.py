"""Rules about the settings that decide who reaches a server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ingot.addresses import is_loopback, is_path
from ingot.errors import InvalidArgument

# RFC 6454, section 6.2, in lower case as browsers send it.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_NAME = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
ANY = "*"
OFF = "off"
"""The management setting of a server without a management listener."""


class Exposed(Protocol):
    """The settings that are checked; see :class:`ingot.config.ServerConfig`."""

    @property
    def host(self) -> str: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def auth(self) -> Path | None: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_client_ca(self) -> Path | None: ...
    @property
    def cors_origin(self) -> str | None: ...
    @property
    def allowed_host(self) -> str | None: ...
    @property
    def shared_memory(self) -> str | None: ...
    @property
    def log_control(self) -> bool: ...
    @property
    def share_port(self) -> bool: ...
    @property
    def torchserve(self) -> bool: ...
    @property
    def management(self) -> str | None: ...
    @property
    def management_grpc(self) -> str | None: ...


def check_exposure(config: Exposed, called: Callable[[str], str]) -> None:
    """Refuse settings that open a server further than their user may know.

    Args:
        config: the settings.
        called: returns the name of a setting as the user wrote it.

    Raises:
        InvalidArgument: names what is missing.
    """
    _check_host(config, called)
    _check_management(config, called)
    for name in listed(config.allowed_host):
        if _NAME.fullmatch(name) is None:
            raise InvalidArgument(
                f"{called('allowed_host')} names '{name}'; write names of hosts as models.example.com, in lower case, "
                "without a port, separated by commas"
            )
    if config.shared_memory is not None and ("/" in config.shared_memory or not listed(config.shared_memory)):
        raise InvalidArgument(
            f"{called('shared_memory')} is '{config.shared_memory}'; write patterns of names as ingot-*, without a "
            "slash, separated by commas, or * for all"
        )
    for name in ("shared_memory", "log_control", "torchserve"):
        if getattr(config, name) and config.share_port:
            raise InvalidArgument(
                f"{called(name)} cannot be combined with {called('share_port')}: what a client registers or changes "
                "would reach any one of the servers"
            )
    origins = listed(config.cors_origin)
    for origin in origins:
        if origin != ANY and _ORIGIN.fullmatch(origin) is None:
            raise InvalidArgument(
                f"{called('cors_origin')} names '{origin}'; write origins as https://example.com or "
                "http://localhost:3000, in lower case, separated by commas"
            )
    if ANY in origins and (config.auth is not None or config.tls_client_ca is not None):
        raise InvalidArgument(
            f"{called('cors_origin')} is '*', but clients have keys or certificates: name the origins that may use them"
        )


def listed(text: str | None) -> frozenset[str]:
    """Return the values of a setting that are separated by commas."""
    return frozenset(filter(None, (part.strip() for part in (text or "").split(","))))


def _check_host(config: Exposed, called: Callable[[str], str]) -> None:
    if config.insecure or is_loopback(config.host):
        return
    missing = []
    if config.tls_cert is None:
        missing.append("TLS (--tls-cert, --tls-key)")
    if config.auth is None and config.tls_client_ca is None:
        missing.append("access control (--auth keys.toml, which ingot server keys create makes; or --tls-client-ca)")
    if missing:
        lacks = " and without ".join(missing)
        raise InvalidArgument(
            f"{called('host')} is {config.host}, which other machines may reach, without {lacks}. "
            "Give these, or --insecure (INGOT_INSECURE=1, in Python insecure=True) to serve everyone who reaches it"
        )


def _check_management(config: Exposed, called: Callable[[str], str]) -> None:
    """A port of management needs keys also on this machine, as web pages can send requests there."""
    if config.management == OFF and config.management_grpc is not None:
        raise InvalidArgument(f"{called('management_grpc')} needs {called('management')}, which is off; leave one out")
    if config.management == "on":
        raise InvalidArgument(f"{called('management')} is 'on'; leave it out for the default, a Unix socket")
    for name in ("management", "management_grpc"):
        address = getattr(config, name)
        if address in (None, OFF) or config.insecure or (name == "management" and is_path(address)):
            continue
        if config.auth is None:
            raise InvalidArgument(
                f"{called(name)} is {address}, a port, without --auth: give a file with keys that may manage (ingot "
                "server keys create --scope manage), or use a Unix socket"
            )
        if not is_loopback(address.rpartition(":")[0]) and config.tls_cert is None:
            raise InvalidArgument(
                f"{called(name)} is {address}, which other machines may reach, without TLS (--tls-cert, --tls-key)"
            )
