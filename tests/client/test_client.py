from __future__ import annotations

import asyncio
import contextlib
import copy
import enum
import gzip
import itertools
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

import ingot
from ingot import RunningServer
from ingot.bench.payload import payload
from ingot.bench.target import ServerCounts
from ingot.client.http import HttpCall, HttpProtocol
from ingot.client.management import Management
from ingot.errors import (
    DeadlineExceeded,
    IngotError,
    InternalError,
    InvalidArgument,
    NotFound,
    TooLarge,
    Unavailable,
    Unsupported,
)
from ingot.protocol import arguments
from tests.support import RunIngot


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: RunningServer) -> str:
    return server.http_url if request.param == "http" else server.grpc_url


def test_it_asks_over_either_protocol(url: str) -> None:
    x = np.array([[1, 2, 3]], dtype=np.float32)
    with ingot.Client(url) as client:
        assert client.ready()
        assert client.ready("affine")
        assert not client.ready("nope")
        assert client.metadata("affine")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
        assert client.infer("affine", {"x": x}, version="1", outputs=["z"])["z"].tolist() == [[-1, -2, -3]]
        assert client.infer("affine", {"x": x}, binary=False)["y"].tolist() == [[3, 5, 7]]


def test_errors_are_of_the_kind_the_server_means(url: str) -> None:
    with ingot.Client(url) as client:
        with pytest.raises(NotFound, match="Request for unknown model: 'nope'"):
            client.infer("nope", {})
        with pytest.raises(InvalidArgument, match="FP64"):
            client.infer("affine", {"x": np.zeros((1, 3))})
        with pytest.raises(TooLarge):
            client.infer("affine", {"x": np.zeros((1 << 20, 3), np.float32)})


def test_an_address_without_a_listener() -> None:
    with socket.socket() as held:  # bound, so that no other process gets the port, and not listening
        held.bind(("127.0.0.1", 0))
        for scheme in ("http", "grpc"):
            url = f"{scheme}://127.0.0.1:{held.getsockname()[1]}"
            with ingot.Client(url) as client, pytest.raises(Unavailable, match="is it running"):
                client.ready()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_other_protocols_port_and_tls_without_tls_are_explained(server: RunningServer, protocol: str) -> None:
    ports = {name: getattr(server, f"{name}_url").rpartition(":")[2] for name in ("http", "grpc")}
    other = {"http": "gRPC", "grpc": "HTTP"}[protocol]
    for scheme, name in ((f"{protocol}s", protocol), (protocol, other.lower())):
        with (
            ingot.Client(f"{scheme}://127.0.0.1:{ports[name]}", timeout=10) as client,
            pytest.raises(
                IngotError,
                match=rf"is TLS as the server has it .* is it the {other} port|is a server's {other} port; write {other.lower()}://",
            ),
        ):
            client.ready()


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8000", "ftp://x", "http://", "", "http://x:port", "http://[::1", "http://:1"]
)
def test_malformed_addresses(text: str) -> None:
    with pytest.raises(InvalidArgument, match="http://host:port"):
        ingot.Client(text)


def test_an_address_is_text_and_one_of_grpc_names_its_port() -> None:
    with pytest.raises(InvalidArgument, match=r"url is 8000 \(int\)"):
        ingot.Client(8000)  # type: ignore[arg-type]
    for scheme in ("grpc", "grpcs"):
        with pytest.raises(InvalidArgument, match=rf"names no port; write {scheme}://host:port"):
            ingot.Client(f"{scheme}://127.0.0.1")


def test_an_address_that_ends_in_v2_is_explained_where_nothing_is_found_below_it(server: RunningServer) -> None:
    with ingot.Client(f"{server.http_url}/v2/") as client:
        with pytest.raises(NotFound, match=rf"give the address as {server.http_url}$"):
            client.infer("affine", {"x": np.zeros((1, 3), np.float32)})
        with pytest.raises(NotFound, match="give the address as"):
            client.metadata("affine")


X = {"x": np.array([[1, 2, 3]], np.float32)}


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"inputs": X["x"]}, r"inputs is .*ndarray.*; give the arrays by the names"),
        ({"inputs": None}, "inputs is None; give the arrays by the names"),
        ({"inputs": {0: X["x"]}}, r"an input's name is 0 \(int\); it must be text"),
        ({"inputs": {"x": [[1], [2, 3]]}}, "input 'x' cannot be made an array"),
        ({"inputs": {"x": None}}, "input 'x' holds None"),
        ({"inputs": {"x": np.zeros((1, 3), complex)}}, "input 'x': arrays of type complex128"),
        ({"model": 1}, r"model is 1 \(int\); it must be text"),
        ({"model": "\ud800"}, "model .* is not UTF-8"),
        ({"version": 1.5}, r"version is 1.5 \(float\); it must be text"),
        ({"version": None}, "version is None"),
        ({"outputs": "y"}, r"outputs is 'y' \(str\); give a list"),
        ({"outputs": 1}, r"outputs is 1 \(int\); give a list"),
        ({"outputs": ["y", None]}, "an output's name is None"),
        ({"parameters": "timeout"}, "parameters is 'timeout'"),
        ({"parameters": {1: 1}}, "a parameter's name is 1"),
        ({"parameters": {"timeout": 2**70}}, "parameter 'timeout' is a whole number that does not fit into 64 bits"),
        ({"parameters": {"timeout": -(10**5000)}}, "parameter 'timeout' .* 64 bits"),
        ({"parameters": {"timeout": None}}, "parameter 'timeout' is None; .* Leave out"),
        ({"parameters": {"a": [1]}}, r"parameter 'a' is \[1\] \(list\)"),
        ({"parameters": {"a": float("nan")}}, "parameter 'a' is nan"),
        ({"parameters": {"a": "\ud800"}}, "parameter 'a' .* is not UTF-8"),
    ],
)
def test_arguments_of_another_kind_are_named_alike_over_either_protocol(
    url: str, arguments: dict[str, Any], says: str
) -> None:
    with ingot.Client(url) as client:
        for binary in (True, False):
            with pytest.raises(InvalidArgument, match=says):
                client.infer(**{"model": "affine", "inputs": X, "binary": binary, **arguments})


def test_equivalents_of_text_numbers_and_arrays_are_accepted(url: str) -> None:
    class Level(enum.StrEnum):
        HIGH = "high"

    parameters = {"priority": np.int64(1), "mine": Level.HIGH, "other": -0.5, "third": 1e300, "flag": np.bool_(True)}
    with ingot.Client(url) as client:
        answer = client.infer("affine", X, version=1, outputs=iter(["y"]), parameters=parameters)  # type: ignore[arg-type]
        assert {name: array.tolist() for name, array in answer.items()} == {"y": [[3, 5, 7]]}
        assert client.metadata("affine", 1) == client.metadata("affine", "1")


def test_a_closed_client_refuses_calls(url: str) -> None:
    with ingot.Client(url) as client:
        assert client.ready()
    client.close()
    for ask in (client.ready, client.metrics, lambda: client.metadata("affine"), lambda: client.infer("affine", X)):
        with pytest.raises(InvalidArgument, match="this client is closed"):
            ask()


def test_metrics_are_http_only(server: RunningServer) -> None:
    with ingot.Client(server.grpc_url) as client, pytest.raises(Unsupported, match="http"):
        client.metrics()


def test_a_timeout_of_a_microsecond_passes(url: str) -> None:
    with ingot.Client(url) as client, pytest.raises(DeadlineExceeded):
        client.infer("affine", {"x": np.zeros((1, 3), np.float32)}, parameters={"timeout": 1})


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if "absent" in self.path else 200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_of_another_kind_of_server_is_the_servers_fault() -> None:
    with HTTPServer(("127.0.0.1", 0), _Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            with ingot.Client(f"http://127.0.0.1:{page.server_port}") as client:
                with pytest.raises(InternalError, match="not of the Open Inference Protocol"):
                    client.metadata("m")
                with pytest.raises(InternalError, match="not of the Open Inference Protocol"):
                    client.infer("m", {"x": np.zeros(1)})
                with pytest.raises(NotFound, match="answered 404: a web page; this is not an Open Inference Protocol"):
                    client.metadata("absent")
        finally:
            page.shutdown()
            thread.join(120)


class Liar(BaseHTTPRequestHandler):
    """Answers as ``kind`` says: without an end, with a false length, more deeply nested or larger than it seems.

    A description of the model is honest, unless ``document`` is another.
    """

    kind = ""
    document = b"{}"

    def do_GET(self) -> None:
        if self.kind.startswith("document") or (self.path == "/v2/models/m" and "all" not in self.kind):
            self.reply(self.document)
        elif "length" in self.kind:
            self.reply(b"{", length=10**15)
        elif "short" in self.kind:
            self.reply(b"{}", length=1000)
        elif "deep" in self.kind:
            self.reply(b"[" * 60_000, status=500)
        elif "unfolds" in self.kind:
            self.reply(gzip.compress(bytes(4 << 20)), encoding="gzip", status=200 + 300 * ("error" in self.kind))
        else:
            self.reply(b"", length=None, status=200 + 300 * ("error" in self.kind))
            with contextlib.suppress(OSError):  # of a client that has read enough
                while True:
                    self.wfile.write(b"data: 1 " * (1 << 13))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    do_DELETE = do_GET  # noqa: N815

    def reply(self, body: bytes, *, length: int | None = -1, encoding: str = "", status: int = 200) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length == -1 else length))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


METADATA = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}], "outputs": []}


@contextlib.contextmanager
def liar(kind: str, document: Any = METADATA) -> Iterator[str]:
    """Yield the URL of such a server."""
    handler = type("Handler", (Liar,), {"kind": kind, "document": json.dumps(document).encode()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(120)


def _infer(url: str) -> None:
    with ingot.Client(url, max_response_mb=1) as client:
        client.infer("m", {"x": np.zeros(1, np.float32)})


def _stream(url: str) -> None:
    with ingot.Client(url, max_response_mb=1) as client:
        list(client.stream("m", {"x": np.zeros(1, np.float32)}))


def _infer_async(url: str) -> None:
    async def ask() -> None:
        async with ingot.AsyncClient(url, max_response_mb=1) as client:
            await client.infer("m", {"x": np.zeros(1, np.float32)})

    asyncio.run(ask())


def _stream_async(url: str) -> None:
    async def ask() -> None:
        async with ingot.AsyncClient(url, max_response_mb=1) as client:
            async for _ in client.stream("m", {"x": np.zeros(1, np.float32)}):
                pass

    asyncio.run(ask())


def _metadata(url: str) -> None:
    with ingot.Client(url) as client:
        client.metadata("m")


def _manage(url: str) -> None:
    asyncio.run(Management(url).ask("GET", "/v2/repository/status"))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["endless", "length", "short", "unfolds", "endless error", "unfolds error"])
def test_an_answer_of_inference_is_read_up_to_a_limit(kind: str) -> None:
    remedy = "has more than 1 MiB; to accept it, raise --max-response-mb, in Python max_response_mb"
    expected = {"endless": remedy, "length": remedy, "short": "peer closed", "unfolds": "'gzip'"}
    with liar(kind) as url:
        for ask in (_infer, _infer_async, *((_stream, _stream_async) if "endless" in kind else ())):
            with pytest.raises(IngotError, match=expected.get(kind, "the server answered 500")) as error:
                ask(url)
            assert len(str(error.value)) < 1000


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["all endless", "all length", "all unfolds", "all endless error", "all deep error"])
def test_a_document_is_read_up_to_a_limit(kind: str) -> None:
    expected = "500" if "error" in kind else "'gzip'" if "unfolds" in kind else "has more than 64 MiB$"
    with liar(kind) as url:
        for ask in (_metadata, _manage):
            with pytest.raises(IngotError, match=expected):
                ask(url)


@pytest.mark.matrix
def test_the_same_limit_holds_over_grpc(server: RunningServer) -> None:
    x = np.zeros((1 << 17, 3), np.float32)
    with ingot.Client(server.grpc_url, max_response_mb=1) as client:
        with pytest.raises(TooLarge, match="has more than 1 MiB; to accept it, raise --max-response-mb"):
            client.infer("affine", {"x": x})
        assert client.infer("affine", {"x": x[:9]})["y"].shape == (9, 3)
    with pytest.raises(InvalidArgument, match=r"max_response_mb is 0 \(int\); it must be a whole number of MiB"):
        ingot.Client(server.grpc_url, max_response_mb=0)


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    1e300,
    1 << 63,
    "",
    "abc",
    [],
    [1],
    [None],
    [[]],
    {},
    {"a": 1},
    {"name": "x"},
)
DOCUMENTS: dict[str, Any] = {
    "": {
        "name": "m",
        "versions": ["1"],
        "platform": "p",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "n", "datatype": "INT64", "shape": [1]},
        ],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        "properties": {"values.n": "0..4"},
    },
    "/stats": {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "inference_count": 1,
                "execution_count": 1,
                "inference_stats": {"success": {"count": 1, "ns": 1}, "queue": {"count": 1, "ns": 1}},
            }
        ]
    },
    "/infer": {"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1, 2]}]},
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(item, (*path, key))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = _with(value[path[0]], path[1:], new)
    return changed


@pytest.mark.matrix
def test_a_wrong_value_in_an_answer_is_the_servers_fault() -> None:
    """Each value of each document is replaced by each odd one; commands can use all that is accepted."""
    protocol = HttpProtocol("http://host", 1 << 20)
    request = arguments.request("m", {"x": np.zeros((1, 3), np.float32)}, "", (), None)
    calls: dict[str, HttpCall[Any]] = {"": protocol.metadata("m", ""), "/stats": protocol.statistics("m", "")}
    calls["/infer"] = protocol.infer(request, binary=False)
    accepted = 0
    for path, document in DOCUMENTS.items():
        for place, odd in itertools.product(_places(document), ODD):
            content = orjson.dumps(_with(document, place, odd))
            try:
                answer: Any = calls[path].read(httpx.Response(200, content=content))
                if path == "/stats":
                    sum(map(ServerCounts.of, answer), ServerCounts())
                if path == "":
                    _, events = protocol.stream(request, answer)
                    list(events.read(b'data: {"y": [1, 2, 3]}\n'))
                    payload(answer, None, {}, batch=1, seed=1)
            except IngotError:
                continue
            accepted += 1
    assert accepted > 50
    for deep in (b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b""):
        for call in calls.values():
            with pytest.raises(InternalError, match="not of the Open Inference Protocol"):
                call.read(httpx.Response(200, content=deep))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "document",
    [[], {"inputs": 3}, {"inputs": [{"name": "x"}]}, {"inputs": [{"name": "x", "datatype": "F8", "shape": [1]}]}],
)
def test_commands_name_a_server_whose_metadata_is_wrong(run_ingot: RunIngot, document: Any) -> None:
    with liar("document", document) as url:
        for command in (
            ("infer", url, "m", "--input", "x=[1]"),
            ("bench", url, "m"),
            ("server", "load", "m", "--server", url),
        ):
            text = run_ingot(*command).stderr
            assert "bug in Ingot" not in text
            assert re.search("not of the Open Inference|another form|known: BOOL|unknown input|not describe", text)
