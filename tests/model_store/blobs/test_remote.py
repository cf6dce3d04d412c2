"""Archives in object storage are read in place: here a folder and a web server stand in for a bucket."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive, InvalidArgument, NotFound, PermissionDenied
from ingot.model_store import Archive, Store
from ingot.model_store.blobs.remote import is_object
from tests.model_store.samples import archive
from tests.support import RunIngot

MADE = archive(b"graph", tuple(bytes([part]) * 3_000_000 for part in range(3)))


@pytest.fixture
def url(tmp_path: Path) -> str:
    MADE.save(tmp_path / "a.ingot")
    return f"file://{tmp_path}/a.ingot"


def test_an_object_is_opened_checked_and_stored(url: str, tmp_path: Path) -> None:
    opened = Archive.open(url)
    assert opened.digest == MADE.digest
    opened.verify()
    store = Store(tmp_path / "store")
    store.push(opened, "tiny:1")
    store.get("tiny:1").verify()


def test_damage_is_found(url: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ingot"
    path.write_bytes(path.read_bytes().replace(bytes([1]) * 1000, bytes([7]) * 1000))
    with pytest.raises(InvalidArchive, match=r"file://.*is damaged"):
        Archive.open(url).verify()


def test_unavailable_objects(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no object file://"):
        Archive.open(f"file://{tmp_path}/none.ingot")
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InvalidArchive, match="is not an Ingot archive"):
        Archive.open(f"file://{tmp_path}/text")
    for address in ("s3://bucket", "s3://", "s3://bucket/"):
        with pytest.raises(InvalidArgument, match="does not name an object"):
            Archive.open(address)


def test_which_texts_are_addresses_of_objects() -> None:
    assert is_object("s3://bucket/a.ingot")
    assert is_object("gs://bucket/a.ingot")
    assert not is_object("oci://host/a:1")
    assert not is_object("http://host/a.ingot")
    assert not is_object("s3:/bucket")


def test_from_the_command_line(url: str, run_ingot: RunIngot) -> None:
    loaded = run_ingot("copy", url, "tiny:1")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == f"tiny:1  {MADE.digest}\n"
    assert run_ingot("copy", url, "tiny:2").returncode == 0
    assert MADE.digest in run_ingot("inspect", url).stdout


@pytest.fixture
def denying() -> Iterator[int]:
    """The port of a server that answers 403 to everything."""

    class Deny(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        do_GET = do_HEAD  # noqa: N815 - as the library calls it

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Deny)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_bucket_that_denies_access(denying: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ENDPOINT", f"http://127.0.0.1:{denying}"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(PermissionDenied, match=r"s3://bucket/a.ingot cannot be read"):
        Archive.open("s3://bucket/a.ingot")
