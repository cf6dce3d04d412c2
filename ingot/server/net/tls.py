"""Certificates of the listeners: read, checked, and read again when their files change."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArgument

_REMEDY = (
    "give PEM files: --tls-cert the certificate and those that vouch for it, --tls-key its key without a password "
    "(in Python tls_cert, tls_key)"
)
# RFC 9113, section 9.2.2: in TLS 1.2 only ephemeral keys and authenticated encryption.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:!PSK:!aNULL"


# The client sent no certificate or a wrong one; it did not accept ours; there is no common version or cipher; the
# client speaks HTTP without TLS.
REASONS = ("certificate", "client", "protocol", "plain")
_PLAIN_ERROR = (
    b'{"error":"this port speaks HTTPS or gRPC over TLS, and the request came without TLS; use https:// or grpcs://"}'
)
_PLAIN_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_PLAIN_ERROR), _PLAIN_ERROR)
)
_HTTP2 = b"PRI"  # the first bytes of HTTP/2
_CERTIFICATE = ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED")


@dataclass(frozen=True)
class Content:
    """A consistent snapshot of the files, as PEM.

    Attributes:
        cert: the chain.
        key: its private key.
        authorities: authorities for client certificates; None if none are requested.
        contexts: one for each listener, made from these files.
    """

    cert: bytes
    key: bytes
    authorities: bytes | None
    contexts: tuple[ssl.SSLContext, ...] = ()


class Tls:
    """A certificate chain and its private key, and the authorities of client certificates.

    Args:
        cert_file: PEM, the server's certificate first.
        key_file: PEM, without a password.
        client_ca: PEM of the authorities that sign the clients' certificates; None asks clients for none.

    Attributes:
        content: of the files, as they were last used.
        refused: called when a handshake fails, with one of :data:`REASONS`; not by gRPC's own server.

    Raises:
        InvalidArgument: a file is missing, cannot be read or has another format, or certificate and key do not match.
    """

    def __init__(self, cert_file: Path, key_file: Path, client_ca: Path | None = None):
        self.cert_file = cert_file
        self.key_file = key_file
        self.client_ca = client_ca
        self.refused: Callable[[str], None] = _ignore
        self._live: list[tuple[LiveContext, Sequence[str]]] = []
        self.content = self.read()

    @classmethod
    def load(cls, cert: Path | None, key: Path | None, client_ca: Path | None = None) -> Tls | None:
        """Return the TLS context, or None if no file is given.

        Raises:
            InvalidArgument: as the constructor; or only some of the files are given.
        """
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None and key is None:
            raise InvalidArgument(f"--tls-client-ca is given without --tls-cert and --tls-key; {_REMEDY}")
        if cert is None or key is None:
            given, missing = ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
            raise InvalidArgument(f"{given} is given without {missing}; TLS needs both: {_REMEDY}")
        return cls(cert, key, client_ca)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it was read from."""
        return tuple(filter(None, (self.cert_file, self.key_file, self.client_ca)))

    def read(self) -> Content:
        """Read the files and check them, in any thread; pass the result to :meth:`use`.

        Raises:
            InvalidArgument: they cannot be used.
        """
        authorities = None if self.client_ca is None else _read("--tls-client-ca", self.client_ca)
        content = Content(_read("--tls-cert", self.cert_file), _read("--tls-key", self.key_file), authorities)
        self._context(content, ())
        made = [self._context(content, protocols) for _, protocols in self._live]
        return dataclasses.replace(content, contexts=tuple(made))

    def use(self, content: Content) -> None:
        """Use a content for new connections; those that are open keep theirs."""
        for (live, _), context in zip(self._live, content.contexts, strict=True):
            live.current = context
        self.content = content

    def context(self, protocols: Sequence[str]) -> LiveContext:
        """Return a context for a listener, which offers the ALPN ``protocols`` and follows :meth:`use`."""
        live = LiveContext(self._context(self.content, protocols))
        self._live.append((live, protocols))
        return live

    def _context(self, content: Content, protocols: Sequence[str]) -> ssl.SSLContext:
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.files = self
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except ssl.SSLError as error:
            raise InvalidArgument(f"{self._fault(content, error)}; {_REMEDY}") from error
        except OSError as error:
            raise InvalidArgument(f"{self.cert_file} or {self.key_file} cannot be read: {error.strerror}") from error
        if content.authorities is not None:
            try:
                context.load_verify_locations(cadata=content.authorities.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise InvalidArgument(f"--tls-client-ca {self.client_ca} holds no certificates in PEM") from error
            context.verify_mode = ssl.CERT_REQUIRED
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    def _fault(self, content: Content, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key {self.key_file} does not belong to the certificate {self.cert_file}"
        if b"ENCRYPTED" in content.key:
            return f"the key {self.key_file} is encrypted"
        if b"-----BEGIN CERTIFICATE-----" not in content.cert:
            return f"{self.cert_file} holds no certificate"
        if b"PRIVATE KEY-----" not in content.key:
            return f"{self.key_file} holds no private key"
        return f"{self.cert_file} with {self.key_file}: {error.reason or error}"


class _Context(ssl.SSLContext):
    """The context of one content of the files."""

    files: Tls

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        connection = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        if isinstance(connection, _Handshake):
            connection.incoming, connection.outgoing = incoming, outgoing
        return connection


class _Handshake(ssl.SSLObject):
    """A connection that reports why its handshake failed, and answers HTTP without TLS.

    Attributes:
        incoming: bytes from the client that are not read yet.
        outgoing: bytes that the event loop sends to the client.
    """

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    _began = False
    _plain = _answered = False  # whether the client speaks HTTP without TLS; and has its answer

    def do_handshake(self) -> None:
        if not self._began and self.incoming.pending:
            self._began = True
            self._begin()
        if self._answered:
            # Discard the rest of the request: closing now could lose the answer. The client closes, or the time limit
            # of handshakes does.
            self.incoming.read()
            raise ssl.SSLWantReadError
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._report("plain" if self._plain else _reason(error))
            raise

    def _begin(self) -> None:
        """Answer a client whose first byte begins an HTTP method: a TLS record begins with 20 to 24.

        HTTP/2 fails as any other handshake, as gRPC's clients connect again without a pause after a GOAWAY.
        """
        received = self.incoming.read()
        self.incoming.write(received)
        self._plain = received[:1].isupper()
        self._answered = self._plain and not received.startswith(_HTTP2)
        if self._answered:
            self._report("plain")
            self.outgoing.write(_PLAIN_ANSWER)  # which the event loop sends

    def _report(self, reason: str) -> None:
        if isinstance(self.context, _Context):
            self.context.files.refused(reason)


_Context.sslobject_class = _Handshake


def _reason(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if reason in _CERTIFICATE:
        return "certificate"
    return "client" if "ALERT" in reason else "protocol"


def _ignore(_: str) -> None:
    """Report nothing."""


class LiveContext(ssl.SSLContext):
    """A context that passes each new connection to ``current``, as a context cannot forget an authority or a key."""

    current: ssl.SSLContext

    def __new__(cls, current: ssl.SSLContext) -> LiveContext:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made.current = current
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)


def _no_password() -> bytes:
    return b""  # else OpenSSL would ask for one at the terminal


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{option} {path} cannot be read: {error.strerror or error}") from error
