"""Many small requests that decompress to large ones: the server decompresses within its memory budget."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from tests.server.http2_peer import CALL, Peer
from tests.server.outside import Service, serving

MIB = 1 << 20
COUNT = 200


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving("fast", tmp_path, "--max-bodies-mb", "16") as running:
        yield running


def most_resident(service: Service) -> int:
    """Return the most bytes of memory that the server's processes have held, each at its own time."""
    own = service.process.pid
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in [own, *children])
    return sum(int(size) << 10 for size in re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE))


@pytest.mark.matrix
def test_messages(service: Service) -> None:
    packed = gzip.compress(bytes(8 * MIB - 1), 9)
    body = b"\1" + len(packed).to_bytes(4, "big") + packed
    service.check()
    before = most_resident(service)
    with Peer(service.grpc_address, timeout=60) as peer:
        peer.started()
        streams = range(1, 2 * COUNT, 2)
        for stream in streams:
            peer.send(peer.call(stream, body, headers=[*CALL, ("grpc-encoding", "gzip")]))
        statuses = [peer.answer(stream)[0]["grpc-status"] for stream in streams]
    assert set(statuses) <= {"3", "14"}  # not a protobuf message, or not held
    grown = most_resident(service) - before
    # The 16 MiB, their joined copy, and memory that allocators keep; with a thread for each, some 100 on two cores.
    assert grown < 90 * MIB, f"the server has grown by {grown >> 20} MiB"
    service.check()
    x = np.zeros((200_000, 3), np.float32)  # and their memory is free again
    with ingot.Client(f"grpc://{service.grpc}") as client:
        assert (client.infer("affine", {"x": x})["y"] == 1).all()
