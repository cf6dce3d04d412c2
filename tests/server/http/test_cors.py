"""Requests of web pages, as browsers send them."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument
from tests import onnx_models
from tests.server.access.served import BODY, KINDS, make_key
from tests.server.apponly import serve_app
from tests.support import matrix

PAGE = "https://app.example"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
PATHS = ("/v2/models/affine/infer", "/v2/models/affine/versions/1/infer", "/v2/models", "/metrics")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def key(key_file: Path) -> str:
    return make_key(key_file, "infer")


@pytest.fixture(scope="module", params=matrix("fast", "fastapi"))
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, key_file: Path, key: str
) -> Iterator[httpx.Client]:
    """A client of a server whose pages are those of two origins."""
    model = str(onnx_models.affine(tmp_path_factory.mktemp("models")))
    origins = f"{PAGE}, http://localhost:3000"
    if request.param == "fastapi":
        with serve_app([model], 1 << 20, key_file, origins) as url, httpx.Client(base_url=url, trust_env=False) as made:
            yield made
        return
    settings: dict[str, Any] = {**KINDS[request.param], "auth": key_file, "cors_origin": origins}
    with (
        ingot.serve(model, http_port=0, grpc_port=0, **settings) as server,
        httpx.Client(base_url=server.http_url, trust_env=False) as made,
    ):
        yield made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
def test_a_preflight_needs_no_key(client: httpx.Client, path: str, origin: str) -> None:
    for _ in range(2):  # the second head is known
        answer = client.options(path, headers={"origin": origin, **ASKED})
        assert (answer.status_code, answer.content) == (200, b"")
        headers = answer.headers
        assert headers["access-control-allow-origin"] == origin
        assert headers["vary"] == "Origin"
        assert "POST" in headers["access-control-allow-methods"]
        assert {"authorization", "content-type"} <= set(headers["access-control-allow-headers"].split(", "))
        assert headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", f"{PAGE}.evil.example", "https://APP.example", f"{PAGE}, {PAGE}", "*"]
)
def test_pages_of_other_origins_get_no_permission(client: httpx.Client, key: str, origin: str) -> None:
    refused = client.options(PATHS[0], headers={"origin": origin, **ASKED})
    answer = client.post(PATHS[0], json=BODY, headers={"origin": origin, "authorization": f"Bearer {key}"})
    assert (refused.status_code, answer.status_code) == (403, 200)
    for headers in (refused.headers, answer.headers):
        assert not [name for name in headers if name.startswith("access-control")]


def test_a_page_can_read_answers_and_errors(client: httpx.Client, key: str) -> None:
    page = {"origin": PAGE}
    known = {**page, "authorization": f"Bearer {key}"}
    for answer, status in (
        (client.post(PATHS[0], json=BODY, headers=known), 200),
        (client.post(PATHS[0], json=BODY, headers=known), 200),
        (client.post(PATHS[0], content=b"{", headers=known), 400),
        (client.get("/v2/models", headers=known), 200),
        (client.get("/nowhere", headers=known), 404),
        (client.post(PATHS[0], json=BODY, headers=page), 401),
        (client.get("/metrics", headers=known), 403),
        (client.get("/v2/health/ready", headers=page), 200),
    ):
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "Inference-Header-Content-Length" in answer.headers["access-control-expose-headers"]


def test_what_is_not_a_preflight_needs_a_key(client: httpx.Client) -> None:
    assert client.options(PATHS[0], headers={"origin": PAGE}).status_code == 401
    assert client.options(PATHS[0], headers=ASKED).status_code == 401
    assert client.request("OPTIONS", PATHS[0], headers={"origin": PAGE, **ASKED}, content=b"x").status_code == 401


def test_requests_of_no_page_get_no_headers(client: httpx.Client, key: str) -> None:
    answer = client.post(PATHS[0], json=BODY, headers={"authorization": f"Bearer {key}"})
    assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


def test_all_pages_without_keys(folder: Path) -> None:
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, cors_origin="*") as server:
        answer = httpx.post(f"{server.http_url}{PATHS[0]}", json=BODY, headers={"origin": "null"}, trust_env=False)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "access-control-allow-credentials" not in answer.headers


def test_by_default_no_page_has_permission(folder: Path) -> None:
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0) as server:
        url = f"{server.http_url}{PATHS[0]}"
        assert httpx.options(url, headers={"origin": PAGE, **ASKED}, trust_env=False).status_code == 405
        answer = httpx.post(url, json=BODY, headers={"origin": PAGE}, trust_env=False)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("text", ["app.example", "https://app.example/", "https://a b", "null", "https://*.example"])
def test_what_is_not_an_origin_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"--cors-origin names '{text}'; write origins as")):
        ServerConfig.of({"cors_origin": text}, options=True)


def test_all_pages_with_keys_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="name the origins that may use them"):
        ServerConfig.of({"cors_origin": "*", "auth": "keys.toml"})


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that has the names models.example and a_b."""
    model = str(onnx_models.affine(tmp_path_factory.mktemp("models")))
    names = "models.example, a_b"
    with ingot.serve(model, http_port=0, grpc_port=0, allowed_host=names, cors_origin=PAGE) as server:
        yield server.http_url


ALLOWED = ["models.example", "MODELS.example.:8000", "a_b", "localhost:1", "x.localhost", "127.0.0.1", "[::1]:80"]
OTHERS = ["evil.example", "models.example.evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "127.1"]


@pytest.mark.one_case
@pytest.mark.parametrize("path", ["/v2/models/affine/infer", "/v2/health/live", "/v2/models"])
@pytest.mark.parametrize("name", [*ALLOWED, *OTHERS])
def test_only_listed_names_are_answered(named: str, name: str, path: str) -> None:
    """A page that makes its name resolve to this machine must not reach the server (DNS rebinding)."""
    with httpx.Client(base_url=named, trust_env=False) as client:
        for _ in range(2):  # the second head is known
            method, body = ("POST", BODY) if path.endswith("infer") else ("GET", None)
            answer = client.request(method, path, json=body, headers={"host": name})
            assert answer.status_code == (421 if name in OTHERS else 200)
            if name in OTHERS:
                assert "--allowed-host" in answer.json()["error"]
        preflight = client.options(path, headers={"host": name, "origin": PAGE, **ASKED})
        assert preflight.status_code == (421 if name in OTHERS else 200)


def test_a_whole_url_names_the_host_too(named: str) -> None:
    host, _, port = named.removeprefix("http://").partition(":")
    for target, status in (("http://evil.example/v2", b"421"), ("http://models.example/v2", b"200")):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: models.example\r\n\r\n".encode())
            assert connection.recv(1 << 16).split()[1] == status


@pytest.mark.parametrize("names", ["https://models.example", "models.example:80", "Models.example", "*", "a b"])
def test_names_that_are_not_hosts_are_refused(names: str) -> None:
    with pytest.raises(InvalidArgument, match="write names of hosts as"):
        ServerConfig.of({"allowed_host": names})


CHANGES = ["logging", "systemsharedmemory/unregister", "repository/models/affine/unload"]


@pytest.mark.parametrize("path", CHANGES)
def test_a_page_without_permission_changes_nothing(named: str, path: str) -> None:
    """A browser sends simple requests of any page; only their answers are hidden (CSRF)."""
    with httpx.Client(base_url=named, trust_env=False) as page:
        for origin in ("https://evil.example", "null"):
            answer = page.post(f"/v2/{path}", content=b"{}", headers={"content-type": "text/plain", "origin": origin})
            assert (answer.status_code, "--cors-origin" in answer.json()["error"]) == (403, True)
        headers: dict[str, str]
        for headers in ({}, {"origin": PAGE}):
            answer = page.post(f"/v2/{path}", content=b"{}", headers=headers)
            assert "--cors-origin" not in answer.text
