"""Logging in as registries ask for it, and keeping credentials from other hosts."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from urllib.parse import parse_qs, urlsplit

import pytest

from ingot.errors import InvalidArgument, Unauthenticated, Unavailable
from ingot.model_store import RegistryAddress
from ingot.model_store.registry import Credentials, Registry, Retries
from ingot.model_store.registry.auth import Authorizer, Scope, parse_challenges
from tests.model_store.registry.fake import Fake
from tests.model_store.registry.proxy import Asked, Reply, Server, serving
from tests.model_store.samples import archive
from tests.support import RunIngot, refused, succeeded

MODEL = archive(weights=(b"w" * 5000,))
QUICK = Retries(tries=2, first=0.001)
BASIC = "Basic " + base64.b64encode(b"ann:correct horse").decode()


class Tokens(Fake):
    """A registry that accepts tokens, and the server that issues them, in one.

    Each token is good for one scope and, if ``uses`` is set, for so many requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.put(MODEL, "1")
        self.before.append(self._guard)
        self.realm = ""
        self.given: dict[str, list[str]] = {}
        self.left: dict[str, int] = {}
        self.uses = 1_000_000
        self.public = False
        self.answer = {"token": "{}", "expires_in": 300}
        self.lock = threading.Lock()

    def _guard(self, asked: Asked) -> Reply | None:
        if asked.path.startswith("/token"):
            return self._give(asked)
        name = asked.path.split("/")[2]
        scope = f"repository:{name}:{'pull' if asked.method in ('GET', 'HEAD') else 'pull,push'}"
        token = asked.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.lock:
            if scope in self.given.get(token, []) and self.left[token]:
                self.left[token] -= 1
                return None
        challenge = f'Bearer realm="{self.realm}",service="the registry",scope="{scope}"'
        return Reply(401, {"WWW-Authenticate": challenge})

    def _give(self, asked: Asked) -> Reply:
        query = parse_qs(asked.body.decode() if asked.method == "POST" else urlsplit(asked.path).query)
        if asked.method == "POST":
            allowed = query["refresh_token"] == ["refresh"] and query["grant_type"] == ["refresh_token"]
        else:
            allowed = self.public or asked.headers.get("Authorization") == BASIC
        if not allowed or query["service"] != ["the registry"]:
            return Reply(401)
        with self.lock:
            token = f"token{len(self.given)}"
            self.given[token] = " ".join(query["scope"]).split()
            self.left[token] = self.uses
        return Reply(200, body=json.dumps({**self.answer, "token": token}).encode())


@pytest.fixture
def fake() -> Tokens:
    return Tokens()


@pytest.fixture
def server(fake: Tokens) -> Iterator[Server]:
    with serving(answer=fake) as server:
        fake.realm = f"http://127.0.0.1:{server.port}/token"
        yield server


def place(server: Server, credentials: Credentials | None = None) -> Registry:
    return Registry(server.address, credentials=credentials or Credentials("ann", "correct horse"), retries=QUICK)


class TestTokens:
    def test_one_token_per_scope_is_requested_and_kept(self, server: Server, fake: Tokens) -> None:
        registry = place(server)
        registry.push(archive(b"new"), "tiny:2")
        registry.find("tiny:1")[0].verify()
        assert sorted(scope for scopes in fake.given.values() for scope in scopes) == [
            "repository:tiny:pull",
            "repository:tiny:pull,push",
        ]

    def test_the_password_goes_to_the_token_server_alone(self, server: Server) -> None:
        place(server).find("tiny:1")
        told = {item.path.split("?")[0] for item in server.log if item.headers.get("Authorization") == BASIC}
        assert told == {"/token"}

    def test_an_expired_token_is_replaced(self, server: Server, fake: Tokens) -> None:
        fake.uses = 3
        place(server).find("tiny:1")[0].verify()
        assert len(fake.given) > 2

    @pytest.mark.usefixtures("without_logins")
    def test_public_archives_need_no_password(self, server: Server, fake: Tokens) -> None:
        fake.public = True
        Registry(server.address, retries=QUICK).find("tiny:1")[0].verify()
        assert not any("Basic" in item.headers.get("Authorization", "") for item in server.log)

    def test_a_refresh_token_is_posted(self, server: Server, fake: Tokens) -> None:
        place(server, Credentials("", "refresh", identity=True)).find("tiny:1")
        assert {item.method for item in server.asked("/token")} == {"POST"}
        assert not any("refresh" in item.path for item in server.log)

    def test_refused_credentials_are_reported_and_not_shown(self, server: Server) -> None:
        with pytest.raises(Unauthenticated, match=r"guards .* refuses the credentials \(401\); log in") as caught:
            place(server, Credentials("ann", "hunter2")).find("tiny:1")
        assert "hunter2" not in repr(caught.value)

    def test_a_refused_token_is_requested_only_once_more(self, server: Server, fake: Tokens) -> None:
        fake.uses = 0
        with pytest.raises(Unauthenticated, match="refuses the credentials for 'tiny'"):
            place(server).find("tiny:1")
        assert len(server.asked("/manifests/1")) == 2

    @pytest.mark.parametrize(
        "realm",
        [
            "http://tokens.example/token",
            "file:///etc/passwd",
            "",
            "http://[",
            "ftp://127.0.0.1/",
            "http://a:b@127.0.0.1/",
        ],
    )
    def test_no_password_goes_to_a_realm_that_is_not_https(self, server: Server, fake: Tokens, realm: str) -> None:
        fake.realm = realm
        with pytest.raises(InvalidArgument, match="which is not HTTPS; no credentials were sent"):
            place(server).find("tiny:1")
        assert not server.asked("/token")

    @pytest.mark.parametrize(
        "realm",
        ["https://tokens.example/token", "https://127.0.0.1.tokens.example/", "https://127.0.0.2/", "https://[::1]/"],
    )
    def test_no_password_goes_to_another_host(self, server: Server, fake: Tokens, realm: str) -> None:
        fake.realm = realm
        with pytest.raises(InvalidArgument, match="which is another host; no credentials were sent"):
            place(server).find("tiny:1")
        with pytest.raises(InvalidArgument, match="which is another host; no credentials were sent"):
            place(server, Credentials("", "refresh", identity=True)).find("tiny:1")

    def test_a_listed_host_gets_the_password(
        self, server: Server, fake: Tokens, run_ingot: RunIngot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        port = fake.realm.partition("//")[2].partition(":")[2]
        fake.realm = f"http://localhost:{port}"
        logins = {"auths": {f"127.0.0.1:{server.port}": {"auth": BASIC.removeprefix("Basic ")}}}
        (tmp_path / "auth.json").write_text(json.dumps(logins))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        message = refused(run_ingot("inspect", f"{server.address}/tiny:1"))
        assert message.endswith("allow it with INGOT_TOKEN_HOSTS=localhost (several with commas between)")
        assert not server.asked("/token")
        monkeypatch.setenv("INGOT_TOKEN_HOSTS", "other.example, localhost")
        succeeded(run_ingot("inspect", f"{server.address}/tiny:1"))
        assert server.asked("/token")

    @pytest.mark.usefixtures("without_logins")
    def test_another_host_is_asked_without_a_password(self, server: Server, fake: Tokens) -> None:
        fake.public = True
        fake.realm = fake.realm.replace("127.0.0.1", "localhost")
        Registry(server.address, retries=QUICK).find("tiny:1")

    @pytest.mark.parametrize(
        ("registry", "host"),
        [
            ("oci://docker.io", "auth.docker.io"),
            ("oci://registry-1.docker.io", "auth.docker.io"),
            ("oci://registry.gitlab.com", "gitlab.com"),
        ],
    )
    def test_large_registries_log_in_where_they_always_did(self, registry: str, host: str) -> None:
        asked: list[str] = []

        def ask(method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> tuple[int, bytes]:
            asked.append(url)
            return 200, b'{"token": "t"}'

        authorizer = Authorizer(RegistryAddress.parse(registry), lambda _: Credentials("ann", "x"), ask)
        challenge = f'Bearer realm="https://{host}/token",service="s"'
        assert authorizer.renew([challenge], Scope("tiny"), None) == "Bearer t"
        assert asked[0].startswith(f"https://{host}/token?")

    @pytest.mark.parametrize("answer", [{"token": ""}, {"token": "a\r\nb"}, {"token": 3}, {"token": "ä"}])
    def test_an_answer_without_a_token_is_reported(self, server: Server, fake: Tokens, answer: object) -> None:
        fake.before.insert(
            0, lambda asked: Reply(200, body=json.dumps(answer).encode()) if "/token" in asked.path else None
        )
        with pytest.raises(InvalidArgument, match="answers 200 without a token"):
            place(server).find("tiny:1")

    def test_a_token_server_that_fails_is_retried(self, server: Server, fake: Tokens) -> None:
        answers = iter([503, 503])
        fake.before.insert(0, lambda asked: Reply(next(answers)) if asked.path.startswith("/token") else None)
        with pytest.raises(Unavailable, match=r"127.0.0.1 answers 503 \(tried 2 times\)"):
            place(server).find("tiny:1")


class TestChallenges:
    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            (['Basic realm="a, b"'], [("basic", {"realm": "a, b"})]),
            (["Basic"], [("basic", {})]),
            (
                ['bearer Realm="x",SERVICE=y,scope="a:b:c,d"'],
                [("bearer", {"realm": "x", "service": "y", "scope": "a:b:c,d"})],
            ),
            (['Basic realm="x", Bearer realm="y"'], [("basic", {"realm": "x"}), ("bearer", {"realm": "y"})]),
            (['Basic realm="x"', 'Bearer realm="y"'], [("basic", {"realm": "x"}), ("bearer", {"realm": "y"})]),
            (['Bearer realm="a\\"b"'], [("bearer", {"realm": 'a"b'})]),
            (["", '="', "realm=x", "\x00"], []),
        ],
    )
    def test_they_are_read_as_servers_write_them(
        self, headers: list[str], expected: list[tuple[str, dict[str, str]]]
    ) -> None:
        assert parse_challenges(headers) == expected

    def test_a_long_one_is_read_in_no_time(self) -> None:
        parse_challenges(["a" * 1_000_000, "a-" * 500_000, 'a="' + "\\" * 1_000_000])


class TestTLS:
    @pytest.fixture
    def address(self, certificate: Path) -> Iterator[str]:
        fake = Fake()
        fake.put(MODEL, "1")
        context = SSLContext(PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        with serving(answer=fake, context=context) as server:
            yield server.address.replace("oci:", "oci+https:")

    def test_an_unknown_authority_is_not_believed(self, address: str) -> None:
        with pytest.raises(InvalidArgument, match=r"has an untrusted certificate: .*SSL_CERT_FILE=authority\.pem"):
            Registry(address, retries=QUICK).find("tiny:1")

    def test_one_of_the_environment_is(self, address: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        Registry(address, retries=QUICK).find("tiny:1")[0].verify()

    def test_an_environment_that_names_no_file_is_reported(
        self, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        with pytest.raises(InvalidArgument, match=r"SSL_CERT_FILE=.*none\.pem .* cannot be read"):
            Registry(address)

    def test_plain_http_is_refused_with_the_right_spelling(self, address: str) -> None:
        with pytest.raises(Unavailable, match="broke"):
            Registry(address.replace("oci+https:", "oci+http:"), retries=QUICK).find("tiny:1")
