"""A registry does not lead a client into the client's private network."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import InvalidArgument, Unavailable
from ingot.model_store.registry import Registry, Retries
from ingot.model_store.registry.addresses import is_public
from tests.model_store.registry.conftest import MODEL
from tests.model_store.registry.fake import Fake
from tests.model_store.registry.proxy import Asked, Fault, Reply, Server, serving
from tests.model_store.samples import archive
from tests.support import RequireTool, RunIngot, refused, succeeded

QUICK = Retries(tries=2, first=0.001)
PUBLIC, CLOSED = "93.184.215.14", "93.184.215.15"


class Network:
    """The names and addresses of a network: names resolve as listed, and public addresses are this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.names: dict[str, list[list[str]]] = {}
        """Answers by name, of which all but the last are given once."""
        self.reached: list[str] = []
        self._resolve, self._connect = socket.getaddrinfo, socket.create_connection
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)
        monkeypatch.setattr(socket, "create_connection", self._open)

    def _answer(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        answers = self.names.get(host)
        if answers is None:
            return self._resolve(host, port, *args, **kwargs)
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [entry for name in found for entry in self._resolve(name, port, *args, **kwargs)]

    def _open(self, address: tuple[str, int], *args: Any, **kwargs: Any) -> socket.socket:
        host, port = address
        if host == PUBLIC:
            host, name = "127.0.0.1", PUBLIC
        else:
            name = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        self.reached.append(name)
        if name == CLOSED:
            raise ConnectionRefusedError("refused")
        return self._connect((host, port), *args, **kwargs)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network(monkeypatch)
    network.names["registry.example"] = [["127.0.0.1"]]
    return network


@pytest.fixture
def storage() -> Iterator[Server]:
    """A server that a registry redirects to, which has the blobs."""
    blobs = Fake()
    blobs.put(MODEL, "1")
    with serving(answer=lambda asked: Reply(200, body=blobs.blobs[asked.path.rpartition("/")[2]])) as server:
        yield server


@pytest.fixture
def place(server: Server, network: Network) -> Registry:
    return Registry(f"oci+http://registry.example:{server.port}", retries=QUICK)


def redirect(fake: Fake, base: str) -> None:
    """Have a registry redirect reads of blobs."""
    fake.before.append(
        lambda asked: Reply(307, {"Location": base + asked.path}) if "GET /v2/tiny/blobs/" in key(asked) else None
    )


def key(asked: Asked) -> str:
    return f"{asked.method} {asked.path}"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0x7f.1",
        "2130706433",
        "inside.example",
        "mixed.example",
    ],
)
def test_a_redirect_to_a_private_address_is_not_followed(
    place: Registry, fake: Fake, storage: Server, network: Network, host: str
) -> None:
    network.names["inside.example"] = [["127.0.0.1"]]
    network.names["mixed.example"] = [[PUBLIC, "127.0.0.1"]]
    redirect(fake, f"http://{host}:{storage.port}")
    with pytest.raises(InvalidArgument, match=r"a private address, which is not followed.*INGOT_REDIRECT_HOSTS="):
        place.find("tiny:1")[0].verify()
    assert not storage.log


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "10.0.0.7", "192.168.1.1", "100.64.0.1", "[fe80::1]", "[fd00::1]"]
)
def test_metadata_services_and_neighbours_are_not_reached(
    place: Registry, fake: Fake, network: Network, address: str
) -> None:
    redirect(fake, f"http://{address}")
    with pytest.raises(InvalidArgument, match="a private address, which is not followed"):
        place.find("tiny:1")[0].verify()
    assert set(network.reached) == {"127.0.0.1"}


def test_a_listed_host_is_followed(
    server: Server, fake: Fake, storage: Server, network: Network, run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.names["minio.example"] = [["127.0.0.1"]]
    redirect(fake, f"http://minio.example:{storage.port}")
    pull = ["copy", f"oci+http://registry.example:{server.port}/tiny:1"]
    message = refused(run_ingot(*pull))
    assert message.endswith("allow it with INGOT_REDIRECT_HOSTS=minio.example (several with commas between)")
    monkeypatch.setenv("INGOT_REDIRECT_HOSTS", "other.example, minio.example")
    succeeded(run_ingot(*pull))
    assert storage.log


def test_blobs_of_a_real_registry_on_another_host(
    registry: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(registry.rpartition(":")[2])
    network.names["storage.example"] = [["127.0.0.1"]]
    Registry(registry).push(MODEL, "redirected/tiny:1")
    weights = MODEL.variants[0].weights[0].digest
    path = f"/v2/redirected/tiny/blobs/{weights}"
    with serving(upstream=port) as front:
        away = {"Location": f"http://storage.example:{port}{path}"}
        front.faults.append(Fault(f"GET {path}", times=9, status=307, headers=away))
        place = Registry(f"oci+http://registry.example:{front.port}", retries=QUICK)
        with pytest.raises(InvalidArgument, match=r"leads to storage\.example \(127\.0\.0\.1\), a private address"):
            place.find("redirected/tiny:1")[0].verify()
        monkeypatch.setenv("INGOT_REDIRECT_HOSTS", "storage.example")
        place.find("redirected/tiny:1")[0].verify()


def test_a_registry_may_redirect_to_itself_on_another_port(place: Registry, fake: Fake, storage: Server) -> None:
    redirect(fake, f"http://registry.example:{storage.port}")
    place.find("tiny:1")[0].verify()
    assert storage.log


def test_the_address_that_was_checked_is_the_one_connected_to(
    place: Registry, fake: Fake, storage: Server, network: Network
) -> None:
    """A name server that answers differently the second time has no effect."""
    network.names["cdn.example"] = [[PUBLIC], ["127.0.0.1"]]
    redirect(fake, f"http://cdn.example:{storage.port}")
    with pytest.raises(InvalidArgument, match=r"leads to cdn\.example \(127\.0\.0\.1\)"):  # of the second blob
        place.find("tiny:1")[0].verify()
    assert PUBLIC in network.reached
    assert [asked.headers["Host"] for asked in storage.log] == [f"cdn.example:{storage.port}"]


def test_the_next_address_is_tried(place: Registry, fake: Fake, storage: Server, network: Network) -> None:
    network.names["cdn.example"] = [[CLOSED, PUBLIC]]
    redirect(fake, f"http://cdn.example:{storage.port}")
    place.find("tiny:1")[0].verify()
    assert {CLOSED, PUBLIC} < set(network.reached)


def test_a_name_that_does_not_resolve_is_reported(place: Registry, fake: Fake) -> None:
    redirect(fake, "http://no-such-host.invalid")
    with pytest.raises(Unavailable, match=r"cannot be (found|reached)"):
        place.find("tiny:1")[0].verify()


def test_uploads_and_tokens_are_not_sent_there_either(place: Registry, fake: Fake, storage: Server) -> None:
    fake.before.append(
        lambda asked: Reply(202, {"Location": f"http://127.0.0.1:{storage.port}/x"}) if asked.method == "POST" else None
    )
    with pytest.raises(InvalidArgument, match="a private address, which is not followed"):
        place.push(archive(b"new"), "tiny:2")
    challenge = {"WWW-Authenticate": f'Bearer realm="http://127.0.0.1:{storage.port}/token"'}
    fake.before.insert(0, lambda asked: Reply(401, challenge))
    with pytest.raises(InvalidArgument, match=r"which is not followed.*INGOT_TOKEN_HOSTS=127\.0\.0\.1"):
        place.find("tiny:1")
    assert not storage.log


def test_certificates_are_for_the_name(
    place: Registry,
    fake: Fake,
    network: Network,
    require_tool: RequireTool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=cdn"
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    names = ["-addext", "subjectAltName=DNS:cdn.example"]
    subprocess.run([require_tool("openssl"), *options.split(), *names, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    asked_for: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked_for.append(name)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    place = Registry(place.address, retries=QUICK)
    network.names |= {"cdn.example": [[PUBLIC]], "other.example": [[PUBLIC]]}
    with serving(
        answer=lambda asked: Reply(200, body=fake.blobs[asked.path.rpartition("/")[2]]), context=context
    ) as tls:
        redirect(fake, f"https://cdn.example:{tls.port}")
        place.find("tiny:1")[0].verify()
        fake.before.clear()
        redirect(fake, f"https://other.example:{tls.port}")
        with pytest.raises(InvalidArgument, match="has an untrusted certificate"):
            Registry(place.address, retries=QUICK).find("tiny:1")[0].verify()
    assert set(asked_for) == {"cdn.example", "other.example"}


def test_behind_a_proxy_addresses_in_the_url_are_refused(
    place: Registry, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    redirect(fake, "http://169.254.169.254")
    monkeypatch.setenv("NO_PROXY", "registry.example")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(InvalidArgument, match="a private address, which is not followed"):
        Registry(place.address, retries=QUICK).find("tiny:1")[0].verify()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("0.0.0.0", False),
        ("127.8.8.8", False),
        ("172.31.0.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
