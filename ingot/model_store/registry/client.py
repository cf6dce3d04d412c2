"""HTTP to one registry: authorization, redirects, retries, and what its refusals mean to a user."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from http.cookiejar import DefaultCookiePolicy

import httpx

from ingot._version import __version__
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
from ingot.model_store.references import RegistryAddress, is_loopback
from ingot.model_store.registry.auth import Authorizer, Scope
from ingot.model_store.registry.bodies import MAX_TEXT, discard, error_of, read_document, retry_after
from ingot.model_store.registry.connections import Connections
from ingot.model_store.registry.credentials import Credentials
from ingot.model_store.registry.retries import Retries

MAX_REDIRECTS = 5
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))

Content = bytes | Callable[[], Iterable[bytes]] | None


@dataclass(frozen=True)
class Request:
    """One HTTP request. ``content`` is called anew for each time that the body is sent.

    ``passing`` are codes of refusals that may pass, beside those that may always.
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
    """A response that was read whole."""

    status: int
    headers: httpx.Headers
    content: bytes
    url: str


class Client:
    """HTTP to one registry, for many threads. Its connections are closed when nothing refers to it any more.

    Args:
        address: the registry.
        credentials: gives those for a repository by its name, or None for anonymous access.
        retries: how often a call is tried.
    """

    def __init__(
        self, address: RegistryAddress, credentials: Callable[[str], Credentials | None], retries: Retries | None = None
    ):
        self.address = address
        self.retries = retries or Retries()
        self.has_referrers = True
        """Whether the registry lists what is attached to a manifest; False once it is known not to."""
        self._connections = Connections()
        self._base = httpx.URL(address.url)
        self._authorizer = Authorizer(address, credentials, self._ask)
        self._http = httpx.Client(
            verify=_trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=None),
            # A compressed answer could be a bomb, and its digest would be another one.
            headers={"User-Agent": f"ingot/{__version__}", "Accept-Encoding": "identity"},
            # This machine's own servers are not reached through a proxy.
            mounts={f"all://{self._base.host}": None} if is_loopback(self._base.host) else None,
        )
        # Harbor takes a cookie for a browser and then asks for a form's token.
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        weakref.finalize(self, self._http.close)

    def url(self, path: str) -> str:
        """Return the address of something below ``/v2/``."""
        return str(self._base.copy_with(raw_path=f"/v2/{path}".encode()))

    def call(self, request: Request, allow: Collection[int] = ()) -> RegistryResponse:
        """Make a request, again and again if need be, and read the response.

        Args:
            request: it must do no harm to send it twice.
            allow: statuses that are answers too, beside 2xx.

        Raises:
            Unavailable: the registry cannot be reached, or fails.
            InvalidArgument: it refuses the request, or its answer makes no sense.
            NotFound: it has no such thing.
        """
        return self.retries.run(lambda: self.once(request, allow))

    def once(self, request: Request, allow: Collection[int] = ()) -> RegistryResponse:
        """Make a request once and read the response.

        Raises:
            Transient: it may succeed later.
        """
        response = self.open(request, allow)
        try:
            with self.errors():
                content = b"" if request.method == "HEAD" else read_document(response, self.address)
                return RegistryResponse(response.status_code, response.headers, content, str(response.url))
        finally:
            response.close()

    def open(self, request: Request, allow: Collection[int] = ()) -> httpx.Response:
        """Make a request once and return the response with its body unread; close it.

        Raises:
            Transient: it may succeed later.
        """
        with self.errors():
            response = self._follow(request)
            if response.is_success or response.status_code in allow:
                return response
            try:
                raise self._refusal(request, response)
            finally:
                response.close()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what goes wrong on the network into errors that name the registry.

        Raises:
            Cancelled: this thread's transfer is given up.
            Transient: it may pass.
            Unavailable: it will not.
            InvalidArgument: the two sides cannot understand each other.
        """
        transfer = Transfer.of_this_thread()
        try:
            if transfer is not None:
                transfer.on_cancel(self._connections.break_off)
                transfer.check()
            yield
        except httpx.TransportError as error:
            if transfer is not None and transfer.cancelled:
                raise Cancelled("the transfer was given up") from error
            raise _network_error(self.address, error) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidArgument(f"{self.address} leads to an address that makes no sense: {error}") from error

    def target(self, base: str, location: str) -> str:
        """Return where a registry's answer leads.

        Raises:
            InvalidArgument: it is not a place that a registry may lead to: HTTPS, or plain HTTP where that is allowed.
        """
        try:
            url = httpx.URL(base).join(location)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidArgument(f"{self.address} leads to an address that makes no sense") from error
        if not self.address.may_lead_to(url.scheme, url.host, url.userinfo.decode()):
            raise InvalidArgument(
                f"{self.address} leads to '{location[:MAX_TEXT]}', which is not followed: only HTTPS is, and "
                f"plain HTTP from oci+http://{self.address.netloc}"
            )
        return str(url)

    def _follow(self, request: Request) -> httpx.Response:
        url = request.url
        for _ in range(MAX_REDIRECTS + 1):
            response = self._authorized(request, url)
            if response.status_code not in _REDIRECTS:
                return response
            location = response.headers.get("Location", "")
            discard(response)
            if request.method not in ("GET", "HEAD"):
                raise InvalidArgument(
                    f"{self.address} sends what is written to it on to '{location[:MAX_TEXT]}'; use that address itself"
                )
            url = self.target(url, location)
        raise InvalidArgument(f"{self.address} leads from one address to the next, more than {MAX_REDIRECTS} times")

    def _authorized(self, request: Request, url: str) -> httpx.Response:
        target = httpx.URL(url)
        own = (target.scheme, target.host, target.port) == (self._base.scheme, self._base.host, self._base.port)
        if not own:  # storage that the registry leads to has its own authorization in the URL
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
        content = request.content() if callable(request.content) else request.content
        sent = self._http.build_request(
            request.method, url, headers=headers, content=content, extensions={"trace": self._connections.trace}
        )
        return self._http.send(sent, stream=True, follow_redirects=False)

    def _ask(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> tuple[int, bytes]:
        """Send a request of the authorizer's: nothing is added to it, and no redirect is followed."""

        def ask() -> tuple[int, bytes]:
            with self.errors():
                sent = self._http.build_request(
                    method, url, headers=dict(headers), content=content, extensions={"trace": self._connections.trace}
                )
                response = self._http.send(sent, stream=True, follow_redirects=False)
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
                    f"{self.address} refuses {sent} for {what} ({said}); {login} writes others, which must allow to "
                    f"{request.scope.verb}"
                )
            return refused(
                f"{self.address} refuses access to {what} ({said}); {login} writes the credentials, which must allow "
                f"to {request.scope.verb}"
            )
        if status == 404:
            return NotFound(f"{self.address} has no such thing ({said})")
        if "HTTPS server" in text:
            return InvalidArgument(f"{self.address} speaks HTTPS; write oci+https://{self.address.netloc}")
        if status > 500:
            return Unavailable(f"{self.address} answers {said}")
        return InvalidArgument(f"{self.address} refuses {request.method} {httpx.URL(request.url).path} ({said})")


@functools.cache
def _trusted(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return the authorities whose certificates are believed: httpx's, the system's, or those of the environment.

    Raises:
        InvalidArgument: what the environment names cannot be read.
    """
    try:
        context = httpx.create_ssl_context()
        context.load_default_certs()  # a company's own authority is among the system's, as Docker has it
    except OSError as error:
        raise InvalidArgument(f"SSL_CERT_FILE={file or ''} (or SSL_CERT_DIR={folder or ''}) cannot be read") from error
    return context


def _network_error(address: RegistryAddress, error: httpx.TransportError) -> IngotError:
    if isinstance(error, httpx.TimeoutException):
        return Transient(f"{address} does not answer; check the network, or try later")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return InvalidArgument(
                f"{address} cannot prove that it is that host: {cause.verify_message}; if it has its own certificate "
                "authority, SSL_CERT_FILE=authority.pem makes it known"
            )
        if isinstance(cause, ssl.SSLError) and address.url.startswith("https:"):
            return InvalidArgument(
                f"{address} does not speak HTTPS ({cause.reason}); if it speaks plain HTTP, write "
                f"oci+http://{address.netloc}"
            )
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return Unavailable(f"{address} cannot be found: there is no host of that name; check the spelling")
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectError):
        return Transient(f"{address} cannot be reached ({error}); check the address and the network")
    return Transient(f"the connection to {address} broke ({str(error) or type(error).__name__})")
