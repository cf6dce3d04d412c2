"""TLS at both ports, with a certificate made for the test."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import ipaddress
import itertools
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument, Unavailable
from ingot.server.net.tls import Tls
from tests import onnx_models
from tests.support import matrix


def make(folder: Path, name: str = "server", password: bytes | None = None) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, hidden))
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("tls"))


KINDS: dict[str, dict[str, Any]] = {
    "grpcio": {"grpc_server": "grpcio"},
    "fast": {"grpc_server": "fast"},
}


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def encrypted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, files: tuple[Path, Path]
) -> Iterator[RunningServer]:
    model = onnx_models.affine(tmp_path_factory.mktemp("models"))
    kind = {"tls_cert": files[0], "tls_key": files[1], **KINDS[request.param]}
    with ingot.serve(str(model), http_port=0, grpc_port=0, **kind) as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_both_protocols_answer_clients_that_trust_the_certificate(
    encrypted: RunningServer, files: tuple[Path, Path], protocol: str
) -> None:
    url = getattr(encrypted, f"{protocol}_url")
    assert url.startswith(("https://", "grpcs://"))
    with ingot.Client(url, ca_file=files[0]) as client:
        assert client.ready()
        assert client.infer("affine", {"x": np.ones((2, 3), np.float32)})["y"].tolist() == [[3, 3, 3]] * 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_without_trust_or_without_tls_are_refused(encrypted: RunningServer, protocol: str) -> None:
    url: str = getattr(encrypted, f"{protocol}_url")
    plain = url.replace("https", "http").replace("grpcs", "grpc")
    with ingot.Client(url, timeout=10) as client, pytest.raises(Unavailable, match="--ca-file"):
        client.ready()
    remedy = "came without TLS; use https://" if protocol == "http" else "is TLS as the server has it"
    with ingot.Client(plain, timeout=10) as client, pytest.raises((Unavailable, InvalidArgument), match=remedy):
        client.ready()


def test_http_without_tls_is_answered_with_the_cause(
    encrypted: RunningServer, files: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["encrypted"]
    urls = [encrypted.http_url] if kind == "grpcio" else [encrypted.http_url, encrypted.grpc_url]
    before = _refused(encrypted, files)
    for url, method in itertools.product(urls, ["GET", "POST", "DELETE", "OPTIONS"]):
        connection = http.client.HTTPConnection(url.split("//")[1], timeout=30)
        with contextlib.closing(connection):
            connection.request(method, "/v2", b"x" * 300_000)  # longer than what the server reads at once
            answer = connection.getresponse()
            assert answer.status == 400
            assert "use https:// or grpcs://" in json.loads(answer.read())["error"]
    if kind == "fast":
        host, port = encrypted.grpc_url.removeprefix("grpcs://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert raw.recv(1) == b""  # gRPC's clients would connect again without a pause after an answer
        assert _refused(encrypted, files) - before == 4 * len(urls) + 1


def _refused(server: RunningServer, files: tuple[Path, Path]) -> float:
    """Return the number of clients without TLS that the server has counted."""
    with ingot.Client(server.http_url, ca_file=files[0]) as client:
        found = re.search(r'^ingot_tls_refused_total{reason="plain"} (\S+)$', client.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_name_missing_from_the_certificate_is_reported(
    encrypted: RunningServer, files: tuple[Path, Path], protocol: str
) -> None:
    url: str = getattr(encrypted, f"{protocol}_url").replace("127.0.0.1", "localhost")
    with (
        ingot.Client(url, timeout=10, ca_file=files[0]) as client,
        pytest.raises(Unavailable, match="a name or address that the server's certificate is made for"),
    ):
        client.ready()


def test_http_offers_what_it_speaks(encrypted: RunningServer, files: tuple[Path, Path]) -> None:
    host, port = encrypted.http_url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=files[0])
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((host, int(port)), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname=host) as wrapped,
    ):
        assert wrapped.selected_alpn_protocol() == "http/1.1"
        assert wrapped.version() in ("TLSv1.2", "TLSv1.3")


Spoil = Callable[[Path], tuple[Path | None, Path | None]]


def _without_key(folder: Path) -> tuple[Path | None, Path | None]:
    return make(folder)[0], None


def _without_cert(folder: Path) -> tuple[Path | None, Path | None]:
    return None, make(folder)[1]


def _of_another(folder: Path) -> tuple[Path | None, Path | None]:
    return make(folder)[0], make(folder, "other")[1]


def _swapped(folder: Path) -> tuple[Path | None, Path | None]:
    cert, key = make(folder)
    return key, cert


def _encrypted(folder: Path) -> tuple[Path | None, Path | None]:
    return make(folder, password=b"secret")


def _not_there(folder: Path) -> tuple[Path | None, Path | None]:
    return folder / "nowhere.pem", make(folder)[1]


def _key_of_text(folder: Path) -> tuple[Path | None, Path | None]:
    cert, key = make(folder)
    key.write_text("no key")
    return cert, key


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_without_key, "--tls-cert is given without --tls-key"),
        (_without_cert, "--tls-key is given without --tls-cert"),
        (_of_another, r"the key .*other\.key does not belong to the certificate .*server\.pem"),
        (_swapped, r"server\.key holds no certificate"),
        (_encrypted, r"the key .*server\.key is encrypted"),
        (_not_there, r"nowhere\.pem cannot be read: No such file"),
        (_key_of_text, r"server\.key holds no private key"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, spoil: Spoil, says: str) -> None:
    cert, key = spoil(folder)
    with pytest.raises(InvalidArgument, match=says):
        Tls.load(cert, key)


def test_the_command_says_what_is_wrong_with_a_certificate(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with pytest.raises(InvalidArgument, match="--tls-cert is given without --tls-key"):
        ingot.serve(model, http_port=0, grpc_port=0, tls_cert=make(folder)[0])


def test_a_client_names_a_file_of_certificates_that_it_cannot_use(folder: Path) -> None:
    for url in ("https://127.0.0.1:1", "grpcs://127.0.0.1:1"):
        with pytest.raises(InvalidArgument, match=r"nowhere\.pem"):
            ingot.Client(url, ca_file=folder / "nowhere.pem")
