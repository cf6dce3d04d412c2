"""The certificate that the server shows, and its key: read and checked once, before a port opens."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import InvalidArgument

_REMEDY = (
    "give PEM files: --tls-cert the certificate and those that vouch for it, --tls-key its key without a password "
    "(in Python tls_cert, tls_key)"
)


@dataclass(frozen=True)
class Tls:
    """A certificate chain and its private key, as PEM."""

    cert: bytes
    key: bytes
    cert_file: Path
    key_file: Path

    @classmethod
    def load(cls, cert: Path | None, key: Path | None) -> Tls | None:
        """Return what two files hold, or None if neither is given.

        Raises:
            InvalidArgument: one of them is missing, cannot be read or is of another form, or they do not belong
                together.
        """
        if cert is None and key is None:
            return None
        if cert is None or key is None:
            given, missing = ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
            raise InvalidArgument(f"{given} is given without {missing}; TLS needs both: {_REMEDY}")
        found = cls(_read("--tls-cert", cert), _read("--tls-key", key), cert, key)
        found.context()
        return found

    def context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        """Return a context for a listener, which offers the ALPN ``protocols``.

        Raises:
            InvalidArgument: the files are of another form, or do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except ssl.SSLError as error:
            raise InvalidArgument(f"{_fault(self, error)}; {_REMEDY}") from error
        except OSError as error:
            raise InvalidArgument(f"{self.cert_file} or {self.key_file} cannot be read: {error.strerror}") from error
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


def _no_password() -> bytes:
    return b""  # else OpenSSL would ask for one at the terminal


def _fault(files: Tls, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key {files.key_file} does not belong to the certificate {files.cert_file}"
    if b"ENCRYPTED" in files.key:
        return f"the key {files.key_file} is encrypted"
    if b"-----BEGIN CERTIFICATE-----" not in files.cert:
        return f"{files.cert_file} holds no certificate"
    if b"PRIVATE KEY-----" not in files.key:
        return f"{files.key_file} holds no private key"
    return f"{files.cert_file} with {files.key_file}: {error.reason or error}"


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{option} {path} cannot be read: {error.strerror or error}") from error
