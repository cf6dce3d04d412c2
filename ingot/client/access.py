"""Addresses and credentials of clients, and the errors of connections and responses."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ingot.errors import InternalError, InvalidArgument, TooLarge, Unreached

if TYPE_CHECKING:
    import grpc

MAX_RESPONSE_MB = 1024
"""Default limit of a response of inference, which the caller can change."""
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a document of another form may raise; a deep one ends in RecursionError."""
DOCUMENT_BYTES = 64 << 20
"""Limit of metadata, statistics, metrics and responses of a management listener."""


def address(url: str) -> tuple[str, str]:
    """Return a URL's scheme, and its host with the port.

    Raises:
        InvalidArgument: it is not a server's address.
    """
    from ingot.protocol import arguments  # which needs half a second, and Access does not

    forms = "write http://host:port or grpc://host:port"
    try:
        parts = urlsplit(arguments.text("url", url))
        port = parts.port
    except ValueError as error:  # of urlsplit's
        raise InvalidArgument(f"'{url}' is not a server's address: {error}; {forms}") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise InvalidArgument(f"'{url}' is not a server's address; {forms}")
    if port is None and parts.scheme.startswith("grpc"):
        raise InvalidArgument(
            f"'{url}' names no port; write {parts.scheme}://host:port, such as {parts.scheme}://{parts.netloc}:8001"
        )
    return parts.scheme, parts.netloc


def _bearer(key: str) -> str:
    """Return a key that a header can carry.

    Raises:
        InvalidArgument: it has another form; the message does not contain it.
    """
    key = key.strip() if isinstance(key, str) else ""
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise InvalidArgument("the key is not a text of printable ASCII characters without blanks")
    return key


class Access:
    """A client's key and certificate, and the authorities that it trusts."""

    def __init__(
        self, key: str | None, ca_file: str | Path | None, cert: str | Path | None, cert_key: str | Path | None
    ):
        if (cert is None) != (cert_key is None):
            raise InvalidArgument("give both files of the client's certificate: cert_file and cert_key_file")
        self.headers = {} if key is None else {"authorization": f"Bearer {_bearer(key)}"}
        self._ca_file = ca_file
        self._pair = None if cert is None or cert_key is None else (cert, cert_key)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Name the files in the error, if one cannot be used.

        Raises:
            InvalidArgument: a file cannot be read, or is not of the right kind.
        """
        try:
            yield
        except (OSError, ssl.SSLError) as error:
            files = " or ".join(str(file) for file in (self._ca_file, *(self._pair or ())) if file is not None)
            raise InvalidArgument(f"{files} cannot be used as a file of certificates: {error}") from error

    def context(self) -> ssl.SSLContext | bool:
        """Return the TLS context by which httpx verifies the server."""
        if self._ca_file is None and self._pair is None:
            return True
        context = ssl.create_default_context(cafile=self._ca_file)
        if self._pair is not None:
            context.load_cert_chain(*self._pair)
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the same for gRPC."""
        import grpc

        roots = None if self._ca_file is None else Path(self._ca_file).read_bytes()
        cert, key = (None, None) if self._pair is None else (Path(file).read_bytes() for file in self._pair)
        return grpc.ssl_channel_credentials(roots, key, cert)


@contextlib.contextmanager
def parsing(url: str) -> Iterator[None]:
    """Report a response that cannot be read as the server's error, not the caller's."""
    try:
        yield
    except (InvalidArgument, *MALFORMED) as error:
        raise InternalError(f"{url} sent a response that is not of the Open Inference Protocol: {error}") from error


def too_large(place: str, limit: int) -> TooLarge:
    """Return the error for a response of more bytes than the limit."""
    remedy = "" if limit == DOCUMENT_BYTES else "; to accept it, raise --max-response-mb, in Python max_response_mb"
    return TooLarge(f"{place} sent an answer that has more than {limit >> 20} MiB{remedy}")


def unreachable(url: str, why: str) -> Unreached:
    """Return the error for a connection that failed, with a remedy.

    gRPC reports the cause only in its text, so the text is read, for both protocols.
    """
    if "http1.x server" in why:
        return Unreached(
            f"{url} is a server's HTTP port; write {url.replace('grpc', 'http', 1)}, or give its gRPC port"
        )
    if re.search("mismatch|Hostname Verification", why):
        remedy = "ask by a name or address that the server's certificate is made for"
    elif re.search("self.signed|issuer", why):
        remedy = "--ca-file, in Python ca_file, must be the certificate that vouches for the server's"
    elif "CERTIFICATE_VERIFY_FAILED" in why:
        remedy = "the server needs another certificate"
    elif re.search("refused|not known|resolving", why):
        remedy = "is it running?"
    else:
        other = "HTTP" if url.startswith("grpc") else "gRPC"
        remedy = f"is it running, is TLS as the server has it (https://, grpcs://), or is it the {other} port?"
    return Unreached(f"no server answers at {url}: {why}; {remedy}")
