"""The outcome of a check: what a client may do, or why it is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.errors import IngotError


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a client.

    Attributes:
        client: names the client for fairness and the log: ``key:3f9a...``.
        scopes: its rights.
        expires: the time in seconds since 1970 after which it has none.
    """

    client: str
    scopes: frozenset[str]
    expires: float = math.inf


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused.

    Attributes:
        error: for the client: Unauthenticated or PermissionDenied.
        reason: one word, for the metric and the log.
        challenge: the value of ``WWW-Authenticate``.
        client: as that of a grant; empty if it is unknown.
    """

    error: IngotError
    reason: str
    challenge: str = 'Bearer realm="ingot", error="invalid_token"'
    client: str = ""
