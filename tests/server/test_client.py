from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

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
        with pytest.raises(NotFound, match="no model 'nope'"):
            client.infer("nope", {})
        with pytest.raises(InvalidArgument, match="FP64"):
            client.infer("affine", {"x": np.zeros((1, 3))})
        with pytest.raises(TooLarge):
            client.infer("affine", {"x": np.zeros((1 << 20, 3), np.float32)})


def test_nobody_there() -> None:
    with socket.socket() as held:  # bound, so that nobody else gets the port, and not listening
        held.bind(("127.0.0.1", 0))
        for scheme in ("http", "grpc"):
            url = f"{scheme}://127.0.0.1:{held.getsockname()[1]}"
            with ingot.Client(url) as client, pytest.raises(Unavailable, match="is it running"):
                client.ready()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_other_protocols_port_and_tls_without_tls_are_told(server: RunningServer, protocol: str) -> None:
    ports = {name: getattr(server, f"{name}_url").rpartition(":")[2] for name in ("http", "grpc")}
    other = {"http": "gRPC", "grpc": "HTTP"}[protocol]
    for scheme, name in ((f"{protocol}s", protocol), (protocol, other.lower())):
        with (
            ingot.Client(f"{scheme}://127.0.0.1:{ports[name]}", timeout=10) as client,
            pytest.raises(
                IngotError, match=rf"is TLS as the server has it .* is it the {other} port|this port speaks gRPC"
            ),
        ):
            client.ready()


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="http://host:port"):
        ingot.Client(text)


def test_metrics_are_http_only(server: RunningServer) -> None:
    with ingot.Client(server.grpc_url) as client, pytest.raises(Unsupported, match="http"):
        client.metrics()


def test_a_timeout_of_a_microsecond_passes(url: str) -> None:
    with ingot.Client(url) as client, pytest.raises(DeadlineExceeded):
        client.infer("affine", {"x": np.zeros((1, 3), np.float32)}, parameters={"timeout": 1})


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
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
                with pytest.raises(InternalError, match="no answer of the Open Inference Protocol"):
                    client.metadata("m")
                with pytest.raises(InternalError, match="no answer of the Open Inference Protocol"):
                    client.infer("m", {"x": np.zeros(1)})
        finally:
            page.shutdown()
            thread.join(120)
