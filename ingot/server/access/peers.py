"""The other end of a connection: its address, and the identity in its certificate."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from dataclasses import dataclass

_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Certificate:
    """A client's certificate, which the TLS library has verified.

    Attributes:
        subject: in the form of RFC 4514, such as ``CN=batch,O=Example``.
        names: its alternative names, such as ``DNS:batch.example`` and ``URI:spiffe://example/batch``.
        expires: in seconds since 1970.
    """

    subject: str
    names: frozenset[str]
    expires: float

    @property
    def title(self) -> str:
        """Its name in messages, the log and limits; long ones are cut, and end with a hash of the whole."""
        name = self.subject or min(self.names, default="a certificate without names")
        if len(name) <= _MAX_NAME:
            return name
        return f"{name[:_MAX_NAME]}...{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Peer:
    """The client of a connection. ``address`` is ``host:port``; ``certificate`` is None if it sent none."""

    address: str = ""
    certificate: Certificate | None = None


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """Return the other end of a transport."""
    address = transport.get_extra_info("peername")
    shown = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "")
    encrypted: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    der = None if encrypted is None else encrypted.getpeercert(binary_form=True)
    return Peer(shown, None if der is None else certificate_of(der))


def certificate_of(der: bytes) -> Certificate | None:
    """Return the names and times of a certificate; None if its names cannot be read."""
    from cryptography import x509  # only with client certificates

    try:
        found = x509.load_der_x509_certificate(der)
        subject = found.subject.rfc4514_string()
        expires = found.not_valid_after_utc.timestamp()
        try:
            extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return Certificate(subject, frozenset(), expires)
        kinds: dict[type, str] = {
            x509.DNSName: "DNS",
            x509.UniformResourceIdentifier: "URI",
            x509.IPAddress: "IP",
            x509.RFC822Name: "email",
        }
        names = [f"{kinds[type(name)]}:{name.value}" for name in extension.value if type(name) in kinds]
    except ValueError:
        return None
    return Certificate(subject, frozenset(names), expires)
