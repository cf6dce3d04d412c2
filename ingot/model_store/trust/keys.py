"""Keys that sign archives: ECDSA on the curves P-256, P-384 and P-521, in PEM files.

``cryptography`` is imported on first use, so that only signing and verifying pay for it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey

MAX_KEY_BYTES = 64 << 10
_CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
_KIND = "ECDSA on P-256, P-384 or P-521"
_REMEDY = "create one with ingot trust keygen"
_KINDS = {
    "CERTIFICATE": "a certificate",
    "PUBLIC KEY": "a public key",
    "RSA PUBLIC KEY": "a public RSA key",
    "PRIVATE KEY": "a private key",
    "EC PRIVATE KEY": "a private key",
    "ENCRYPTED PRIVATE KEY": "a private key",
    "RSA PRIVATE KEY": "a private RSA key",
    "OPENSSH PRIVATE KEY": "a private key of OpenSSH",
}


class PublicKey:
    """A key that verifies signatures."""

    def __init__(self, key: EllipticCurvePublicKey):
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self._key = key
        self.curve = _CURVES[key.curve.name]
        spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.keyid = hashlib.sha256(spki).hexdigest()
        self.pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    @classmethod
    def parse(cls, pem: bytes, where: str) -> PublicKey:
        """Parse a public key.

        Raises:
            InvalidArgument: it is something else; the message says what, and calls it ``where``.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            key = load_pem_public_key(pem)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise InvalidArgument(f"{where} is {_kind(pem)}, not a public key in PEM such as ingot.pub") from error
        return cls(_accepted(key, where))

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Return whether the owner of the private key signed this message."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message, _scheme(self.curve))
        except InvalidSignature:
            return False
        return True


class PrivateKey:
    """A key that signs archives."""

    def __init__(self, key: EllipticCurvePrivateKey):
        self._key = key
        self.public = PublicKey(key.public_key())

    @classmethod
    def generate(cls) -> PrivateKey:
        from cryptography.hazmat.primitives.asymmetric import ec

        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def parse(cls, pem: bytes, where: str, password: Callable[[], str]) -> PrivateKey:
        """Parse a private key.

        Args:
            pem: the file's content.
            where: its name in messages.
            password: called for the password of an encrypted key; an empty one means none.

        Raises:
            InvalidArgument: it is not a private key of the right kind, or the password is wrong or missing.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            try:
                key = load_pem_private_key(pem, None)
            except TypeError:  # it is encrypted
                secret = password()
                if not secret:
                    raise InvalidArgument(f"{where} is encrypted; set INGOT_KEY_PASSWORD to its password") from None
                key = load_pem_private_key(pem, secret.encode())
        except UnsupportedAlgorithm as error:
            raise InvalidArgument(f"{where} is {_kind(pem)} of an unsupported kind; {_REMEDY}") from error
        except ValueError as error:
            if b"ENCRYPTED" in pem:
                raise InvalidArgument(f"{where} cannot be decrypted: the password is wrong") from error
            raise InvalidArgument(f"{where} is {_kind(pem)}, not a private key in PEM such as ingot.key") from error
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

        if not isinstance(key, EllipticCurvePrivateKey):
            raise InvalidArgument(f"{where} is a private key of another kind than {_KIND}; {_REMEDY}")
        _accepted(key.public_key(), where)
        return cls(key)

    def pem(self, password: str = "") -> bytes:
        """Return the key as PKCS#8, encrypted if there is a password."""
        from cryptography.hazmat.primitives import serialization

        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password.encode())
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

    def sign(self, message: bytes) -> bytes:
        """Return a signature in DER, deterministic if the library supports that."""
        from cryptography.exceptions import UnsupportedAlgorithm

        try:
            return self._key.sign(message, _scheme(self.public.curve, deterministic=True))
        except UnsupportedAlgorithm:  # OpenSSL older than 3.2
            return self._key.sign(message, _scheme(self.public.curve))


def read_file(path: Path, *, trusted: bool = False, limit: int = MAX_KEY_BYTES) -> bytes:
    """Return the content of a small file: a key, a policy or a bundle of signatures.

    Args:
        path: the file.
        trusted: the file decides what is trusted, so other users must not be able to write it.
        limit: largest accepted number of bytes.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is too large, not a regular file, or unreadable; or every user can write it.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise InvalidArgument(f"{path} is not a file")
            if trusted and mode & stat.S_IWOTH:
                raise InvalidArgument(f"{path} can be changed by every user of this machine; chmod o-w {path}")
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                content = stream.read(limit + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > limit:
        raise InvalidArgument(f"{path} has over {limit >> 10} KiB, the limit for such a file")
    return content


def _accepted(key: object, where: str) -> EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return key
    raise InvalidArgument(f"{where} is a key of another kind than {_KIND}; {_REMEDY}")


def _scheme(curve: str, *, deterministic: bool = False) -> ECDSA:
    """Return the signature scheme of a curve, with the hash of the same strength."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    strengths: dict[str, hashes.HashAlgorithm] = {
        "P-256": hashes.SHA256(),
        "P-384": hashes.SHA384(),
        "P-521": hashes.SHA512(),
    }
    return ECDSA(strengths[curve], deterministic_signing=deterministic)


def _kind(pem: bytes) -> str:
    """Return the apparent kind of a file, by its first line."""
    found = re.match(rb"\s*-----BEGIN ([A-Z0-9 ]{1,40})-----", pem)
    return _KINDS.get(found[1].decode(), "something else") if found else "not a PEM file"
