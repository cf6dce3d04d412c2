"""TLS of both ports: client certificates, new certificates without a restart, and the rules of HTTP/2."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

import ingot
from ingot.errors import InvalidArgument, PermissionDenied, Unavailable
from ingot.server.access.peers import certificate_of
from ingot.server.net.tls import Tls
from tests import onnx_models
from tests.server.access.authority import Authority, Files
from tests.server.access.served import KINDS, make_key
from tests.server.http2_peer import PREFACE
from tests.server.outside import wait_until
from tests.support import matrix

pytestmark = pytest.mark.one_case  # of each test; the others by `make test-matrix`

X = {"x": np.ones((1, 3), np.float32)}


@dataclass(frozen=True)
class Encrypted:
    """A server with TLS; ``cert`` are the files that it reads."""

    http: str
    grpc: str
    authority: Authority
    cert: Files
    client_ca: Path | None

    def client(self, protocol: str, cert: Files | None = None, key: str | None = None) -> ingot.Client:
        pair = (None, None) if cert is None else cert
        return ingot.Client(getattr(self, protocol), 30, self.authority.file, key, *pair)

    def answers(self, cert: Files | None, key: str | None = None) -> None:
        for protocol in ("http", "grpc"):
            with self.client(protocol, cert, key) as client:
                assert client.infer("affine", X)["y"].tolist() == [[3, 3, 3]]

    def metrics(self, cert: Files | None = None) -> str:
        with self.client("http", cert) as client:
            return client.metrics()

    def loaded(self, result: str, cert: Files | None = None) -> float:
        pattern = rf'^ingot_reloads_total{{file="certificates",result="{result}"}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.metrics(cert), re.MULTILINE)))

    def connect(self, which: str, context: ssl.SSLContext) -> ssl.SSLSocket:
        host, port = str(getattr(self, which)).partition("://")[2].split(":")
        return context.wrap_socket(socket.create_connection((host, int(port)), timeout=30), server_hostname=host)

    def serial(self, which: str) -> int:
        """Return the number of the certificate that a new connection gets."""
        context = ssl.create_default_context(cafile=self.authority.file)
        context.set_alpn_protocols(["h2"] if which == "grpc" else ["http/1.1"])
        with self.connect(which, context) as connection:
            der = connection.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der).serial_number


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(params=matrix("fast", "grpcio"))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def serve(folder: Path, authority: Authority, client_ca: Path | None = None, **settings: Any) -> Iterator[Encrypted]:
    cert = authority.sign("server")
    model = str(onnx_models.affine(folder))
    settings |= {"tls_cert": cert[0], "tls_key": cert[1], "tls_client_ca": client_ca}
    with ingot.serve(model, http_port=0, grpc_port=0, **settings) as server:
        yield Encrypted(server.http_url, server.grpc_url, authority, cert, client_ca)


@pytest.fixture
def plain(tmp_path: Path, authority: Authority, kind: dict[str, Any]) -> Iterator[Encrypted]:
    """A server that asks for no client certificates."""
    yield from serve(tmp_path, authority, **kind)


@pytest.fixture
def mutual(tmp_path: Path, authority: Authority, kind: dict[str, Any]) -> Iterator[Encrypted]:
    """A server that asks for client certificates; its file of the authority can be replaced."""
    client_ca = tmp_path / "clients.pem"
    shutil.copy(authority.file, client_ca)
    yield from serve(tmp_path, authority, client_ca, **kind)


@pytest.fixture
def mapped(tmp_path: Path, authority: Authority, kind: dict[str, Any]) -> Iterator[tuple[Encrypted, str]]:
    """The same with a file of rights; and a key of it."""
    auth = tmp_path / "auth.toml"
    key = make_key(auth, "infer")
    auth.write_text(
        auth.read_text() + '[[certificate]]\nsubject = "CN=infers,O=Example"\nscopes = ["infer"]\n'
        '[[certificate]]\nsan = "URI:spiffe://example/metrics"\nscopes = ["metrics"]\n'
    )
    for server in serve(tmp_path, authority, authority.file, auth=auth, **kind):
        yield server, key


def refused(server: Encrypted, cert: Files | None) -> None:
    for protocol in ("http", "grpc"):
        with server.client(protocol, cert) as client, pytest.raises(Unavailable):
            client.infer("affine", X)


def test_a_client_needs_a_certificate_of_the_authority(mutual: Encrypted, tmp_path: Path) -> None:
    mutual.answers(mutual.authority.sign("client"))
    refused(mutual, None)
    (tmp_path / "other").mkdir()
    refused(mutual, Authority(tmp_path / "other", "other").sign("client"))
    refused(mutual, mutual.authority.sign("late", days=-0.5))
    metrics = mutual.metrics(mutual.authority.sign("client"))
    found = re.search(r'^ingot_tls_refused_total{reason="certificate"} (\S+)$', metrics, re.MULTILINE)
    assert found is not None
    assert float(found[1]) >= 3  # those of the HTTP port: gRPC's own server does not report them


@pytest.mark.matrix
def test_certificates_have_the_rights_that_the_file_gives(mapped: tuple[Encrypted, str]) -> None:
    server, key = mapped
    organisation = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Example")
    infers = server.authority.sign("infers", more=[organisation])
    metrics = server.authority.sign("reads", uri="spiffe://example/metrics")
    server.answers(infers)
    assert "ingot_requests_total" in server.metrics(metrics)
    for protocol in ("http", "grpc"):
        with server.client(protocol, metrics) as client, pytest.raises(PermissionDenied, match="lacks the scope"):
            client.infer("affine", X)
    # The escaped comma keeps a name from being read as two.
    for name in ("another", "infers,O=Example", "infers"):
        cert = server.authority.sign(name)
        for protocol in ("http", "grpc"):
            with server.client(protocol, cert) as client, pytest.raises(PermissionDenied, match="has no entry for"):
                client.infer("affine", X)
        server.answers(cert, key)  # a key decides where it is sent


@pytest.mark.matrix
def test_a_new_certificate_is_used_without_a_restart(plain: Encrypted) -> None:
    context = ssl.create_default_context(cafile=plain.authority.file)
    with httpx.Client(verify=context, trust_env=False) as kept:
        url = f"{plain.http}/v2"
        assert kept.get(url).status_code == 200
        old = {which: plain.serial(which) for which in ("http", "grpc")}
        plain.authority.sign("server")  # the same files
        for which, serial in old.items():
            wait_until(lambda which=which, serial=serial: plain.serial(which) != serial)  # type: ignore[misc]
        assert kept.get(url).status_code == 200
    plain.answers(None)
    assert plain.loaded("ok") >= 1


@pytest.mark.matrix
def test_a_broken_pair_leaves_the_certificate_in_use(plain: Encrypted) -> None:
    good = plain.cert[1].read_bytes()
    plain.cert[1].write_bytes(plain.authority.sign("other")[1].read_bytes())
    wait_until(lambda: plain.loaded("failed") >= 1)
    plain.answers(None)
    plain.cert[1].write_bytes(good)
    wait_until(lambda: plain.loaded("ok") >= 1)
    plain.answers(None)


@pytest.mark.matrix
def test_an_authority_that_is_replaced_loses_its_clients(mutual: Encrypted, tmp_path: Path) -> None:
    old = mutual.authority.sign("client")
    mutual.answers(old)
    (tmp_path / "new").mkdir()
    authority = Authority(tmp_path / "new", "new")
    new = authority.sign("client")
    assert mutual.client_ca is not None
    shutil.copy(authority.file, mutual.client_ca)

    def accepted(protocol: str) -> bool:
        try:
            with mutual.client(protocol, new) as client:
                return client.infer("affine", X) != {}
        except Unavailable:
            return False

    wait_until(lambda: all(map(accepted, ("http", "grpc"))))
    refused(mutual, old)


def http2_of(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


@pytest.mark.parametrize("offer", [None, ["http/1.1"]], ids=["no ALPN", "http/1.1"])
def test_the_grpc_port_needs_h2(tmp_path: Path, authority: Authority, offer: list[str] | None) -> None:
    for server in serve(tmp_path, authority):
        for first, says in ((PREFACE, b"negotiate h2 by ALPN"), (b"GET / HTTP/1.1\r\n\r\n", b"this port speaks gRPC")):
            context = http2_of(authority)
            if offer is not None:
                context.set_alpn_protocols(offer)
            with server.connect("grpc", context) as connection:
                assert connection.selected_alpn_protocol() is None
                connection.sendall(first)
                answer = b""
                while part := connection.recv(4096):
                    answer += part
            assert says in answer
        assert 'ingot_grpc_faults_total{code="inadequate_security"} 2.0' in server.metrics()


@pytest.mark.parametrize(
    ("ciphers", "accepted"), [("ECDHE+AESGCM", True), ("ECDHE+AES+SHA256", False), ("AES128-GCM-SHA256", False)]
)
@pytest.mark.parametrize("which", ["http", "grpc"])
def test_tls_1_2_has_the_ciphers_of_http2_only(
    tmp_path: Path, authority: Authority, which: str, ciphers: str, accepted: bool
) -> None:
    for server in serve(tmp_path, authority):
        context = http2_of(authority)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(ciphers)
        context.set_alpn_protocols(["h2"] if which == "grpc" else ["http/1.1"])
        if accepted:
            with server.connect(which, context) as connection:
                assert connection.version() == "TLSv1.2"
        else:
            with pytest.raises(ssl.SSLError):
                server.connect(which, context)


def test_files_of_authorities_that_cannot_be_used_are_named(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign("server")
    with pytest.raises(InvalidArgument, match=r"--tls-client-ca .*server\.key holds no certificates"):
        Tls.load(cert, key, key)
    with pytest.raises(InvalidArgument, match=r"--tls-client-ca .*nowhere cannot be read"):
        Tls.load(cert, key, tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="--tls-client-ca is given without --tls-cert and --tls-key"):
        Tls.load(None, None, authority.file)


def test_a_client_needs_both_files_of_its_certificate(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cert_file and cert_key_file"):
        ingot.Client("https://127.0.0.1:1", cert_file=tmp_path / "x")
    with pytest.raises(InvalidArgument, match="cannot be used"):
        ingot.Client("grpcs://127.0.0.1:1", cert_file=tmp_path / "x", cert_key_file=tmp_path / "y")


def test_an_unreadable_certificate_has_no_identity() -> None:
    assert certificate_of(b"junk") is None
