"""API keys over both protocols: every server enforces the same rules."""

from __future__ import annotations

import functools
import json
import queue
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.runtime import Metrics
from ingot.server.access import keys
from ingot.server.access.auth_file import AuthFile, revoke_key
from ingot.server.access.gate import MAX_HEADER_BYTES, Gate
from ingot.server.access.grants import Refusal
from ingot.server.access.peers import Peer
from ingot.server.plane.operations import OPERATIONS
from tests.server.access.served import BODY, DAY, NOW, Served, make_key, served
from tests.server.http.test_fast_path import connect
from tests.server.outside import affine, wait_until
from tests.support import matrix

pytestmark = pytest.mark.one_case  # of each test; the others by `make test-matrix`

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def auth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auth") / "keys.toml"


@pytest.fixture(scope="module")
def tokens(auth: Path) -> dict[str, str]:
    """Keys by what they allow."""
    made = {
        "infer": make_key(auth, "infer"),
        "metrics": make_key(auth, "metrics"),
        "manage": make_key(auth, "manage"),
        "expired": make_key(auth, "infer", expires=NOW - DAY),
        "revoked": make_key(auth, "infer"),
    }
    found = AuthFile.load(auth).keys[made["revoked"].split("_")[1]]
    revoke_key(auth, found, NOW)
    return made


@pytest.fixture(scope="module", params=matrix("fast", "fastapi", "grpcio"))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, auth: Path, tokens: dict[str, str]
) -> Iterator[Served]:
    with served(request.param, tmp_path_factory.mktemp("models"), auth) as running:
        yield running


@pytest.fixture
def rpc(server: Served) -> Served:
    if server.grpc is None:
        pytest.skip("FastAPI has no gRPC")
    return server


def status_of(server: Served, key: str | None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        server.infer_grpc(key)
    error: Any = caught.value
    return error.code(), error.details()


@pytest.mark.matrix
def test_every_path_but_health_needs_a_key(server: Served) -> None:
    """The page is open too: its files are the same for everyone."""
    opened = {"/v2/health/live", "/v2/health/ready", "/", "/ui", "/ui/{file}"}
    assert opened == {route.split()[1] for each in OPERATIONS if not each.scope for route in each.http}
    routes = [route.split() for operation in OPERATIONS for route in operation.http]
    with httpx.Client(base_url=server.http, trust_env=False, timeout=60) as client:
        for method, path in [*routes, ("GET", "/nowhere"), ("GET", "/openapi.json")]:
            given = path.format(model="affine", version="1", region="r", repository="r", file="page.js")
            answer = client.request(method, given)
            if path in opened:
                assert answer.status_code in (200, 307, 404), path
            else:
                challenge = (answer.status_code, answer.headers["www-authenticate"])
                assert challenge == (401, 'Bearer realm="ingot"'), path
                assert "send 'authorization: Bearer KEY'" in answer.text


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health_needs_no_key(server: Served, path: str) -> None:
    assert server.get(path).status_code == 200
    assert httpx.head(f"{server.http}{path}", trust_env=False).status_code == 200


def test_inference_needs_a_key_of_its_scope(server: Served, tokens: dict[str, str]) -> None:
    assert server.infer().status_code == 401
    answer = server.infer(tokens["infer"])
    assert answer.json()["outputs"][0]["data"] == [3, 5, 7]
    assert server.get("/v2/models/affine", tokens["infer"]).status_code == 200
    refused = server.infer(tokens["metrics"])
    assert refused.status_code == 403
    assert refused.headers["www-authenticate"].endswith('error="insufficient_scope", scope="infer"')
    assert refused.json()["error"].endswith("lacks the scope 'infer'; it has: metrics")


# How a router may spell the path of the metrics.
@pytest.mark.parametrize("path", ["/metrics", "/%6detrics", "/metrics%0A", "/metrics?x=1"])
def test_metrics_need_their_scope_in_every_spelling(server: Served, tokens: dict[str, str], path: str) -> None:
    assert server.get(path, tokens["infer"]).status_code == 403
    assert server.get(path, tokens["manage"]).status_code == 403
    assert "ingot_requests_total" in server.get(path, tokens["metrics"]).text


@pytest.mark.matrix
def test_keys_that_are_not_valid_are_refused_and_counted(server: Served, tokens: dict[str, str]) -> None:
    key = tokens["infer"]
    wrong = f"{key[:-4]}{'AAAA' if key[-4:] != 'AAAA' else 'BBBB'}"
    other = f"ingot_{'0' * 12}_{key[-43:]}"
    before = server.refused("unknown", tokens["metrics"])
    for text in (wrong, other, key + "x", key[:-1], "x", keys.hash_of(key), key.upper()):
        answer = server.infer(text)
        assert (answer.status_code, answer.json()["error"]) == (401, "the key is not known to this server")
        assert answer.headers["www-authenticate"] == 'Bearer realm="ingot", error="invalid_token"'
    assert server.refused("unknown", tokens["metrics"]) == before + 7
    for state in ("expired", "revoked"):
        assert f"is {state}; use another" in server.infer(tokens[state]).json()["error"]


@pytest.mark.parametrize("value", ["Basic eDp5", "Bearer", "bearer" + " x" * 5000, "Token x"])
def test_a_header_that_is_not_a_key_is_refused(server: Served, value: str) -> None:
    answer = server.infer(authorization=value)
    assert answer.status_code == 401
    assert len(answer.content) < 200


def test_two_headers_are_refused(server: Served, tokens: dict[str, str]) -> None:
    lines = f"Authorization: Bearer {tokens['infer']}\r\n" * 2
    assert b" 400 " in raw(server, f"GET /v2 HTTP/1.1\r\nHost: x\r\n{lines}\r\n").partition(b"\r\n")[0]


def raw(server: Served, request: str) -> bytes:
    with connect(server.http) as connection:
        connection.sendall(request.encode())
        return connection.recv(1 << 16)


# Spellings of a path that a router or a proxy may read in another way.
TARGETS = {
    "*": 401,
    "//metrics": 401,
    "/v2/health/live/../../metrics": 401,
    "/v2/health/live/..%2f..%2f..%2fmetrics": 401,
    "/v2/health/live%00": 401,
    "/v2/health/live;/metrics": 401,
    "http://x/metrics": 401,
    "http://x/v2/health/live": 200,
    "/v2/health/live?/metrics": 200,
}


@pytest.mark.parametrize("target", TARGETS)
def test_no_spelling_of_a_path_avoids_the_check(server: Served, target: str) -> None:
    method = "OPTIONS" if target == "*" else "GET"
    head = raw(server, f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert int(head.split()[1]) == TARGETS[target]


@pytest.mark.parametrize("framing", ["length", "chunks", "upgrade"])
def test_the_body_of_a_refused_request_is_not_read_as_another(
    server: Served, tokens: dict[str, str], framing: str
) -> None:
    hidden = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tokens['metrics']}\r\n\r\n"
    head = "POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\n"
    requests = {
        "length": f"{head}Content-Length: {len(hidden)}\r\n\r\n{hidden}",
        "chunks": f"{head}Transfer-Encoding: chunked\r\n\r\n{len(hidden):x}\r\n{hidden}\r\n0\r\n\r\n",
        "upgrade": f"{head}Upgrade: h2c\r\nContent-Length: {len(hidden)}\r\n\r\n{hidden}",
    }
    with connect(server.http) as connection:
        connection.sendall(requests[framing].encode())
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"ingot_requests_total" not in answer


def test_grpc_needs_the_same_keys(rpc: Served, tokens: dict[str, str]) -> None:
    assert rpc.infer_grpc(tokens["infer"]).model_name == "affine"
    assert status_of(rpc, None) == (UNAUTHENTICATED, rpc.infer().json()["error"])
    assert status_of(rpc, tokens["infer"] + "x") == (UNAUTHENTICATED, "the key is not known to this server")
    assert status_of(rpc, tokens["metrics"])[0] == DENIED
    assert status_of(rpc, tokens["revoked"])[0] == UNAUTHENTICATED
    metadata = pb.ModelMetadataRequest(name="affine")
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        rpc.call(f"{proto_codec.SERVICE}/ModelMetadata", metadata, pb.ModelMetadataResponse)
    assert rpc.call(f"{proto_codec.SERVICE}/ModelMetadata", metadata, pb.ModelMetadataResponse, tokens["infer"]).inputs


def test_a_key_that_is_sent_twice_is_refused(rpc: Served, tokens: dict[str, str]) -> None:
    assert rpc.grpc is not None
    twice = [("authorization", f"Bearer {tokens['infer']}")] * 2
    with grpc.insecure_channel(rpc.grpc.removeprefix("grpc://")) as channel:
        ask: Any = channel.unary_unary(f"/{proto_codec.SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            ask(affine([1, 2, 3]).SerializeToString(), timeout=60, metadata=twice)


def test_reflection_needs_a_key(rpc: Served, tokens: dict[str, str]) -> None:
    assert rpc.grpc is not None
    with grpc.insecure_channel(rpc.grpc.removeprefix("grpc://")) as channel:
        ask: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        question = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            next(ask(iter([question]), timeout=60))
        key = [("authorization", f"Bearer {tokens['infer']}")]
        assert proto_codec.SERVICE.encode() in next(ask(iter([question]), timeout=60, metadata=key))


def test_health_over_grpc_needs_no_key(rpc: Served) -> None:
    assert rpc.call(f"{proto_codec.SERVICE}/ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse).live
    assert rpc.call(f"{proto_codec.SERVICE}/ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready
    check = health_pb2.HealthCheckRequest()
    assert rpc.call("grpc.health.v1.Health/Check", check, health_pb2.HealthCheckResponse).status == 1


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_client_sends_its_key(rpc: Served, tokens: dict[str, str], protocol: str) -> None:
    url = str(getattr(rpc, protocol))
    with ingot.Client(url, key=tokens["infer"]) as client:
        assert client.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]
    with ingot.Client(url) as client, pytest.raises(Unauthenticated, match="needs a key"):
        client.metadata("affine")
    with ingot.Client(url, key=tokens["metrics"]) as client, pytest.raises(PermissionDenied, match="lacks the scope"):
        client.metadata("affine")


def test_a_key_that_no_header_can_carry_is_not_sent() -> None:
    for key in ("", "a b", "a\nb", "\xe9", 3):
        with pytest.raises(InvalidArgument, match="printable ASCII"):
            ingot.Client("http://127.0.0.1:1", key=key)  # type: ignore[arg-type]


@pytest.fixture(params=matrix("fast", "grpcio"))
def changing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Served, str, str]]:
    """A server with a file to change, and two of its keys: for metrics and for inference."""
    auth = tmp_path / "keys.toml"
    metrics, key = make_key(auth, "metrics"), make_key(auth, "infer")
    with served(request.param, tmp_path, auth) as running:
        yield running, metrics, key


def test_keys_change_without_a_restart(changing: tuple[Served, str, str]) -> None:
    server, metrics, key = changing
    url = f"{server.http}/v2/models/affine"
    with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {key}"}) as kept:
        assert kept.get(url).status_code == 200
        added = make_key(server.auth, "infer")
        wait_until(lambda: server.infer(added).status_code == 200)
        wait_until(lambda: server.get("/v2", added).status_code == 200)
        revoke_key(server.auth, AuthFile.load(server.auth).keys[key.split("_")[1]], NOW)
        # On the same connection, whose heads the server remembers.
        wait_until(lambda: kept.get(url).status_code == 401)
    wait_until(lambda: all(status_of_infer(server, key) is UNAUTHENTICATED for _ in range(8)))
    assert server.loaded("auth", "ok", metrics) >= 2


def status_of_infer(server: Served, key: str) -> grpc.StatusCode | None:
    try:
        server.infer_grpc(key)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


@pytest.mark.matrix
def test_a_broken_file_leaves_the_keys_in_use(changing: tuple[Served, str, str]) -> None:
    server, metrics, key = changing
    good = server.auth.read_text()
    server.auth.write_text(good.replace("sha256:", "md5:"))
    wait_until(lambda: server.loaded("auth", "failed", metrics) >= 1)
    assert server.infer(key).status_code == 200
    server.auth.unlink()
    wait_until(lambda: server.loaded("auth", "failed", metrics) >= 2)
    assert server.infer(key).status_code == 200
    server.auth.write_text(good)
    wait_until(lambda: server.loaded("auth", "ok", metrics) >= 1)
    assert server.infer(key).status_code == 200


@pytest.mark.matrix
def test_an_open_stream_ends_when_its_key_is_revoked(changing: tuple[Served, str, str]) -> None:
    server, _, key = changing
    assert server.grpc is not None
    turns: queue.SimpleQueue[None] = queue.SimpleQueue()
    more = iter(lambda: (turns.get(timeout=60), affine([1, 2, 3]))[1], None)
    with grpc.insecure_channel(server.grpc.removeprefix("grpc://")) as channel:
        stream: Any = channel.stream_stream(
            f"/{proto_codec.SERVICE}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        answers = stream(more, timeout=120, metadata=[("authorization", f"Bearer {key}")])
        turns.put(None)
        assert next(answers).infer_response.model_name == "affine"
        revoke_key(server.auth, AuthFile.load(server.auth).keys[key.split("_")[1]], NOW)

        def more_answers() -> None:
            while True:
                turns.put(None)
                next(answers)

        with pytest.raises(grpc.RpcError) as caught:
            more_answers()
        turns.put(None)
    error: Any = caught.value
    assert error.code() is UNAUTHENTICATED


def test_a_key_is_looked_up_once_per_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a repeated request, and its block over gRPC, are remembered with their client."""
    calls: list[bytes | None] = []
    check = Gate.check

    def counted(gate: Gate, authorization: bytes | None, scope: str, peer: Peer) -> Any:
        calls.append(authorization)
        return check(gate, authorization, scope, peer)

    monkeypatch.setattr(Gate, "check", counted)
    auth = tmp_path / "keys.toml"
    key = make_key(auth, "infer")
    with served("fast", tmp_path, auth) as server:
        body = json.dumps(BODY).encode()
        head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        with connect(server.http) as connection:
            for _ in range(20):
                connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert len(calls) == 1
        calls.clear()
        with grpc.insecure_channel(str(server.grpc).removeprefix("grpc://")) as channel:
            ask: Any = channel.unary_unary(f"/{proto_codec.SERVICE}/ModelInfer", None, pb.ModelInferResponse.FromString)
            for _ in range(20):  # without a timeout, which would be another text in each call
                ask(affine([1, 2, 3]).SerializeToString(), metadata=[("authorization", f"Bearer {key}")])
        assert len(calls) <= 4


FAULTS = {
    "an unknown field": ("scope = []\n", "there is no field 'key 1 scope'"),
    "an unknown table": ("[keys]\n", "there is no field 'keys'"),
    "not TOML": ("key = [", "is not valid TOML"),
    "a scope that is not there": ('scopes = ["all"]\n', "'key 1 scopes"),
    "no scope": ("scopes = []\n", "'key 1 scopes'"),
    "a hash of another kind": ('hash = "md5:0"\n', "'key 1 hash' is not the hash of a key"),
    "a time without a zone": ("expires = 2030-01-01T00:00:00\n", "'key 1 expires'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_file_is_named(tmp_path: Path, fault: str) -> None:
    text, says = FAULTS[fault]
    auth = tmp_path / "keys.toml"
    if "= " in text and not text.startswith(("[", "key")):
        make_key(auth, "infer")
        name = text.split(" =")[0]
        lines = [line for line in auth.read_text().splitlines() if not line.startswith(f"{name} =")]
        text = "\n".join([*lines, text])
    auth.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        AuthFile.load(auth)
    assert says in str(caught.value)
    assert "sha256" not in str(caught.value)


def test_a_server_does_not_start_without_its_file_or_with_one_that_others_can_write(tmp_path: Path) -> None:
    auth = tmp_path / "keys.toml"
    with pytest.raises(NotFound, match=r"there is no file .*keys\.toml"), served("fast", tmp_path, auth):
        pass
    make_key(auth, "infer")
    auth.chmod(0o666)
    with pytest.raises(InvalidArgument, match="can be changed by every user"), served("fast", tmp_path, auth):
        pass


@given(st.binary(max_size=200) | st.text(max_size=50).map(lambda text: f"Bearer {text}".encode()))
def test_no_bytes_are_a_key(header: bytes) -> None:
    assert isinstance(some_gate().check(header, "infer", Peer()), Refusal)


@functools.cache
def some_gate() -> Gate:
    with tempfile.TemporaryDirectory() as folder:
        auth = Path(folder) / "keys.toml"
        make_key(auth, "infer")
        return Gate(auth, Metrics())


@pytest.mark.matrix
def test_calls_without_a_key_are_a_flood(rpc: Served, tokens: dict[str, str]) -> None:
    """A client that ignores refusals costs its connection, not the server."""
    if rpc.kind == "grpcio":
        pytest.skip("gRPC's own server has no limit on refused calls")
    assert rpc.grpc is not None

    def floods() -> float:
        found = re.findall(
            r'^ingot_grpc_faults_total{code="enhance_your_calm"} (\S+)$',
            rpc.get("/metrics", tokens["metrics"]).text,
            re.MULTILINE,
        )
        return sum(map(float, found))

    before = floods()
    with grpc.insecure_channel(rpc.grpc.removeprefix("grpc://")) as channel:
        ask: Any = channel.unary_unary(f"/{proto_codec.SERVICE}/ModelInfer")
        for _ in range(20):
            for call in [ask.future(b"", timeout=60) for _ in range(500)]:
                call.exception()
            if floods() > before:
                return
    pytest.fail("10,000 refused calls left the connection open")


def test_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    auth = tmp_path / "keys.toml"
    key = make_key(auth, "infer")
    outcome = Gate(auth, Metrics()).check(f"Bearer {key}".encode() + b" " * MAX_HEADER_BYTES, "infer", Peer())
    assert isinstance(outcome, Refusal)
    assert outcome.reason == "malformed"
