"""Tokens of an identity provider: JSON Web Tokens, checked with PyJWT against a file of public keys.

The algorithm of a token must be that of its key, and only signatures with public keys are accepted: a token that names
``none``, or HMAC with the public key as its secret, matches no key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from ingot.errors import InvalidArgument, Unauthenticated, missing_package
from ingot.model_store.trust.keys import read_file
from ingot.server.access.grants import Grant, Refusal
from ingot.server.access.keys import SCOPES

if TYPE_CHECKING:
    from jwt import PyJWK

Algorithm = Literal["RS256", "ES256", "EdDSA"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
MAX_JWKS_BYTES = 1 << 20
MAX_KEYS = 1000
_MAX_SUBJECT = 200
_RSA_BITS = (2048, 8192)
# Members of a private key, and of a symmetric one (RFC 7518, section 6).
_PRIVATE = ("d", "p", "q", "dp", "dq", "qi", "oth", "k")


@dataclass(frozen=True, kw_only=True)
class Issuer:
    """An identity provider whose tokens are accepted.

    Attributes:
        name: the required value of the claim ``iss``.
        audience: what the claim ``aud`` must be or contain.
        keys: by key id; a token without one is accepted if there is one key.
        claim: the name of the claim with its rights: texts in a list, or separated by blanks.
        scopes: the rights that each text stands for.
        leeway: seconds by which clocks may differ.
    """

    name: str
    audience: str
    keys: Mapping[str, PyJWK]
    claim: str
    scopes: Mapping[str, frozenset[str]]
    leeway: int

    def check(self, token: str) -> Grant | Refusal:
        """Return the rights of a token's holder."""
        jwt = _library("a token")
        try:
            claims = self._claims(jwt, token)
            subject = str(claims.get("sub") or claims.get("client_id") or claims.get("azp") or "without a subject")
            expires = float(claims["exp"]) + self.leeway
        except jwt.ExpiredSignatureError:
            return Refusal(Unauthenticated("the token has expired; get another from its issuer"), "expired")
        except jwt.InvalidSignatureError:
            return _refused("no key of its issuer has signed it")
        # Nested arrays end in RecursionError, and 1e999 as a time in OverflowError.
        except (jwt.DecodeError, ValueError, TypeError, OverflowError, RecursionError):
            return _refused("it is malformed")
        except jwt.PyJWTError as error:
            return _refused(str(error)[:_MAX_SUBJECT])
        return Grant(f"token:{subject[:_MAX_SUBJECT]}", self._rights(claims.get(self.claim)), expires)

    def _claims(self, jwt: ModuleType, token: str) -> dict[str, Any]:
        header = jwt.get_unverified_header(token)
        if "crit" in header:  # extensions that the token's meaning depends on; none is known
            raise jwt.InvalidTokenError("its header has 'crit'")
        key = self._key(header.get("kid"))
        if key is None:
            raise jwt.InvalidTokenError("its key id is not one of the issuer's keys")
        if header.get("alg") != key.algorithm_name:
            raise jwt.InvalidTokenError("its algorithm is not that of its key")
        claims: dict[str, Any] = jwt.decode(
            token,
            key.key,
            algorithms=[key.algorithm_name],
            audience=self.audience,
            issuer=self.name,
            leeway=self.leeway,
            options={"require": ["exp", "iss", "aud"]},
        )
        return claims

    def _key(self, identifier: object) -> PyJWK | None:
        if identifier is None and len(self.keys) == 1:
            return next(iter(self.keys.values()))
        return self.keys.get(identifier) if isinstance(identifier, str) else None

    def _rights(self, value: object) -> frozenset[str]:
        texts = value.split() if isinstance(value, str) else value if isinstance(value, list) else ()
        return frozenset(
            scope for text in texts if isinstance(text, str) for scope in self.scopes.get(text, frozenset())
        )


def _refused(why: str) -> Refusal:
    return Refusal(Unauthenticated(f"the token is not accepted: {why}"), "token")


def own_scopes() -> dict[str, frozenset[str]]:
    """Return the rights that texts stand for if the file does not say: those of the same name."""
    return {scope: frozenset((scope,)) for scope in SCOPES}


def load_keys(path: Path, algorithms: tuple[str, ...]) -> dict[str, PyJWK]:
    """Read a JSON Web Key Set; keys of other kinds than the algorithms' are left out.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a key set, has no key of these kinds, or holds secrets.
        Unsupported: PyJWT is not installed.
    """
    _library("the table [jwt] of --auth")
    content = read_file(path, trusted=True, limit=MAX_JWKS_BYTES)
    try:
        found = json.loads(content)["keys"]
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found) or len(found) > MAX_KEYS:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidArgument(f"{path} is not a JSON Web Key Set: an object with up to {MAX_KEYS} 'keys'") from None
    keys: dict[str, PyJWK] = {}
    for number, item in enumerate(found, 1):
        if any(name in item for name in _PRIVATE):
            raise InvalidArgument(f"{path}: key {number} is private or symmetric; give the issuer's public keys only")
        algorithm = _algorithm_of(item)
        if algorithm not in algorithms or item.get("use", "sig") != "sig":
            continue
        identifier = item.get("kid", "")
        if not isinstance(identifier, str) or identifier in keys:
            raise InvalidArgument(f"{path}: key {number} has the same 'kid' as another, or none that is text")
        keys[identifier] = _parse(item, algorithm, f"{path}: key {number}")
    if not keys or ("" in keys and len(keys) > 1):
        fault = "several keys, of which one has no 'kid'" if keys else f"no key for {', '.join(algorithms)}"
        raise InvalidArgument(f"{path} has {fault}")
    return keys


def _algorithm_of(item: Mapping[str, Any]) -> str | None:
    """Return the one algorithm that a key is accepted for; None if there is none."""
    kind = str(item.get("kty")), item.get("crv")
    found = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}.get(kind)
    stated = item.get("alg", found)
    return found if stated in (found, "Ed25519" if found == "EdDSA" else found) else None


def _parse(item: dict[str, Any], algorithm: str, where: str) -> PyJWK:
    jwt = _library("the table [jwt] of --auth")
    try:
        key: PyJWK = jwt.PyJWK(item, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise InvalidArgument(f"{where} is not a public key for {algorithm}") from error
    bits = getattr(key.key, "key_size", _RSA_BITS[0])
    if algorithm == "RS256" and not _RSA_BITS[0] <= bits <= _RSA_BITS[1]:
        raise InvalidArgument(f"{where} has {bits} bits; RSA keys have {_RSA_BITS[0]} to {_RSA_BITS[1]}")
    return key


def _library(purpose: str) -> ModuleType:
    try:
        import jwt
    except ImportError as error:
        raise missing_package("PyJWT", purpose, "auth") from error
    return jwt
