"""Maps a request's key or certificate to a client and its rights, or to a refusal.

A decision is remembered by the value of the header until the file changes or a key expires, so that a client's next
requests cost one lookup; connections remember it with their request heads.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from pathlib import Path

from ingot.errors import PermissionDenied, Unauthenticated
from ingot.protocol.keys import BoundedCache
from ingot.runtime import Metrics
from ingot.server.access import keys
from ingot.server.access.audit import AuditLog
from ingot.server.access.auth_file import AuthFile
from ingot.server.access.grants import Grant, Refusal
from ingot.server.access.peers import Certificate, Peer

INFER, MANAGE, METRICS = "infer", "manage", "metrics"
# What a client certificate allows if no file says otherwise.
_ALL = frozenset((INFER, METRICS))
# Longer values are refused unread: a token of an identity provider has 1 to 3 KiB.
MAX_HEADER_BYTES = 8 << 10
_MAX_GRANTS = 1024
_REMEDY = "send 'authorization: Bearer KEY'"


class Gate:
    """The access rules of a server's listeners.

    Args:
        path: the file of ``--auth``; None admits every client certificate to all but management.
        metrics: where refusals are counted.
        audit: where they are logged.
        by_certificate: whether clients have certificates.
        scope: the right that every request needs; empty if that depends on the request.

    Attributes:
        epoch: grows whenever an earlier decision may be wrong.
        changed: callbacks that :meth:`forget` runs.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: the file is invalid.
    """

    def __init__(
        self,
        path: Path | None,
        metrics: Metrics,
        audit: AuditLog | None = None,
        *,
        by_certificate: bool = False,
        scope: str = "",
    ):
        self._path = path
        self._scope = scope
        self.by_certificate = by_certificate
        self._file = self.load()
        self._refused = metrics.auth_refused
        self._audit = audit
        self._grants: BoundedCache[bytes, Grant] = BoundedCache(_MAX_GRANTS)
        self._soonest = math.inf
        self.epoch = 1
        self.changed: list[Callable[[], None]] = []

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the rules come from."""
        return () if self._path is None else (self._path, *self._file.files)

    def load(self) -> AuthFile:
        """Read the file again, in any thread; pass the result to :meth:`replace`."""
        return AuthFile(keys={}) if self._path is None else AuthFile.load(self._path)

    def replace(self, file: AuthFile) -> None:
        """Use the rules of another file from now on."""
        self._file = file
        self.forget()

    def forget(self) -> None:
        """Forget all decisions."""
        self._grants.clear()
        self._soonest = math.inf
        self.epoch += 1
        for notify in self.changed:
            notify()

    def expire(self) -> None:
        """Forget all decisions if one has expired; called twice a second."""
        if time.time() >= self._soonest:
            self.forget()

    def check(self, authorization: bytes | None, scope: str, peer: Peer) -> Grant | Refusal:
        """Decide on a request. Pass a refusal to :meth:`count`.

        Args:
            authorization: the value of its header; None if it has none.
            scope: the right that it needs.
            peer: the client's end of the connection.
        """
        scope = self._scope or scope
        outcome = self._identify(authorization, peer.certificate)
        if isinstance(outcome, Grant) and scope not in outcome.scopes:
            outcome = _lacks(outcome, scope)
        return outcome

    def count(self, refusal: Refusal, protocol: str, target: str, peer: Peer) -> None:
        """Count and log a refused request; the arguments are those of :meth:`AuditLog.refused`."""
        self._refused.labels(refusal.reason).inc()
        if self._audit is not None:
            self._audit.refused(refusal, protocol, target, peer)

    def _identify(self, authorization: bytes | None, certificate: Certificate | None) -> Grant | Refusal:
        if certificate is not None and (authorization is None or self._path is None):
            return self._certificate(certificate)
        if authorization is None:
            return _missing()
        # The hash of the lookup is keyed at random for each process, so its time reveals nothing about other keys.
        grant = self._grants.get(authorization)
        if grant is not None and time.time() < grant.expires:
            return grant
        outcome = self._read(authorization)
        if isinstance(outcome, Grant):
            self._grants.keep(authorization, outcome)
            self._soonest = min(self._soonest, outcome.expires)
        return outcome

    def _certificate(self, certificate: Certificate) -> Grant | Refusal:
        client = f"certificate:{certificate.title}"
        scopes = _ALL if self._path is None else self._file.scopes_of(certificate)
        if not scopes:
            text = f"the file of --auth has no entry for the {client}; add a table [[certificate]], or send a key"
            return Refusal(PermissionDenied(text), "certificate", 'Bearer realm="ingot"', client)
        if certificate.expires <= time.time():  # since the connection was opened
            return Refusal(Unauthenticated(f"the {client} has expired"), "expired", client=client)
        self._soonest = min(self._soonest, certificate.expires)
        return Grant(client, scopes, certificate.expires)

    def _read(self, authorization: bytes) -> Grant | Refusal:
        kind, _, value = authorization[:MAX_HEADER_BYTES].partition(b" ")
        if kind.lower() != b"bearer" or len(authorization) > MAX_HEADER_BYTES or not value.isascii():
            text = f"the header 'authorization' is not a bearer token of at most {MAX_HEADER_BYTES} bytes; {_REMEDY}"
            return Refusal(Unauthenticated(text), "malformed")
        token = value.strip().decode("ascii")
        issuer = self._file.issuer
        # An API key contains no dot.
        return issuer.check(token) if issuer is not None and token.count(".") == 2 else self._key(token)

    def _key(self, token: str) -> Grant | Refusal:
        identifier = keys.id_of(token)
        key = None if identifier is None else self._file.keys.get(identifier)
        if not keys.matches(token, key) or key is None:
            return Refusal(Unauthenticated("the key is not known to this server"), "unknown")
        client = f"key:{key.id}"
        state = key.state(datetime.datetime.now(datetime.UTC))
        if state != "active":  # the holder of the whole key may know
            return Refusal(Unauthenticated(f"the key {key.id} is {state}; use another"), state, client=client)
        return Grant(client, key.scopes, math.inf if key.expires is None else key.expires.timestamp())


def _missing() -> Refusal:
    text = f"this server needs a key: {_REMEDY} (ingot server keys create makes one)"
    return Refusal(Unauthenticated(text), "missing", 'Bearer realm="ingot"')


def _lacks(grant: Grant, scope: str) -> Refusal:
    has = ", ".join(sorted(grant.scopes)) or "none"
    text = f"{grant.client} lacks the scope '{scope}'; it has: {has}"
    challenge = f'Bearer realm="ingot", error="insufficient_scope", scope="{scope}"'
    return Refusal(PermissionDenied(text), "scope", challenge, grant.client)
