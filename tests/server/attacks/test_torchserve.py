"""The vulnerabilities of TorchServe, by name, tried on Ingot's server and its import of TorchServe's archives.

docs/concepts/reliability.md lists all named attacks with their tests.
"""

from __future__ import annotations

import pickle
import socket
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from tests import onnx_models
from tests.importing.sources import mar, read, script_mar
from tests.support import matrix


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = onnx_models.affine(tmp_path_factory.mktemp("models"))
    with ingot.serve(str(model), http_port=0, grpc_port=0) as running:
        yield running


@pytest.mark.matrix
@pytest.mark.parametrize(
    "path", matrix("/v2/repository/models/evil/load", "/models", "/v2/models", "/v2/repository/models/affine/load")
)
def test_cve_2023_43654_no_request_makes_the_server_fetch_a_model(server: RunningServer, path: str) -> None:
    """ShellTorch: the open management API loaded a model, and ran its code, from any URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/evil.mar"
        query = urllib.parse.urlencode({"url": url, "model_name": "evil", "initial_workers": 1})
        body = {"url": url, "parameters": {"config": url}}
        for method in ("POST", "PUT"):
            answer = httpx.request(method, f"{server.http_url}{path}?{query}", json=body, trust_env=False)
            assert answer.status_code in (404, 405, 501)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_cve_2024_35199_both_ports_are_of_this_machine_alone(server: RunningServer) -> None:
    """gRPC listened on all interfaces. A port that is bound to them is also reached at 127.0.0.2."""
    for url in (server.http_url, server.grpc_url):
        port = urllib.parse.urlsplit(url).port
        socket.create_connection(("127.0.0.1", port or 0), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port or 0), 5)


YAML = b"""
minWorkers: !!python/object/apply:os.system ["touch %b"]
handler: !!javax.script.ScriptEngineManager [!!java.net.URLClassLoader [[!!java.net.URL ["http://127.0.0.1:9/"]]]]
"""


def test_cve_2022_1471_yaml_is_not_read_as_code(tmp_path: Path) -> None:
    """SnakeYAML made any object that a model's configuration named."""
    touched = tmp_path / "touched"
    files = {"model-config.yaml": YAML % str(touched).encode()}
    found = read(script_mar(tmp_path / "net.mar", files, configFile="model-config.yaml"))
    assert found.format == "torchscript"
    assert not touched.exists()


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (Path(self.path),)


@pytest.mark.parametrize("name", ["net.pt", "w.pth", "w.bin"])
def test_cve_2025_32434_pickles_are_not_loaded(tmp_path: Path, name: str) -> None:
    """Handlers called torch.load on the files of an archive, which runs code, even with `weights_only=True` once."""
    made = tmp_path / "made"
    plain = pickle.dumps(Payload(made))
    packed = tmp_path / "packed"
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("archive/data.pkl", plain)
        file.writestr("archive/version", b"3")
    for content in (plain, packed.read_bytes()):
        path = mar(tmp_path / "net.mar", {name: content, "model.py": b""}, serializedFile=name, modelFile="model.py")
        with pytest.raises(InvalidArgument):
            read(path, allow_code=False)
        path = mar(tmp_path / "net.mar", {name: content}, serializedFile=name)
        with pytest.raises(InvalidArgument):
            read(path, allow_code=True)
    assert not made.exists()
    pickle.loads(plain)
    assert made.exists()  # the payload works


@pytest.mark.parametrize("name", ["../evil", "../net.mar-evil/x", "/tmp/evil", "a/../../evil"])
def test_cve_2024_35198_archives_do_not_write_outside(tmp_path: Path, name: str) -> None:
    """`..` passed the check of the allowed URLs; unpacking compared prefixes of paths without a separator."""
    folder = tmp_path / "inner" / "net"
    folder.mkdir(parents=True)
    before = {path for path in tmp_path.rglob("*") if path.name == "evil"}
    with pytest.raises(InvalidArgument, match="not a valid relative path"):
        read(script_mar(folder / "net.mar", {name: b"x"}))
    assert {path for path in tmp_path.rglob("*") if path.name == "evil"} == before
    assert not Path("/tmp/evil").exists()
