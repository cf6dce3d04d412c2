"""Tokens of an identity provider, and forged ones."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

import ingot
from ingot.errors import InvalidArgument, NotFound, Unauthenticated, Unsupported
from ingot.runtime import Metrics
from ingot.server.access.auth_file import AuthFile
from ingot.server.access.gate import MAX_HEADER_BYTES, Gate
from ingot.server.access.grants import Grant, Refusal
from ingot.server.access.peers import Peer
from tests.server.access.served import make_key, served
from tests.server.outside import wait_until

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
SIGNERS: dict[str, tuple[str, Any]] = {"r": ("RS256", RSA), "e": ("ES256", EC), "d": ("EdDSA", ED)}
TABLE = '[jwt]\nissuer = "https://id.example"\naudience = "ingot"\njwks = "jwks.json"\n'


def jwk(algorithm: Any, key: Any, **members: Any) -> dict[str, Any]:
    return {**algorithm.to_jwk(key, as_dict=True), **members}


def public_keys() -> list[dict[str, Any]]:
    return [
        jwk(RSAAlgorithm, RSA.public_key(), kid="r", use="sig", alg="RS256"),
        jwk(ECAlgorithm, EC.public_key(), kid="e"),
        jwk(OKPAlgorithm, ED.public_key(), kid="d"),
    ]


@pytest.fixture
def auth(tmp_path: Path) -> Path:
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": public_keys()}))
    path = tmp_path / "auth.toml"
    path.write_text(TABLE)
    return path


def claims(**other: Any) -> dict[str, Any]:
    now = int(time.time())
    found = {"iss": "https://id.example", "aud": "ingot", "exp": now + 3600, "sub": "me", "scope": "infer", **other}
    return {name: value for name, value in found.items() if value is not None}


def signed(kid: str = "r", headers: dict[str, Any] | None = None, **other: Any) -> str:
    algorithm, key = SIGNERS[kid]
    return jwt.encode(claims(**other), key, algorithm, {"kid": kid, **(headers or {})})


def raw_signed(body: str) -> str:
    return jwt.PyJWS().encode(body.encode(), RSA, "RS256", {"kid": "r"})


def encoded(content: Any) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def check(auth: Path, token: str, scope: str = "infer") -> Grant | Refusal:
    return Gate(auth, Metrics()).check(f"Bearer {token}".encode(), scope, Peer())


def accepted(auth: Path, token: str) -> Grant:
    outcome = check(auth, token)
    assert isinstance(outcome, Grant), outcome
    return outcome


def refused(auth: Path, token: str) -> str:
    outcome = check(auth, token)
    assert isinstance(outcome, Refusal)
    assert outcome.reason in ("token", "expired", "unknown")
    assert isinstance(outcome.error, Unauthenticated)
    return str(outcome.error)


@pytest.mark.parametrize("kid", SIGNERS)
def test_a_token_of_each_algorithm_is_accepted(auth: Path, kid: str) -> None:
    token = signed(kid, scope="infer other metrics")
    grant = accepted(auth, token)
    assert (grant.client, sorted(grant.scopes)) == ("token:me", ["infer", "metrics"])
    assert 3600 < grant.expires - time.time() <= 3631
    accepted(auth, signed(kid, aud=["other", "ingot"]))


def test_rights_come_from_the_claim_that_the_file_names(auth: Path) -> None:
    auth.write_text(TABLE + 'scope_claim = "roles"\n[jwt.scopes]\n"models.use" = ["infer"]\nops = ["metrics"]\n')
    assert accepted(auth, signed(roles=["models.use", 3, None])).scopes == {"infer"}
    for claim in ("infer", ["infer"], None, 3, {"infer": 1}):  # the names of scopes mean nothing now
        outcome = check(auth, signed(roles=claim))
        assert isinstance(outcome, Refusal)
        assert outcome.reason == "scope"


def forged() -> dict[str, str]:
    """Return tokens that must all be refused."""
    body = encoded(claims())
    pem = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    stated = json.dumps(public_keys()[0]).encode()

    def by_hmac(secret: bytes) -> str:
        text = f"{encoded({'alg': 'HS256', 'kid': 'r'})}.{body}"
        return f"{text}.{encoded(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"

    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    head, payload, signature = signed().split(".")
    more = encoded(claims(scope="infer metrics manage"))
    own = jwk(RSAAlgorithm, other.public_key())
    return {
        "alg none": f"{encoded({'alg': 'none', 'kid': 'r'})}.{body}.",
        "alg nOnE": f"{encoded({'alg': 'nOnE', 'kid': 'r'})}.{body}.",
        "alg none with a signature": f"{encoded({'alg': 'none', 'kid': 'r'})}.{body}.{signature}",
        "no alg": f"{encoded({'kid': 'r'})}.{body}.{signature}",
        "no signature": f"{head}.{payload}.",
        "HS256 with the public key as PEM": by_hmac(pem),
        "HS256 with the public key as JWK": by_hmac(stated),
        "HS256 with nothing": by_hmac(b""),
        "another payload": f"{head}.{more}.{signature}",
        "another key": jwt.encode(claims(), other, "RS256", {"kid": "r"}),
        "its own key in the header": jwt.encode(claims(), other, "RS256", {"kid": "r", "jwk": own}),
        "a URL of keys": jwt.encode(claims(), other, "RS256", {"kid": "r", "jku": "http://127.0.0.1:1/"}),
        "the id of another key": jwt.encode(claims(), EC, "ES256", {"kid": "r"}),
        "an unknown key id": jwt.encode(claims(), RSA, "RS256", {"kid": "x"}),
        "a path as key id": jwt.encode(claims(), RSA, "RS256", {"kid": "../../../../dev/null"}),
        "an SQL key id": jwt.encode(claims(), RSA, "RS256", {"kid": "' or 1=1 --"}),
        "a list as key id": f"{encoded({'alg': 'RS256', 'kid': ['r']})}.{payload}.{signature}",
        "no key id among several keys": jwt.encode(claims(), RSA, "RS256"),
        "RS384 of the right key": jwt.encode(claims(), RSA, "RS384", {"kid": "r"}),
        "PS256 of the right key": jwt.encode(claims(), RSA, "PS256", {"kid": "r"}),
        "crit": signed(headers={"crit": ["b64"], "b64": False}),
        "another audience": signed(aud="other"),
        "no audience": signed(aud=None),
        "another issuer": signed(iss="https://id.example.org"),
        "no issuer": signed(iss=None),
        "a list of issuers": raw_signed(json.dumps(claims(iss=["https://id.example"]))),
        "no expiry": signed(exp=None),
        "an expiry that is text": signed(exp="tomorrow"),
        "not valid yet": signed(nbf=int(time.time()) + 600),
        "expired": signed(exp=int(time.time()) - 60),
        "nested": f"{encoded(b'[' * 3000)}.{payload}.{signature}",
        "nested payload": f"{head}.{encoded(b'[' * 3000)}.{signature}",
        "a header that is a list": f"{encoded(['RS256'])}.{payload}.{signature}",
        "not base64": f"{head}.{payload}.!!!",
        "empty": "..",
    }


FORGED = forged()


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_token_is_refused(auth: Path, name: str) -> None:
    text = refused(auth, FORGED[name])
    assert len(text) < 300
    assert "line" not in text


def test_an_ecdsa_signature_of_zeros_is_refused(auth: Path) -> None:
    """CVE-2022-21449 of Java: r = s = 0 verified under every key."""
    head, payload, _ = signed("e").split(".")
    assert "no key of its issuer has signed it" in refused(auth, f"{head}.{payload}.{encoded(bytes(64))}")


def test_times_that_no_number_can_hold_are_refused(auth: Path) -> None:
    for exp in ("1e999", "NaN", "1e400", "-1"):
        refused(auth, raw_signed(json.dumps(claims(exp=0)).replace('"exp": 0', f'"exp": {exp}')))


def test_clocks_may_differ_by_the_leeway(auth: Path) -> None:
    now = int(time.time())
    accepted(auth, signed(exp=now - 10))
    accepted(auth, signed(nbf=now + 10))
    auth.write_text(TABLE + "leeway = 0\n")
    refused(auth, signed(exp=now - 1))


def test_an_oversized_token_is_refused_unread(auth: Path) -> None:
    outcome = check(auth, signed(pad="x" * MAX_HEADER_BYTES))
    assert isinstance(outcome, Refusal)
    assert outcome.reason == "malformed"


def test_an_algorithm_that_the_file_does_not_name_is_refused(auth: Path) -> None:
    auth.write_text(TABLE + 'algorithms = ["ES256"]\n')
    accepted(auth, signed("e"))
    refused(auth, signed("r"))


KEYS = {
    "a symmetric key": ([{"kty": "oct", "k": "AAAA", "kid": "x"}], "key 1 is private or symmetric"),
    "a private key": ([jwk(RSAAlgorithm, RSA, kid="x")], "key 1 is private or symmetric"),
    "two keys with one id": ([public_keys()[0], {**public_keys()[1], "kid": "r"}], "has the same 'kid'"),
    "keys without ids": ([{**key, "kid": ""} for key in public_keys()[:1]] + public_keys()[1:], "has no 'kid'"),
    "no key": ([], "no key for RS256, ES256, EdDSA"),
    "keys for encryption": ([{**public_keys()[0], "use": "enc"}], "no key for"),
    "a broken key": ([{"kty": "RSA", "n": "AQAB", "kid": "x"}], "key 1 is not a public key for RS256"),
    "a weak key": (
        [jwk(RSAAlgorithm, rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key(), kid="x")],
        "key 1 has 1024 bits",
    ),
    "a list": (None, "is not a JSON Web Key Set"),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_set_of_keys_that_cannot_be_used_is_named(auth: Path, name: str) -> None:
    keys, says = KEYS[name]
    content = [] if keys is None else {"keys": keys}
    (auth.parent / "jwks.json").write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        AuthFile.load(auth)


def test_other_faults_of_the_table_are_named(auth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for more, says in (
        ('algorithms = ["HS256"]', "jwt algorithms"),
        ("leeway = 9000", "jwt leeway"),
        ("x = 1", "jwt x"),
    ):
        auth.write_text(TABLE + more)
        with pytest.raises(InvalidArgument, match=says):
            AuthFile.load(auth)
    auth.write_text(TABLE)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jwt", None)
        with pytest.raises(Unsupported, match=re.escape("pip install 'ingot-serve[auth]'")):
            AuthFile.load(auth)
    (auth.parent / "jwks.json").unlink()
    with pytest.raises(NotFound, match=r"jwks\.json"):
        AuthFile.load(auth)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["fast", pytest.param("grpcio", marks=pytest.mark.matrix)])
def test_both_protocols_accept_tokens_and_new_keys_of_the_issuer(auth: Path, tmp_path: Path, kind: str) -> None:
    key = make_key(auth, "metrics")
    with served(kind, tmp_path, auth) as server:
        for token in (signed("r"), signed("e")):
            assert server.infer(token).status_code == 200
            assert server.infer_grpc(token).model_name == "affine"
        assert server.infer(FORGED["alg none"]).status_code == 401
        with ingot.Client(str(server.grpc), key=FORGED["another key"]) as client, pytest.raises(Unauthenticated):
            client.metadata("affine")
        assert server.refused("token", key) >= 2
        assert server.get("/metrics", key).status_code == 200  # keys work too
        old = signed("r")
        (auth.parent / "jwks.json").write_text(json.dumps({"keys": public_keys()[1:]}))
        wait_until(lambda: server.infer(old).status_code == 401)
        assert server.infer(signed("e")).status_code == 200
