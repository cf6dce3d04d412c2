"""The open connections of a client: a cancelled transfer does not wait for them, and slow ones are given up."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import httpx

from ingot import foreign
from ingot._version import __version__
from ingot.errors import IngotError, InvalidArgument, Transient, Unavailable
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.references import RegistryAddress

CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
_OPENED = (".connect_tcp.complete", ".start_tls.complete")
_RESPONSE = ".receive_response_headers.started"

# The least bytes of a response per this many seconds of waiting; the server requires the same of request bodies. The
# time to the first byte is limited separately, as a registry may have to check what it received.
PACE_BYTES = 1 << 20
PACE_SECONDS = 60.0


class _Pace:
    """The bytes of one response, and the time spent waiting for them."""

    def __init__(self, where: str):
        self._where = where
        self.begin()

    def begin(self) -> None:
        self._waited, self._received = 0.0, 0

    def add(self, waited: float, received: int) -> None:
        """Count a read.

        Raises:
            Transient: the response arrives too slowly.
        """
        self._waited += waited
        self._received += received
        if self._waited >= PACE_SECONDS:
            if self._received < PACE_BYTES:
                raise Transient(
                    f"{self._where} sends less than {PACE_BYTES >> 20} MiB a minute; check the network, or use another "
                    "registry. The same command continues a transfer"
                )
            self.begin()


class Connections:
    """The sockets of an httpx client, reported by its ``trace`` extension. Thread-safe.

    Args:
        registry: its name in messages.
    """

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Register a connection that was opened for this thread's request, or note that its response begins."""
        if event.endswith(_RESPONSE):
            self._thread.begins = True
        if not event.endswith(_OPENED):
            return
        stream = info["return_value"]
        stream.read = self._paced(stream.read, stream.get_extra_info("server_addr"))
        opened = stream.get_extra_info("socket")
        if isinstance(opened, socket.socket):
            with self._lock:
                self._sockets.add(opened)
            transfer = Transfer.of_this_thread()
            if transfer is not None and transfer.cancelled:  # cancelled meanwhile
                self.break_off()

    def _paced(self, read: Callable[..., bytes], peer: Any) -> Callable[..., bytes]:
        """Return a stream's ``read`` that limits how slowly a response arrives.

        A server that sends one byte a minute would stay within a limit for each read.
        """
        where = f"{self._registry} (at {peer[0]})" if peer else self._registry
        pace = _Pace(where)

        def paced(max_bytes: int, timeout: float | None = None) -> bytes:
            began = time.monotonic()
            content = read(max_bytes, timeout)
            if getattr(self._thread, "begins", False):
                self._thread.begins = False
                pace.begin()
            else:
                pace.add(time.monotonic() - began, len(content))
            return content

        return paced

    def break_off(self) -> None:
        """Interrupt every thread that waits on a connection, with a network error."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            # Closing would not wake blocked threads; shutdown does, but fails on sockets that are closed. TLS closure
            # alerts are skipped, since another thread is using the connection.
            with contextlib.suppress(OSError, ValueError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)


def open_http(**options: Any) -> httpx.Client:
    """Return a client for a registry; ``options`` are those of httpx.

    Raises:
        InvalidArgument: the certificates that the environment names cannot be read.
    """
    client = httpx.Client(
        verify=_trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=None),
        # A compressed response could be a decompression bomb, and its digest would not match.
        headers={"User-Agent": f"ingot/{__version__}", "Accept-Encoding": "identity"},
        **options,
    )
    # Harbor treats a client with cookies as a browser, and requires a CSRF token:
    # https://github.com/goharbor/harbor/issues/12676
    client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return client


@functools.cache
def _trusted(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return the trusted certificate authorities: those of httpx, of the system, or of the environment.

    Raises:
        InvalidArgument: the paths in the environment cannot be read.
    """
    try:
        context = httpx.create_ssl_context()
        context.load_default_certs()  # include a company's own authority in the system's, as Docker does
    except OSError as error:
        raise InvalidArgument(f"SSL_CERT_FILE={file or ''} (or SSL_CERT_DIR={folder or ''}) cannot be read") from error
    return context


def network_error(address: RegistryAddress, error: httpx.TransportError) -> IngotError:
    """Return the error to raise for a failed connection to a registry, with its cause and the remedy."""
    if isinstance(error, httpx.TimeoutException):
        return Transient(f"{address} does not answer; check the network, or try later")
    for cause in foreign.causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return InvalidArgument(
                f"{address} has an untrusted certificate: {cause.verify_message}; if it has its own certificate "
                "authority, set SSL_CERT_FILE=authority.pem"
            )
        if isinstance(cause, ssl.SSLError) and address.url.startswith("https:"):
            return InvalidArgument(
                f"{address} does not support HTTPS ({cause.reason}); if it uses plain HTTP, write "
                f"oci+http://{address.netloc}"
            )
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return Unavailable(f"{address} cannot be found: the host name does not resolve; check the spelling")
    if isinstance(error, httpx.ConnectError):
        return Transient(f"{address} cannot be reached ({error}); check the address and the network")
    return Transient(f"the connection to {address} broke ({str(error) or type(error).__name__})")
