"""Network faults during a copy, injected by a proxy in front of a real registry."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive, PermissionDenied, Unavailable
from ingot.model_store import Archive, Store, Transfer
from ingot.model_store.blobs.blobs import CHUNK_BYTES
from ingot.model_store.registry import Registry, Retries
from tests.model_store.registry.proxy import Fault, Server, serving
from tests.model_store.samples import archive

QUICK = Retries(tries=3, first=0.001)
SIZE = 3_000_000


@pytest.fixture
def proxy(registry: str) -> Iterator[Server]:
    with serving(upstream=int(registry.rpartition(":")[2])) as server:
        yield server


@pytest.fixture
def place(proxy: Server) -> Registry:
    return Registry(proxy.address, retries=QUICK)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Archive:
    """An archive of this test with one large blob."""
    return archive(weights=(random.Random(request.node.nodeid).randbytes(SIZE),))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def large(model: Archive) -> str:
    return model.variants[0].weights[0].digest


class TestDownload:
    @pytest.fixture(autouse=True)
    def pushed(self, registry: str, model: Archive) -> str:
        reference = f"faults/{model.digest[7:19]}:1"
        Registry(registry).push(model, reference)
        return reference

    @pytest.mark.matrix
    def test_a_download_resumes_where_the_connection_broke(
        self, place: Registry, proxy: Server, pushed: str, model: Archive, store: Store
    ) -> None:
        proxy.faults = [Fault(f"GET .*{large(model)}", times=2, drop_received=1_200_000)]
        transfer = Transfer()
        store.push(place.find(pushed)[0], "tiny:1", transfer=transfer)
        assert sum(item.received for item in proxy.asked(large(model))) == SIZE
        assert [item.headers.get("Range") for item in proxy.asked(large(model))] == [
            None,
            "bytes=1200000-",
            "bytes=2400000-",
        ]
        assert transfer.moved == transfer.total

    def test_each_break_may_follow_another_as_long_as_something_arrives(
        self, place: Registry, proxy: Server, pushed: str, model: Archive
    ) -> None:
        weights = model.variants[0].weights[0]
        proxy.faults = [Fault(f"GET .*{large(model)}", times=2 * QUICK.tries, drop_received=1 << 20)]
        place.find(pushed)[0].verify()
        assert sum(item.received for item in proxy.asked(large(model))) == weights.size

    @pytest.mark.matrix
    def test_a_stalled_blob_is_abandoned_and_resumed_later(
        self, place: Registry, proxy: Server, pushed: str, model: Archive, store: Store
    ) -> None:
        proxy.faults = [
            Fault(f"GET .*{large(model)}", drop_received=2_000_000),
            Fault(f"GET .*{large(model)}", times=3, status=503),
        ]
        with pytest.raises(Unavailable, match=rf"{proxy.address} answers 503 \(tried 3 times\)"):
            store.push(place.find(pushed)[0], "tiny:1")
        assert store.tags("tiny") == {}
        store.push(place.find(pushed)[0], "tiny:1")
        assert sum(item.received for item in proxy.asked(large(model))) < SIZE + CHUNK_BYTES

    def test_a_registry_that_cannot_begin_in_the_middle_is_read_from_the_start(
        self, place: Registry, proxy: Server, pushed: str, model: Archive, store: Store
    ) -> None:
        proxy.faults = [
            Fault(f"GET .*{large(model)}", drop_received=1_000_001),
            Fault(f"GET .*{large(model)}", without="Range"),
        ]
        store.push(place.find(pushed)[0], "tiny:1")
        store.get("tiny:1").verify()
        assert [item.received for item in proxy.asked(large(model))] == [1_000_001, SIZE]

    def test_a_corrupted_blob_is_not_stored(
        self, place: Registry, proxy: Server, pushed: str, model: Archive, store: Store
    ) -> None:
        proxy.faults = [Fault(f"GET .*{large(model)}", corrupt=1_234_567)]
        with pytest.raises(InvalidArchive, match=f"blob {large(model)} .* is damaged"):
            store.push(place.find(pushed)[0], "tiny:1")
        assert store.tags("tiny") == {}
        assert not store.blobs.has(model.variants[0].weights[0])

    def test_a_corrupted_manifest_is_refused(self, place: Registry, proxy: Server, pushed: str) -> None:
        proxy.faults = [Fault("GET .*/manifests/1$", corrupt=40)]
        with pytest.raises(InvalidArchive, match=r"blob sha256:.* is damaged"):
            place.find(pushed)

    def test_a_blob_that_is_longer_than_in_its_manifest_is_refused(
        self, place: Registry, proxy: Server, pushed: str, model: Archive
    ) -> None:
        proxy.faults = [Fault(f"GET .*{large(model)}", longer=7)]
        with pytest.raises(InvalidArchive, match=f"has {SIZE + 7} bytes in .*, but its manifest says {SIZE}"):
            place.find(pushed)[0].verify()

    @pytest.mark.one_case
    @pytest.mark.parametrize(
        "part", ["", f"bytes 0-{SIZE - 1}/{SIZE}", f"bytes 1000-1999/{SIZE}", "bytes 2000-2999/*", "status 416"]
    )
    def test_a_blob_is_read_from_the_start_if_another_part_than_requested_comes(
        self, place: Registry, proxy: Server, pushed: str, model: Archive, part: str
    ) -> None:
        """The same wrong part comes for each range that is requested, so the registry is not asked for a third one."""
        other = Fault(f"GET .*{large(model)}", headers={"Content-Range": part})
        if part == "status 416":
            other = Fault(f"GET .*{large(model)}", status=416)
        proxy.faults = [Fault(f"GET .*{large(model)}", drop_received=1000), other]
        proxy.faults.append(Fault(f"GET .*{large(model)}", drop_received=500))
        place.find(pushed)[0].verify()
        ranges = [item.headers.get("Range") for item in proxy.asked(large(model))]
        assert ranges == [None, "bytes=1000-", None, None]

    def test_a_part_of_a_blob_of_another_size_is_refused(
        self, place: Registry, proxy: Server, pushed: str, model: Archive
    ) -> None:
        proxy.faults = [
            Fault(f"GET .*{large(model)}", drop_received=1000),
            Fault(f"GET .*{large(model)}", headers={"Content-Range": "bytes 1000-1999/2000"}),
        ]
        with pytest.raises(InvalidArchive, match=f"has 2000 bytes in .*, but its manifest says {SIZE}"):
            place.find(pushed)[0].verify()

    def test_errors_of_the_registry_while_a_tag_moves_are_sat_out(
        self, place: Registry, proxy: Server, pushed: str, model: Archive
    ) -> None:
        proxy.faults = [Fault("/manifests/1$", times=2, status=500)]
        assert place.find(pushed)[0].digest == model.digest
        proxy.faults = [Fault("/manifests/1$", times=3, status=500)]
        with pytest.raises(Unavailable, match=r"answers 500 \(tried 3 times\)"):
            place.find(pushed)

    def test_a_registry_that_limits_the_rate_is_given_time(self, place: Registry, proxy: Server, pushed: str) -> None:
        proxy.faults = [Fault("/manifests/1$", status=429, headers={"Retry-After": "1"})]
        place.find(pushed)
        proxy.faults = [Fault("/manifests/1$", status=429, headers={"Retry-After": "3600"})]
        with pytest.raises(Unavailable, match="answers 429; it asks to retry in 3600 seconds"):
            place.find(pushed)

    def test_refused_requests_are_not_retried(self, place: Registry, proxy: Server, pushed: str) -> None:
        proxy.faults = [Fault("/manifests/1$", times=9, status=403)]
        with pytest.raises(PermissionDenied, match="refuses access"):
            place.find(pushed)
        assert len(proxy.asked("/manifests/1$")) == 1


class TestUpload:
    @pytest.mark.matrix
    def test_a_blob_in_one_piece_is_sent_again(self, place: Registry, proxy: Server, model: Archive) -> None:
        proxy.faults = [Fault("PUT .*/blobs/", least=SIZE, drop_sent=2_000_000)]
        transfer = Transfer()
        place.push(model, "faults/whole:1", transfer=transfer)
        place.find("faults/whole:1")[0].verify()
        assert transfer.moved + transfer.skipped == transfer.total
        assert [item.sent for item in proxy.asked("PUT .*/blobs/") if item.sent > 100_000] == [2_000_000, SIZE]

    @pytest.mark.matrix
    def test_chunks_resume_where_the_registry_ends(self, proxy: Server, model: Archive) -> None:
        place = Registry(proxy.address, retries=QUICK, chunk_bytes=1_000_000)
        proxy.faults = [Fault("PATCH", least=1_000_000, status=502)]
        transfer = Transfer()
        place.push(model, "faults/chunks:1", transfer=transfer)
        place.find("faults/chunks:1")[0].verify()
        assert transfer.moved + transfer.skipped == transfer.total
        assert sum(item.sent for item in proxy.asked("PATCH")) < SIZE + 100_000

    @pytest.mark.matrix
    def test_a_broken_chunk_is_sent_again(self, proxy: Server, model: Archive) -> None:
        place = Registry(proxy.address, retries=QUICK, chunk_bytes=1_000_000)
        proxy.faults = [Fault("PATCH", least=1_000_000, drop_sent=700_000)]
        transfer = Transfer()
        place.push(model, "faults/broken:1", transfer=transfer)
        place.find("faults/broken:1")[0].verify()
        assert transfer.moved + transfer.skipped == transfer.total

    def test_a_registry_that_stays_away_gets_no_tag(
        self, place: Registry, proxy: Server, registry: str, model: Archive
    ) -> None:
        proxy.faults = [Fault("PUT .*/blobs/", times=99, drop_sent=100)]
        with pytest.raises(Unavailable, match=f"the connection to {proxy.address} broke .* .tried 3 times"):
            place.push(model, "faults/away:1")
        assert Registry(registry).tags("faults/away") == {}


def test_a_tag_can_be_read_while_it_moves(registry: str) -> None:
    """docker-registry fails some of these reads; each read returns one archive or the other."""
    patient = Retries(tries=20, first=0.001, longest=0.05)
    writer, reader = Registry(registry, retries=patient), Registry(registry, retries=patient)
    first, second = (writer.push(archive(graph), f"faults/moving:{tag}") for tag, graph in ((1, b"one"), (2, b"two")))
    writer.promote(first, "prod")
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(lambda: [writer.promote(ref, "prod") for _ in range(8) for ref in (second, first)])
        found = [reader.find("faults/moving:prod")[1].digest]
        while not moving.done():
            found.append(reader.find("faults/moving:prod")[1].digest)
        moving.result()
    assert set(found) <= {first.digest, second.digest}


def test_a_registry_that_is_not_there_is_named() -> None:
    with socket.socket() as held:  # bound, so that no other process gets the port, and not listening
        held.bind(("127.0.0.1", 0))
        address = f"oci://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"{address} cannot be reached .*; check the address and the network"):
            Registry(address, retries=QUICK).find("tiny:1")
