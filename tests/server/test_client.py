from __future__ import annotations

import enum
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

import ingot
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
from ingot.server.main import RunningServer


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
