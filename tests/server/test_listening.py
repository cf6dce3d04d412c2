from __future__ import annotations

import errno
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument
from ingot.server.listeners import Listeners
from ingot.server.management import places
from ingot.server.net.listening import check_port, reserve, taken
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import Repository
from tests import onnx_models
from tests.server.outside import wait_until
from tests.server.test_lifecycle import running
from tests.support import matrix

X = np.ones((1, 3), np.float32)


@pytest.mark.parametrize("host", ["nohost.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_reported_with_the_remedy(host: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"{host}:8000 for HTTP: .*(known|assign).*; give --host an address of this"
    ):
        check_port("HTTP", host, 8000)


def test_a_low_port_is_reported_to_need_rights() -> None:
    error = taken("gRPC", "127.0.0.1", 80, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    assert "ports below 1024" in str(error)
    assert "--grpc-port 0" in str(error)


@pytest.fixture
def ports() -> Iterator[dict[str, Any]]:
    """Two free ports, reserved for servers that share them."""
    with reserve("HTTP", "127.0.0.1", 0) as http, reserve("gRPC", "127.0.0.1", 0) as grpc:
        yield {"http_port": http.getsockname()[1], "grpc_port": grpc.getsockname()[1]}


def infer(url: str) -> None:
    with ingot.Client(url) as client:  # its own connection, which the kernel assigns to one of the servers
        assert client.infer("affine", {"x": X})["y"].tolist() == [[3, 3, 3]]


@pytest.mark.matrix
def test_servers_share_both_ports(tmp_path: Path, ports: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = str(onnx_models.affine(tmp_path))
    given = ["--share-port", f"--http-port={ports['http_port']}", f"--grpc-port={ports['grpc_port']}"]
    with ExitStack() as stack:
        (first, urls), (second, _) = (
            stack.enter_context(running(model, *given, f"--replica={name}", home=tmp_path))
            for name in ("first", "second")
        )
        served: set[str] = set()

        def both_served() -> bool:
            infer(urls["http"])
            infer(urls["grpc"])
            text = httpx.get(f"{urls['http']}/metrics", trust_env=False, timeout=60).text
            found = re.search(r'^ingot_server_info\{.*replica="(\w+)"', text, re.MULTILINE)
            assert found is not None
            ok = re.findall(r'^ingot_requests_total\{code="ok",.*protocol="(\w+)"', text, re.MULTILINE)
            served.update(f"{found[1]} {protocol}" for protocol in ok)
            return served == {"first http", "first grpc", "second http", "second grpc"}

        wait_until(both_served)
        assert {path.name.partition("-")[0] for path in places.running()} == {str(first.pid), str(second.pid)}
        with pytest.raises(InvalidArgument, match=r"for HTTP: Address already in use; .* \(ingot serve --share-port"):
            ingot.serve(model, **ports)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        for url in (urls["http"], urls["grpc"]) * 4:
            infer(url)
        assert [path.name.partition("-")[0] for path in places.running()] == [str(second.pid)]


def test_servers_of_one_process_have_a_management_socket_each(
    tmp_path: Path, ports: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model, shared = str(onnx_models.affine(tmp_path)), {**ports, "share_port": True}
    with ingot.serve(model, **shared):
        with ingot.serve(model, **shared):
            assert len(places.running()) == 2
        assert len(places.running()) == 1


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_a_port_of_a_server_that_does_not_share_it_is_refused(tmp_path: Path, protocol: str) -> None:
    model = str(onnx_models.affine(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other, reserve("HTTP", "127.0.0.1", 0) as free:
        ports: dict[str, Any] = dict.fromkeys(("http_port", "grpc_port"), free.getsockname()[1])
        ports[f"{protocol.lower()}_port"] = other.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"for {protocol}: Address already in use; .* does not share it"):
            ingot.serve(model, **ports, share_port=True)


@pytest.mark.parametrize("kind", matrix("fast", "grpcio"))
async def test_a_shared_port_is_closed_until_the_server_serves(ports: dict[str, Any], kind: str) -> None:
    """Other servers answer on it while the models of this one load."""
    config = ServerConfig.of({**ports, "share_port": True, "grpc_server": kind})

    def connects(port: int) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    listeners = Listeners(DataPlane(Repository()), config, None)
    await listeners.start()
    assert not any(map(connects, ports.values()))
    await listeners.set_serving(True)
    assert all(map(connects, ports.values()))
    await listeners.stop(0)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"http_port": 0}, "share_port needs fixed ports"),
        ({"grpc_port": 0}, "share_port needs fixed ports"),
        ({"shared_memory": "*"}, "shared_memory cannot be combined with share_port"),
        ({"log_control": True}, "log_control cannot be combined with share_port"),
    ],
)
def test_settings_that_several_servers_on_one_port_cannot_have(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidArgument, match=fault):
        ServerConfig.of({**settings, "share_port": True})
