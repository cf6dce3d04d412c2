"""Hostile and broken answers of a registry."""

from __future__ import annotations

import itertools
import json
import re
import socket
from dataclasses import replace
from threading import Thread

import pytest

from ingot.errors import InvalidArchive, InvalidArgument, NotFound, Unavailable, Unsupported
from ingot.model_store.format import manifest
from ingot.model_store.registry import Credentials, Registry, Retries
from tests.model_store.registry.conftest import MODEL
from tests.model_store.registry.fake import Fake, digest
from tests.model_store.registry.proxy import Asked, Reply, Server, serving
from tests.model_store.samples import archive

OTHER = {"mediaType": manifest.MANIFEST, "digest": "sha512:" + "0" * 128, "size": 3, "artifactType": "of/another"}
QUICK = Retries(tries=2, first=0.001)


@pytest.fixture
def place(server: Server) -> Registry:
    return Registry(server.address, credentials=Credentials("ann", "secret"), retries=QUICK)


def test_an_honest_one_is_understood(place: Registry, server: Server) -> None:
    place.find("tiny:1")[0].verify()
    place.push(archive(b"new"), "tiny:2")
    assert set(place.tags("tiny")) == {"1", "2"}
    assert all(item.headers["User-Agent"].startswith("ingot/") for item in server.log)


def test_a_manifest_under_the_digest_of_another_is_refused(place: Registry, fake: Fake) -> None:
    fake.manifests[MODEL.digest] = b"{}"
    with pytest.raises(InvalidArchive, match=rf"{MODEL.digest} .* is damaged"):
        place.find(f"tiny@{MODEL.digest}")


def test_a_header_that_contradicts_the_content_is_refused(place: Registry, fake: Fake) -> None:
    fake.before.append(
        lambda asked: (
            Reply(200, {"Docker-Content-Digest": digest(b"")}, fake.manifests["1"])
            if asked.path.endswith("/manifests/1")
            else None
        )
    )
    with pytest.raises(InvalidArchive, match="is damaged"):
        place.find("tiny:1")


def test_other_things_than_archives_are_named(place: Registry, fake: Fake) -> None:
    image = {"schemaVersion": 2, "mediaType": manifest.MANIFEST, "config": {"mediaType": "x"}, "layers": []}
    fake.manifests["image"] = json.dumps(
        {**image, "config": {"mediaType": "application/vnd.oci.image.config.v1+json"}}
    ).encode()
    fake.manifests["chart"] = json.dumps({**image, "artifactType": "application/vnd.chart"}).encode()
    fake.manifests["many"] = json.dumps({"schemaVersion": 2, "mediaType": manifest.INDEX, "manifests": []}).encode()
    with pytest.raises(InvalidArchive, match="tiny:image' is not an Ingot archive, but a container image"):
        place.find("tiny:image")
    with pytest.raises(InvalidArchive, match=r"is not an Ingot archive, but 'application/vnd\.chart'"):
        place.find("tiny:chart")
    with pytest.raises(InvalidArchive, match="tiny:many' is not an Ingot archive, or is damaged"):
        place.find("tiny:many")


@pytest.mark.parametrize("kind", ["application/octet-stream", "text/plain; charset=utf-8", "application/json", ""])
def test_a_manifest_is_known_by_its_content_where_its_type_is_not_sent(place: Registry, fake: Fake, kind: str) -> None:
    """Static file servers know no media types of manifests."""
    fake.has_referrers = True

    def untyped(asked: Asked) -> Reply | None:
        if asked.method != "GET" or not re.search("/(manifests|referrers)/", asked.path):
            return None
        if asked.path.endswith("/page"):
            return Reply(200, {"Content-Type": kind}, b"<html>")
        return replace(fake.honest(asked), headers={"Content-Type": kind})

    fake.before.append(untyped)
    place.find("tiny:1")[0].verify()
    signed = MODEL.with_signature(b"{}")
    place.push(signed, "tiny:2")
    assert [item.digest for item in place.find("tiny:2")[0].attached] == [item.digest for item in signed.attached]
    unmarked = {key: value for key, value in json.loads(fake.manifests["1"]).items() if key != "mediaType"}
    fake.manifests["unmarked"] = json.dumps(unmarked).encode()
    assert len(place.find("tiny:unmarked")[0].variants) == len(MODEL.variants)
    with pytest.raises(InvalidArchive, match="is not an Ingot archive, but"):
        place.find("tiny:page")


def test_a_push_in_chunks_goes_on_where_the_registry_says_that_it_ends(fake: Fake, server: Server) -> None:
    """The registry keeps less than a chunk, says so, and answers no question about the upload."""
    received: dict[str, bytes] = {}

    def partial(asked: Asked) -> Reply | None:
        place = asked.path.partition("?")[0]
        if asked.method == "POST":
            received[f"{place}{len(received)}"] = b""
            return Reply(202, {"Location": list(received)[-1]})
        if asked.method == "PATCH":
            assert asked.headers["Content-Range"].startswith(f"{len(received[place])}-")
            received[place] += asked.body[:1500]
            return Reply(202, {"Range": f"0-{len(received[place]) - 1}"})
        if asked.method == "PUT" and place in received:
            asked.body = received[place]
        return Reply(405) if asked.method == "GET" and place in received else None

    fake.before.append(partial)
    place = Registry(server.address, retries=Retries(tries=1), chunk_bytes=2000)
    other = archive(weights=(b"v" * 9001,))
    place.push(other, "tiny:3")
    assert fake.blobs[other.variants[0].weights[0].digest] == b"v" * 9001


def test_a_document_without_end_is_not_read_to_it(place: Registry, fake: Fake) -> None:
    fake.before.append(
        lambda asked: (
            Reply(200, {"Content-Type": manifest.INDEX}, itertools.repeat(b"x" * 65536))
            if "/manifests/" in asked.path
            else None
        )
    )
    with pytest.raises(InvalidArgument, match="more than 4 MiB where a document is expected"):
        place.find("tiny:1")


def test_an_error_without_end_is_not_read_to_it(place: Registry, fake: Fake) -> None:
    fake.before.append(lambda asked: Reply(418, body=itertools.repeat(b"no " * 20_000)))
    with pytest.raises(InvalidArgument, match=r"refuses GET /v2/tiny/manifests/1 \(418: (no ){90,}") as caught:
        place.find("tiny:1")
    assert len(str(caught.value)) < 500


def test_a_blob_without_end_is_not_read_to_it(place: Registry, fake: Fake) -> None:
    fake.before.append(
        lambda asked: Reply(200, body=itertools.repeat(b"w" * 65536)) if "/blobs/" in asked.path else None
    )
    with pytest.raises(InvalidArchive, match="has more bytes in"):
        place.find("tiny:1")


def test_redirects_without_end_are_not_followed_to_it(place: Registry, fake: Fake, server: Server) -> None:
    fake.before.append(lambda asked: Reply(307, {"Location": asked.path + "x"}))
    with pytest.raises(InvalidArgument, match="redirects more than 5 times"):
        place.find("tiny:1")
    assert len(server.log) == 6


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "http://registry.example/x", "gopher://x/", "http://u:p@127.0.0.1/", "http://[", ""],
)
def test_a_registry_leads_to_https_only(place: Registry, fake: Fake, location: str) -> None:
    fake.before.append(lambda asked: Reply(307, {"Location": location}))
    with pytest.raises(InvalidArgument, match=r"(which is not followed|to an invalid URL|more than 5 times)"):
        place.find("tiny:1")


@pytest.mark.parametrize("location", ["file:///tmp/x", "http://registry.example/x", "http://[", None])
def test_nothing_is_uploaded_to_where_it_must_not_go(place: Registry, fake: Fake, location: str | None) -> None:
    headers = {} if location is None else {"Location": location}
    fake.before.append(lambda asked: Reply(202, headers) if asked.method == "POST" else None)
    with pytest.raises(InvalidArgument, match=r"(which is not followed|to an invalid URL|no upload location)"):
        place.push(archive(b"new"), "tiny:2")


def test_credentials_do_not_follow_a_redirect(fake: Fake) -> None:
    """Neither for reads nor for uploads; ``localhost`` is another host than ``127.0.0.1``."""
    asked_for: list[Asked] = []

    def guarded(asked: Asked) -> Reply | None:
        if "Authorization" not in asked.headers:
            return Reply(401, {"WWW-Authenticate": 'Basic realm="x"'})
        if asked.method == "GET" and "/blobs/" in asked.path:
            return Reply(307, {"Location": f"http://localhost:{storage.port}{asked.path}"})
        if asked.method == "POST":
            return Reply(202, {"Location": f"http://localhost:{storage.port}{asked.path}1"})
        return None

    def open_storage(asked: Asked) -> Reply:
        asked_for.append(asked)
        return fake(asked) if asked.method == "PUT" else Reply(200, body=fake.blobs[asked.path.rpartition("/")[2]])

    guard = Fake()
    guard.manifests, guard.blobs = fake.manifests, fake.blobs
    guard.before.append(guarded)
    with serving(answer=open_storage) as storage, serving(answer=guard) as server:
        place = Registry(server.address, credentials=Credentials("ann", "secret"), retries=QUICK)
        place.find("tiny:1")[0].verify()
        place.push(archive(b"new"), "tiny:2")
    assert {item.method for item in asked_for} == {"GET", "PUT"}
    assert not any("Authorization" in item.headers for item in asked_for)


class TestLists:
    def test_pages_are_followed(self, place: Registry, fake: Fake) -> None:
        def paged(asked: Asked) -> Reply | None:
            if "/tags/list" not in asked.path:
                return None
            last = "last=" in asked.path
            headers = {} if last else {"Link": '</v2/tiny/tags/list?n=1&last=1>; rel="next"'}
            return Reply(200, headers, json.dumps({"tags": ["nope" if last else "1", "sha256-" + "0" * 64]}).encode())

        fake.before.append(paged)
        assert place.tags("tiny") == {"1": MODEL.digest}  # the other one was removed while they were listed

    @pytest.mark.matrix
    def test_pages_without_end_are_not_followed_to_it(self, place: Registry, fake: Fake) -> None:
        numbers = itertools.count()
        fake.before.append(
            lambda asked: (
                Reply(200, {"Link": f"<?last={next(numbers)}>; rel=next"}, b'{"tags": null}')
                if "/tags/list" in asked.path
                else None
            )
        )
        with pytest.raises(InvalidArgument, match="a list of more than 200 pages"):
            place.tags("tiny")

    def test_a_next_page_elsewhere_is_not_fetched(self, place: Registry, fake: Fake, server: Server) -> None:
        fake.before.append(lambda asked: Reply(200, {"Link": '</secret>; rel="next"'}, b'{"tags": []}'))
        with pytest.raises(InvalidArgument, match="a next page elsewhere: '/secret'"):
            place.tags("tiny")
        assert len(server.log) == 1

    def test_there_is_a_limit_to_tags(self, place: Registry, fake: Fake) -> None:
        tags = json.dumps({"tags": [f"t{number}" for number in range(10_001)]}).encode()
        fake.before.append(lambda asked: Reply(200, body=tags))
        with pytest.raises(InvalidArgument, match="lists more than 10000 tags"):
            place.tags("tiny")

    @pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"tags": 3}', b'{"nothing": []}', b"\xff", b"[" * 100_000])
    def test_a_tag_list_of_another_type_is_reported(self, place: Registry, fake: Fake, content: bytes) -> None:
        fake.before.append(lambda asked: Reply(200, body=content))
        with pytest.raises(InvalidArgument, match="something other than a list of tags"):
            place.tags("tiny")

    def test_names_that_cannot_be_are_left_out(self, place: Registry, fake: Fake) -> None:
        names = ["tiny", "../../etc", "Upper", "\x1b[31m", 3, "a/b", "blobs"]
        fake.before.append(lambda asked: Reply(200, body=json.dumps({"repositories": names}).encode()))
        assert place.names() == ["a/b", "tiny"]

    @pytest.mark.parametrize("status", [401, 403, 404, 405])
    def test_a_registry_that_lists_no_names_is_reported(self, place: Registry, fake: Fake, status: int) -> None:
        fake.before.append(lambda asked: Reply(status))
        with pytest.raises(Unsupported, match=r"does not list its models.*name one"):
            place.names()


class TestReferrers:
    @pytest.fixture
    def fake(self) -> Fake:
        registry = Fake(referrers=True)
        registry.others = [dict(OTHER)]
        return registry

    def test_the_registry_lists_them_by_itself(self, place: Registry, fake: Fake) -> None:
        place.push(MODEL.with_signature(b"{1}"), "tiny:1")
        place.attach(MODEL.with_signature(b"{2}"), "tiny")
        assert sorted(place.find("tiny:1")[0].signatures()) == [b"{1}", b"{2}"]
        assert not any(tag.startswith("sha256-") for tag in fake.manifests)

    def test_referrers_listed_by_the_registry_cannot_be_replaced(self, place: Registry, fake: Fake) -> None:
        place.push(MODEL.with_signature(b"{1}"), "tiny:1")
        with pytest.raises(Unsupported, match=r"delete the signatures there .* then sign without --replace"):
            place.attach(MODEL.with_signature(b"{2}"), "tiny", replace=True)
        assert place.find("tiny:1")[0].signatures() == (b"{1}",)

    def test_more_than_there_can_be_are_cut_off(self, place: Registry, fake: Fake) -> None:
        fake.put(MODEL, "1")
        signature = {"mediaType": manifest.MANIFEST, "size": 3, "artifactType": "application/vnd.ingot.signature.v1"}
        fake.others = [{**signature, "digest": digest(bytes([number]))} for number in range(65)]
        assert len(place.find("tiny:1")[0].attached) == 64

    def test_a_signature_of_another_archive_is_refused(self, place: Registry, fake: Fake) -> None:
        place.push(archive(b"another").with_signature(b"{1}"), "tiny:2")
        fake.put(MODEL, "1")
        (signature,) = (each for each in fake.manifests.values() if b'"subject"' in each)
        entry = {"mediaType": manifest.MANIFEST, "digest": digest(signature), "size": len(signature)}
        fake.others = [{**entry, "artifactType": "application/vnd.ingot.signature.v1"}]
        with pytest.raises(InvalidArchive, match="is not a signature of"):
            place.find("tiny:1")[0].signatures()


def test_attachments_of_other_tools_stay_in_the_index_as_they_are(place: Registry, fake: Fake) -> None:
    tag = MODEL.digest.replace(":", "-")
    other = {**OTHER, "data": "AAAA", "annotations": {"by": "somebody"}}
    fake.manifests[tag] = json.dumps({"schemaVersion": 2, "manifests": [other]}).encode()
    place.attach(MODEL.with_signature(b"{1}"), "tiny")
    assert json.loads(fake.manifests[tag])["manifests"][0] == other
    assert place.find("tiny:1")[0].signatures() == (b"{1}",)
    place.attach(MODEL.with_signature(b"{2}"), "tiny", replace=True)
    assert json.loads(fake.manifests[tag])["manifests"][0] == other
    assert place.find("tiny:1")[0].signatures() == (b"{2}",)


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"manifests": [3]}', b'{"manifests": {}}'])
def test_a_damaged_index_of_attachments_is_not_written_over(place: Registry, fake: Fake, content: bytes) -> None:
    tag = MODEL.digest.replace(":", "-")
    fake.before.append(
        lambda asked: Reply(200, {"Content-Type": manifest.INDEX}, content) if asked.path.endswith(tag) else None
    )
    with pytest.raises(InvalidArchive, match=r"attachments of .* is not an index"):
        place.attach(MODEL.with_signature(b"{1}"), "tiny")


def test_a_digest_that_the_registry_makes_up_is_refused(place: Registry, fake: Fake) -> None:
    fake.before.append(
        lambda asked: (
            Reply(201, {"Docker-Content-Digest": digest(b"")})
            if asked.method == "PUT" and "/manifests/" in asked.path
            else None
        )
    )
    with pytest.raises(InvalidArgument, match=r"stored a manifest of 'tiny' as sha256:.*, which is not its digest"):
        place.push(archive(b"new"), "tiny:2")


@pytest.mark.parametrize("code", ["DIGEST_INVALID", "MANIFEST_BLOB_UNKNOWN"])
def test_a_manifest_is_sent_again_when_its_blobs_are_not_visible_yet(place: Registry, fake: Fake, code: str) -> None:
    """docker-registry says so while another client uploads one of the same blobs."""
    refusals = [json.dumps({"errors": [{"code": code, "message": "no"}]}).encode()]
    fake.before.append(
        lambda asked: (
            Reply(400, body=refusals.pop())
            if refusals and asked.method == "PUT" and "/manifests/" in asked.path
            else None
        )
    )
    place.push(archive(b"new"), "tiny:2")
    assert not refusals


def test_a_blob_of_another_size_is_refused(place: Registry, fake: Fake) -> None:
    fake.blobs[MODEL.variants[0].weights[0].digest] = b"short"
    with pytest.raises(InvalidArchive, match=r"has 5 bytes in .*, but its manifest says 5000"):
        place.find("tiny:1")[0].verify()
    with pytest.raises(InvalidArchive, match=r"has 5 bytes in .*, but its manifest says 5000"):
        place.push(MODEL, "tiny:2")


def test_a_missing_blob_is_named(place: Registry, fake: Fake) -> None:
    weights = MODEL.variants[0].weights[0].digest
    del fake.blobs[weights]
    with pytest.raises(InvalidArchive, match=f"blob {weights} is missing: .* does not have /v2/tiny/blobs/{weights}"):
        place.find("tiny:1")[0].verify()


def test_an_answer_that_is_not_http_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        place = Registry(f"oci://127.0.0.1:{listener.getsockname()[1]}", retries=Retries(tries=1))

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(Unavailable, match=r"the connection to .* broke"):
            place.find("tiny:1")
        thread.join()


def test_a_host_that_speaks_plain_http_is_reported(server: Server) -> None:
    address = server.address.replace("oci:", "oci+https:")
    with pytest.raises(InvalidArgument, match=rf"does not support HTTPS .*write oci\+http://127.0.0.1:{server.port}"):
        Registry(address, retries=QUICK).find("tiny:1")


def test_a_missing_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(Unavailable, match=r"oci://registry.invalid cannot be found.*check the spelling"):
        Registry("oci://registry.invalid").find("tiny:1")


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    Registry(server.address, retries=QUICK).find("tiny:1")


def test_nothing_is_found_where_there_is_nothing(place: Registry, fake: Fake) -> None:
    with pytest.raises(NotFound, match="'tiny' has: 1"):
        place.find("tiny:7")
