"""API keys: ``ingot_<id>_<secret>``. Only a hash is stored.

The secret has 256 random bits. It cannot be found by trying, however fast its hash is, so SHA-256 is enough. A slow
hash protects passwords that people choose; here it would only let anyone who sends wrong keys use up the server's time.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

SCOPES = ("infer", "manage", "metrics")
PREFIX = "ingot"
_ID_BYTES = 6
_SECRET_BYTES = 32
_HASH = "sha256:"
_TOKEN = re.compile(rf"{PREFIX}_([0-9a-f]{{{2 * _ID_BYTES}}})_[A-Za-z0-9_-]{{43}}")
_IN_TEXT = re.compile(rf"({PREFIX}_[0-9a-f]{{{2 * _ID_BYTES}}})_[A-Za-z0-9_-]+")
# Compared if there is no key with the id of a token, so that both cases take equally long.
_NO_HASH = _HASH + "0" * 64

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._@-]{0,62}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key as the file has it: everything but the key itself.

    Attributes:
        id: public; it names the key in the log.
        name: what it is for.
        hash: ``sha256:`` and the digest of the whole key.
        scopes: a subset of :data:`SCOPES`.
        created: when it was made; None if unknown.
        expires: None if it does not.
        revoked: None if it is not.
    """

    id: str
    name: str
    hash: str
    scopes: frozenset[str]
    created: datetime.datetime | None = None
    expires: datetime.datetime | None = None
    revoked: datetime.datetime | None = None

    def state(self, now: datetime.datetime) -> str:
        """Return ``active``, ``expired`` or ``revoked``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


def generate() -> tuple[str, str, str]:
    """Return a new key, its id and its hash."""
    identifier = secrets.token_hex(_ID_BYTES)
    token = f"{PREFIX}_{identifier}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return token, identifier, hash_of(token)


def hash_of(token: str) -> str:
    """Return the hash that is stored for a key."""
    return _HASH + hashlib.sha256(token.encode()).hexdigest()


def id_of(token: str) -> str | None:
    """Return the id in a text, or None if the text does not have the form of a key."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found else None


def hidden(text: str) -> str:
    """Return a text with the secrets of the keys in it replaced."""
    return _IN_TEXT.sub(r"\1_***", text)


def matches(token: str, key: ApiKey | None) -> bool:
    """Return whether a token is this key, in a time that does not depend on the token's characters."""
    return hmac.compare_digest(hash_of(token), _NO_HASH if key is None else key.hash)
