"""Credentials of ``docker login``, ``podman login`` and ``skopeo login``: files and credential helpers."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.alias_generators import to_camel

from ingot.errors import InvalidArgument
from ingot.model_store.references import HUB

HELPER_SECONDS = 60.0
_MAX_FILE_BYTES = 1 << 20
_TOKEN_USER = "<token>"  # Docker's helpers use it in place of a user name


@dataclass(frozen=True)
class Credentials:
    """A user name and password, or a refresh token for OAuth2 (``identity``).

    ``source`` names the file or credential helper that they are from, for messages.
    """

    user: str
    secret: str = field(repr=False)
    identity: bool = False
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"the credentials of {self.source}" if self.source else "the credentials"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class _Login(_Stored):
    auth: SecretStr = SecretStr("")
    username: str = ""
    password: SecretStr = SecretStr("")
    identitytoken: SecretStr = SecretStr("")


class _File(_Stored):
    """``config.json`` of Docker, ``auth.json`` of podman and skopeo."""

    model_config = ConfigDict(alias_generator=to_camel)

    auths: dict[str, _Login | None] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _Answer(_Stored):
    """The output of a credential helper."""

    username: str = Field("", alias="Username")
    secret: SecretStr = Field(SecretStr(""), alias="Secret")


def find(host: str, name: str) -> Credentials | None:
    """Return the credentials for a repository, or None for anonymous access.

    Searched in this order: ``$REGISTRY_AUTH_FILE``, the file of podman and skopeo, and Docker's.

    Args:
        host: the registry's, with its port if it has one.
        name: the repository's; an entry for ``host/team`` takes precedence over one for ``host``.

    Raises:
        InvalidArgument: a file is damaged, or a helper fails; the message contains no secret.
    """
    for path in _paths():
        stored = _load(path)
        found = None if stored is None else _find(stored, path, host, name)
        if found is not None:
            return found
    return None


def _paths() -> Iterator[Path]:
    if chosen := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    if docker := os.environ.get("DOCKER_CONFIG"):
        yield Path(docker) / "config.json"
    else:
        with contextlib.suppress(RuntimeError):  # a container's user may have no home
            yield Path.home() / ".docker" / "config.json"


def _load(path: Path) -> _File | None:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidArgument(f"{path} is too large for a credential file")
        return _File.model_validate_json(path.read_bytes() or b"{}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidArgument(f"the credentials in {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise InvalidArgument(
            f"{path} is not a credential file{f' (at {where})' if where else ''}: {fault['msg']}; "
            "repair it, or write it again with docker login"
        ) from error


def _find(stored: _File, path: Path, host: str, name: str) -> Credentials | None:
    hosts = HUB if host in HUB else (host,)
    helpers = {_plain(key): helper for key, helper in stored.cred_helpers.items()}
    helper = next((helpers[each] for each in hosts if each in helpers), stored.creds_store)
    if helper:
        for each in hosts:
            server = next((key for key in stored.auths if _plain(key) == each), each)
            if (found := _ask(helper, server, path)) is not None:
                return found
    logins = {_plain(key): (key, login) for key, login in stored.auths.items() if login is not None}
    for each in hosts:
        parts = [each, *name.split("/")]
        for count in range(len(parts), 0, -1):
            key, login = logins.get("/".join(parts[:count]), ("", None))
            if login is not None and (found := _read(login, key, path)) is not None:
                return found
    return None


def _plain(key: str) -> str:
    """Return a key as newer tools write it: ``https://index.docker.io/v1/`` becomes ``index.docker.io``."""
    if "://" in key:
        key = re.sub(r"/v[12]/?$", "", key.split("://", 1)[1])
    return key.rstrip("/").lower()


def _read(login: _Login, key: str, path: Path) -> Credentials | None:
    user, secret = login.username, login.password.get_secret_value()
    if auth := login.auth.get_secret_value():
        try:
            user, colon, secret = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            # Without its cause, which contains the secret.
            raise InvalidArgument(
                f"{path} has damaged credentials for '{key}': 'auth' must be user:password in base64; "
                f"write it again with docker login {key}"
            ) from None
        secret = secret.rstrip("\0")
    if token := login.identitytoken.get_secret_value():
        return Credentials(user, token, identity=True, source=str(path))
    return Credentials(user, secret, source=str(path)) if user and secret else None


def _ask(helper: str, server: str, path: Path) -> Credentials | None:
    """Return the credentials that a helper keeps for a server."""
    program = f"docker-credential-{helper}"
    if re.fullmatch(r"[A-Za-z0-9_.-]+", helper) is None:
        raise InvalidArgument(f"{path} has an invalid name of a credential helper: '{helper[:100]}'")
    failed = f"{program}, which {path} names, returned no credentials for {server}"
    try:
        result = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise InvalidArgument(f"{failed}: it is not installed, or not on the PATH") from None
    except OSError as error:
        raise InvalidArgument(f"{failed}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise InvalidArgument(f"{failed}: it did not answer within {HELPER_SECONDS:.0f} seconds") from None
    if result.returncode:
        if b"not found" in result.stdout.lower():
            return None
        raise InvalidArgument(
            f"{failed}: it failed with status {result.returncode}; try: echo {server} | {program} get"
        )
    try:
        answer = _Answer.model_validate_json(result.stdout)
    except ValidationError as error:
        raise InvalidArgument(f"{failed}: its output is invalid") from error
    secret = answer.secret.get_secret_value()
    if not secret:
        return None
    source = f"{program}, which {path} names"
    return Credentials(answer.username, secret, identity=answer.username == _TOKEN_USER, source=source)
