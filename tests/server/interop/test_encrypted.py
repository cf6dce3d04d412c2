"""TLS of the gRPC servers, as clients see it: ALPN, calls under load, 4 MiB, and clients without TLS."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import ingot
from ingot.protocol import open_inference_pb2 as pb
from tests.server.http2_peer import Peer
from tests.server.interop.test_command_line import HEADERS, body
from tests.server.outside import (
    GRPC_SERVERS,
    INFER,
    affine,
    affine_of,
    floats,
    large,
    message,
    models,
    request_of,
    row,
    unpacked,
)
from tests.server.test_tls import make
from tests.support import RequireTool


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module", params=GRPC_SERVERS)
def address(
    request: pytest.FixtureRequest, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    cert, key = certificate
    sources = models(tmp_path_factory.mktemp("models"))
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "grpc_server": request.param}
    with ingot.serve(*sources, tls_cert=cert, tls_key=key, **settings) as server:
        yield server.grpc_url.rpartition("/")[2]


def infer(channel: grpc.Channel) -> Any:
    return channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)


@pytest.mark.matrix
def test_calls_under_load_and_4_mib(address: str, certificate: tuple[Path, Path]) -> None:
    credentials = grpc.ssl_channel_credentials(certificate[0].read_bytes())
    with grpc.secure_channel(address, credentials, (("grpc.max_receive_message_length", -1),)) as channel:
        calls = [infer(channel).future(affine(row(number)), timeout=60) for number in range(300)]
        for number, call in enumerate(calls):
            assert floats(call.result()) == affine_of(row(number))
        reply = infer(channel)(request_of(large(3), "increment"), timeout=60)
        assert np.array_equal(np.frombuffer(reply.raw_output_contents[0], np.float32), large(3)[0] + 1)


@pytest.mark.matrix
def test_curl_agrees_on_http2_and_uses_one_connection_for_all(
    address: str, certificate: tuple[Path, Path], require_tool: RequireTool, tmp_path: Path
) -> None:
    command = [require_tool("curl"), "-sS", "--http2", "--noproxy", "*", "--cacert", str(certificate[0]), *HEADERS]
    sent, url = body(tmp_path, affine([1, 2, 3])), f"https://{address}{INFER}"
    told = ["-w", '{"http": "%{http_version}", "new": %{num_connects}}\\n']
    answers = [tmp_path / f"answer{number}" for number in range(20)]
    asked = [part for answer in answers for part in ("-o", str(answer), url)]
    result = subprocess.run(
        [*command, *told, "--data-binary", f"@{sent}", *asked], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["http"] for line in lines] == ["2"] * 20
    assert sum(line["new"] for line in lines) == 1
    for answer in answers:
        assert floats(unpacked(answer.read_bytes())) == [3, 5, 7]


def test_h2load(address: str, require_tool: RequireTool, tmp_path: Path) -> None:
    sent = body(tmp_path, affine([1, 2, 3]))
    command = [require_tool("h2load"), "-t1", "-n400", "-c4", "-m8", "-d", sent, *HEADERS, f"https://{address}{INFER}"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "400 succeeded, 0 failed, 0 errored, 0 timeout" in told
    assert "Application protocol: h2" in told


def test_a_client_that_offers_http2_is_taken_at_its_word(address: str, certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    context.set_alpn_protocols(["http/1.1", "h2"])
    host, _, port = address.rpartition(":")
    with Peer((host, int(port)), settings=None) as peer:
        peer.socket = context.wrap_socket(peer.socket, server_hostname=host)
        assert peer.socket.selected_alpn_protocol() == "h2"
        peer.begin()
        peer.send(peer.call(1, message(affine([1, 2, 3]))))
        headers, data = peer.answer(1)
    assert headers["grpc-status"] == "0"
    assert floats(unpacked(data)) == [3, 5, 7]


@pytest.mark.parametrize("sent", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(500), bytes(range(255, 0, -1))], ids=len)
def test_unencrypted_clients_are_refused(address: str, certificate: tuple[Path, Path], sent: bytes) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            try:
                answered = raw.recv(1000)
            except ConnectionResetError:
                answered = b""
            assert answered[:1] in (b"", b"\x15")  # an alert of TLS
    credentials = grpc.ssl_channel_credentials(certificate[0].read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        assert floats(infer(channel)(affine([1, 2, 3]), timeout=60)) == [3, 5, 7]
