"""Authorization for registries: ``WWW-Authenticate: Basic`` or ``Bearer``, the latter with a token server."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final
from urllib.parse import urlencode, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.errors import InvalidArgument, PermissionDenied, Unauthenticated
from ingot.model_store.references import HUB, RegistryAddress
from ingot.model_store.registry.addresses import listed
from ingot.model_store.registry.credentials import Credentials

Ask = Callable[[str, str, Mapping[str, str], "bytes | None"], tuple[int, bytes]]
"""Sends (method, URL, headers, content) and returns (status, content)."""

# No match starts within a word, so that long words are scanned once.
_PART = re.compile(
    r'(?<![\w-])(?:([A-Za-z]++)[ \t]++(?=[\w-]++=)|([\w-]++)=(?:"((?:[^"\\]|\\.)*+)"|([^\s,"]*+))|(Basic)\b)',
    re.IGNORECASE,
)
TOKEN_HOSTS: Final = "INGOT_TOKEN_HOSTS"
"""Environment variable with hosts of token servers, separated by commas, that may receive any credentials."""
# Large registries with a token server on another host.
_TOKEN_SERVERS = dict.fromkeys(HUB, "auth.docker.io") | {"registry.gitlab.com": "gitlab.com"}
_MAX_CHALLENGE = 4096  # characters
_DEFAULT_SECONDS = 60  # the token specification's default
_MARGIN_SECONDS = 5


@dataclass(frozen=True)
class Scope:
    """The repository (``name``) and actions of a request; without a name, the registry itself.

    ``source`` is another repository that a blob is mounted from. ``purpose`` is the overall operation, such as
    ``push``, for messages; access is requested for ``actions``.
    """

    name: str = ""
    actions: str = "pull"
    source: str = ""
    purpose: str = field(default="", compare=False)

    @property
    def verb(self) -> str:
        return self.purpose or self.actions.rpartition(",")[2]

    def __str__(self) -> str:
        if not self.name:
            return "registry:catalog:*"
        own = f"repository:{self.name}:{self.actions}"
        return f"{own} repository:{self.source}:pull" if self.source else own


PUSH: Final = "pull,push"
DELETE: Final = "pull,delete"


class _Token(BaseModel):
    """The response of a token server."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    token: Annotated[str, Field(repr=False)] = ""
    access_token: Annotated[str, Field(repr=False)] = ""
    expires_in: Annotated[float, Field(ge=0, le=1e9)] = _DEFAULT_SECONDS


class Authorizer:
    """Provides the ``Authorization`` of requests and requests tokens on demand. Thread-safe.

    Args:
        registry: credentials are sent to it, and to its token server if that has the same host or is listed.
        credentials: returns those for a repository by name, or None.
        ask: sends a request to a token server.
    """

    def __init__(self, registry: RegistryAddress, credentials: Callable[[str], Credentials | None], ask: Ask):
        self._registry = registry
        self._credentials = credentials
        self._ask = ask
        self._lock = threading.Lock()
        self._headers: dict[Scope, tuple[str, float]] = {}  # with their expiry time
        self._sent: dict[str, Credentials] = {}

    def header(self, scope: Scope) -> str | None:
        """Return the ``Authorization`` for a request, or None if none is known."""
        header, end = self._headers.get(scope, (None, 0.0))
        return header if time.monotonic() < end else None

    def sent(self, name: str) -> Credentials | None:
        """Return the credentials that were sent for a repository, for messages; None for anonymous access."""
        return self._sent.get(name)

    def renew(self, challenges: Sequence[str], scope: Scope, refused: str | None) -> str | None:
        """Return a new ``Authorization`` after one was refused with these challenges, or None.

        Raises:
            InvalidArgument: the credentials are damaged, or would be sent to an untrusted host.
            PermissionDenied: the token server refuses access.
        """
        with self._lock:  # several threads may be refused at once; one renews for all
            known = self.header(scope)
            if known is not None and known != refused:
                return known
            found = dict(parse_challenges(challenges))
            credentials = self._credentials(scope.name)
            if credentials is not None:
                self._sent[scope.name] = credentials
            if "bearer" in found:
                header, seconds = self._token(found["bearer"], scope, credentials)
            elif "basic" in found and credentials is not None and not credentials.identity:
                header, seconds = _basic(credentials), float("inf")
            else:
                return None
            if header == refused:
                return None
            self._headers[scope] = header, time.monotonic() + seconds
            return header

    def _token(self, challenge: Mapping[str, str], scope: Scope, credentials: Credentials | None) -> tuple[str, float]:
        """Return a token's header and its lifetime in seconds."""
        realm = challenge.get("realm", "")
        self._check(realm, credentials)
        fields = {"service": challenge.get("service", ""), "scope": challenge.get("scope") or str(scope)}
        headers, method, content = {"Accept": "application/json"}, "GET", None
        if credentials is not None and credentials.identity:
            form = {"grant_type": "refresh_token", "client_id": "ingot", "refresh_token": credentials.secret}
            method, content = "POST", urlencode({**form, **fields}).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            url = realm
        else:
            # Token servers expect one parameter per scope.
            query = [("service", fields["service"]), *(("scope", part) for part in fields["scope"].split())]
            if credentials is not None:
                headers["Authorization"] = _basic(credentials)
                query.append(("account", credentials.user))
            url = f"{realm}{'&' if '?' in realm else '?'}{urlencode([pair for pair in query if pair[1]])}"
        status, answer = self._ask(method, url, headers, content)
        host = urlsplit(realm).netloc
        if status in (400, 401, 403):
            raise (PermissionDenied if status == 403 else Unauthenticated)(
                f"{host}, which guards {self._registry}, refuses {credentials or 'access'} "
                f"({status}); log in with docker login {self._registry.netloc}"
            )
        try:
            token = _Token.model_validate_json(answer)
        except ValidationError as error:
            raise InvalidArgument(f"{host}, which guards {self._registry}, answers {status} without a token") from error
        text = token.token or token.access_token
        if not text or not text.isascii() or not text.isprintable():
            raise InvalidArgument(f"{host}, which guards {self._registry}, answers {status} without a token")
        return f"Bearer {text}", max(1.0, token.expires_in - _MARGIN_SECONDS)

    def _check(self, realm: str, credentials: Credentials | None) -> None:
        """Raise InvalidArgument if a token server must not be asked, or not with credentials."""
        try:
            url = httpx.URL(realm)  # parsed as by the client that sends it
        except (httpx.InvalidURL, ValueError):
            url = httpx.URL("")
        if not self._registry.may_lead_to(url.scheme, url.host, url.userinfo.decode()):
            raise InvalidArgument(
                f"{self._registry} asks to log in at '{realm[:200]}', which is not HTTPS; no credentials were sent"
            )
        if credentials is not None and not self._trusts(url.host):
            raise InvalidArgument(
                f"{self._registry} asks to log in at '{realm[:200]}', which is another host; no credentials were sent. "
                f"If its token server is there, allow it with {TOKEN_HOSTS}={url.host} (several with commas between)"
            )

    def _trusts(self, host: str) -> bool:
        """Return whether the registry's credentials may be sent to a host."""
        return host in (self._registry.host, _TOKEN_SERVERS.get(self._registry.host)) or host in listed(TOKEN_HOSTS)


def parse_challenges(headers: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Return (scheme, parameters) of each challenge in ``WWW-Authenticate`` headers, names in lower case."""
    found: list[tuple[str, dict[str, str]]] = []
    for header in headers:
        for match in _PART.finditer(header[:_MAX_CHALLENGE]):
            scheme, key, quoted, plain, bare = match.groups()
            if scheme or bare:
                found.append(((scheme or bare).lower(), {}))
            elif found:
                value = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                found[-1][1].setdefault(key.lower(), value)
    return found


def _basic(credentials: Credentials) -> str:
    return "Basic " + base64.b64encode(f"{credentials.user}:{credentials.secret}".encode()).decode()
