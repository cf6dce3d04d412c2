"""HTTP to one registry: authorization, redirects, retries, and meaningful errors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import httpx

from ingot.addresses import is_loopback
from ingot.errors import (
    IngotError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Transient,
    Unauthenticated,
    Unavailable,
)
from ingot.model_store.blobs.transfer import Cancelled, Transfer
from ingot.model_store.references import RegistryAddress
from ingot.model_store.registry import addresses
from ingot.model_store.registry.auth import TOKEN_HOSTS, Authorizer, Scope
from ingot.model_store.registry.bodies import MAX_TEXT, discard, error_of, read_document, retry_after
from ingot.model_store.registry.connections import Connections, network_error, open_http
from ingot.model_store.registry.credentials import Credentials
from ingot.model_store.registry.retries import Retries

MAX_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))

Content = bytes | Callable[[], Iterable[bytes]] | None


@dataclass(frozen=True)
class Request:
    """One HTTP request. If ``content`` is callable, it is called for every attempt.

    ``passing`` are error codes to treat as transient, in addition to those that always are.
    """

    method: str
    url: str
    scope: Scope
    _: KW_ONLY
    headers: Mapping[str, str] = field(default_factory=dict)
    content: Content = None
    passing: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegistryResponse:
    """A response whose body was read."""

    status: int
    headers: httpx.Headers
    content: bytes
    url: str


class Client:
    """HTTP to one registry, thread-safe. Its connections are closed with the last reference to it.

    Args:
        address: the registry.
        credentials: returns those for a repository by name, or None for anonymous access.
        retries: how calls are retried.
    """

    def __init__(
        self, address: RegistryAddress, credentials: Callable[[str], Credentials | None], retries: Retries | None = None
    ):
        self.address = address
        self.retries = retries or Retries()
        self.has_referrers = True
        """Whether the registry lists attachments of manifests; False once it is known not to."""
        self._connections = Connections(str(address))
        self._base = httpx.URL(address.url)
        self._authorizer = Authorizer(address, credentials, self._ask)
        # Servers on this machine are not reached through a proxy.
        self._http = open_http(mounts={f"all://{self._base.host}": None} if is_loopback(self._base.host) else None)
        # For connections by IP address: NO_PROXY lists names, so no proxy is used.
        self._direct = open_http(trust_env=False)
        for client in (self._http, self._direct):
            weakref.finalize(self, client.close)

    def url(self, path: str) -> str:
        """Return the URL of a path below ``/v2/``."""
        return str(self._base.copy_with(raw_path=f"/v2/{path}".encode()))

    def call(self, request: Request, allow: Collection[int] = ()) -> RegistryResponse:
        """Send a request, with retries, and read the response.

        Args:
            request: must be idempotent.
            allow: statuses to return in addition to 2xx.

        Raises:
            Unavailable: the registry cannot be reached, or fails.
            InvalidArgument: it refuses the request, or its response is invalid.
            PermissionDenied: it refuses access.
            NotFound: it does not have the resource.
        """
        return self.retries.run(lambda: self.once(request, allow))

    def once(self, request: Request, allow: Collection[int] = ()) -> RegistryResponse:
        """Send a request once and read the response.

        Raises:
            Transient: it may succeed later.
        """
        response, url = self._opened(request, allow)
        try:
            with self.errors():
                content = b"" if request.method == "HEAD" else read_document(response, self.address)
                return RegistryResponse(response.status_code, response.headers, content, url)
        finally:
            response.close()

    def open(self, request: Request, allow: Collection[int] = ()) -> httpx.Response:
        """Send a request once and return the response with its body unread; the caller closes it.

        Raises:
            Transient: it may succeed later.
        """
        return self._opened(request, allow)[0]

    def _opened(self, request: Request, allow: Collection[int]) -> tuple[httpx.Response, str]:
        """Return the response to a request and the URL that it is from, which names the host."""
        with self.errors():
            response, url = self._follow(request)
            if response.is_success or response.status_code in allow:
                return response, url
            try:
                raise self._refusal(request, response)
            finally:
                response.close()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Convert network errors into errors that name the registry.

        Raises:
            Cancelled: this thread's transfer was cancelled.
            Transient: the failure may pass.
            Unavailable: the failure is permanent, such as an unknown host.
            InvalidArgument: the certificate is not trusted, the registry does not support HTTPS, or it redirects to an
                invalid URL.
        """
        transfer = Transfer.of_this_thread()
        try:
            if transfer is not None:
                transfer.on_cancel(self._connections.break_off)
                transfer.check()
            yield
        except httpx.TransportError as error:
            if transfer is not None and transfer.cancelled:
                raise Cancelled("the transfer was cancelled") from error
            raise network_error(self.address, error) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidArgument(f"{self.address} redirects to an invalid URL: {error}") from error

    def target(self, base: str, location: str) -> str:
        """Return the URL of a redirect or ``Location``.

        Raises:
            InvalidArgument: registries may not redirect there: only to HTTPS, or to plain HTTP where that is allowed.
        """
        try:
            url = httpx.URL(base).join(location)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidArgument(f"{self.address} redirects to an invalid URL") from error
        if not self.address.may_lead_to(url.scheme, url.host, url.userinfo.decode()):
            raise InvalidArgument(
                f"{self.address} redirects to '{location[:MAX_TEXT]}', which is not followed: only HTTPS is, and "
                f"plain HTTP from oci+http://{self.address.netloc}"
            )
        return str(url)

    def _follow(self, request: Request) -> tuple[httpx.Response, str]:
        url = request.url
        for _ in range(MAX_REDIRECTS + 1):
            response = self._authorized(request, url)
            if response.status_code not in _REDIRECTS:
                return response, url
            location = response.headers.get("Location", "")
            discard(response)
            if request.method not in ("GET", "HEAD"):
                raise InvalidArgument(
                    f"{self.address} redirects uploads to '{location[:MAX_TEXT]}'; use that address directly"
                )
            url = self.target(url, location)
        raise InvalidArgument(f"{self.address} redirects more than {MAX_REDIRECTS} times")

    def _authorized(self, request: Request, url: str) -> httpx.Response:
        target = httpx.URL(url)
        own = (target.scheme, target.host, target.port) == (self._base.scheme, self._base.host, self._base.port)
        if not own:  # external storage has its authorization in the URL
            return self._send(request, url, None)
        header = self._authorizer.header(request.scope)
        response = self._send(request, url, header)
        if response.status_code == 401:
            challenges = response.headers.get_list("WWW-Authenticate")
            fresh = self._authorizer.renew(challenges, request.scope, header)
            if fresh is not None:
                discard(response)
                return self._send(request, url, fresh)
        return response

    def _send(self, request: Request, url: str, authorization: str | None) -> httpx.Response:
        headers = dict(request.headers)
        if authorization is not None:
            headers["Authorization"] = authorization
        return self._connect(request.method, url, headers, request.content)

    def _connect(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: Content,
        setting: str = addresses.REDIRECT_HOSTS,
    ) -> httpx.Response:
        """Send a request to the registry, or to a host that it refers to, without following redirects.

        Raises:
            InvalidArgument: the host has a private address and ``setting`` does not list it.
        """
        target = httpx.URL(url)
        # If empty, connect by the host's name.
        allowed = list(addresses.checked(self.address, target, setting))
        while True:
            extensions: dict[str, Any] = {"trace": self._connections.trace}
            client, place, more = self._http, target, dict(headers)
            if allowed:
                client, place = self._direct, target.copy_with(host=allowed.pop(0))
                extensions["sni_hostname"] = target.host  # the certificate must be for the name
                more["Host"] = target.netloc.decode()
            body = content() if callable(content) else content
            sent = client.build_request(method, place, headers=more, content=body, extensions=extensions)
            try:
                return client.send(sent, stream=True, follow_redirects=False)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if not allowed:
                    raise

    def _ask(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> tuple[int, bytes]:
        """Send a request of the authorizer with the given headers only, and without following redirects."""

        def ask() -> tuple[int, bytes]:
            with self.errors():
                response = self._connect(method, url, headers, content, TOKEN_HOSTS)
                try:
                    if response.status_code in _TRANSIENT:
                        raise Transient(f"{httpx.URL(url).host} answers {response.status_code}", retry_after(response))
                    return response.status_code, read_document(response, self.address)
                finally:
                    response.close()

        return self.retries.run(ask)

    def _refusal(self, request: Request, response: httpx.Response) -> IngotError:
        status, (code, text) = response.status_code, error_of(response)
        said = f"{status}: {text}" if text else str(status)
        if status in _TRANSIENT or code in request.passing:
            return Transient(f"{self.address} answers {said}", retry_after(response))
        if status in (401, 403):
            what = f"'{request.scope.name}'" if request.scope.name else "this"
            login = f"docker login {self.address.netloc}"
            sent = self._authorizer.sent(request.scope.name)
            refused = Unauthenticated if status == 401 else PermissionDenied
            if sent is not None:
                return refused(
                    f"{self.address} refuses {sent} for {what} ({said}); log in with {login}, as a user who may "
                    f"{request.scope.verb}"
                )
            return refused(
                f"{self.address} refuses access to {what} ({said}); log in with {login}, as a user who may "
                f"{request.scope.verb}"
            )
        if status == 404:
            return NotFound(f"{self.address} does not have {httpx.URL(request.url).path} ({said})")
        if "HTTPS server" in text:
            return InvalidArgument(f"{self.address} requires HTTPS; write oci+https://{self.address.netloc}")
        if status > 500:
            return Unavailable(f"{self.address} answers {said}")
        return InvalidArgument(f"{self.address} refuses {request.method} {httpx.URL(request.url).path} ({said})")
