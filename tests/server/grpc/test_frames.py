"""The fast gRPC server frame by frame, without a socket; tests/server/grpc/test_grpc.py tests it by clients."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ingot.protocol import open_inference_pb2 as pb
from ingot.server.grpc import call as call_module
from ingot.server.grpc import calls
from ingot.server.grpc.call import Call
from ingot.server.grpc.head import Head
from ingot.server.grpc.messages import Messages
from ingot.server.grpc.replies import integer
from ingot.server.http2 import abuse_budget, frames, sender
from ingot.server.http2.frames import ErrorCode
from ingot.server.http2.headers import HeaderDecoder
from ingot.server.net.limits import CALL_BYTES, STREAM_BYTES, Budget
from tests.server.echo_peer import INFER, LIMIT, Peer, data, prefixed, request

pytestmark = pytest.mark.source  # compiled code refuses its stand-in for the DataPlane

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

Frame = tuple[int, int, int, bytes]


def content(found: list[Frame], stream_id: int) -> bytes:
    return b"".join(payload for kind, _, of, payload in found if kind == frames.DATA and of == stream_id)


def echoed(found: list[Frame], stream_id: int) -> list[float]:
    answer = pb.ModelInferResponse.FromString(content(found, stream_id)[5:])
    return list(np.frombuffer(answer.raw_output_contents[0], np.float32))


def endings(peer: Peer, found: list[Frame]) -> dict[int, dict[str, str]]:
    """Return the last headers of each stream, decoded."""
    return {of: peer.headers(payload) for kind, _, of, payload in found if kind == frames.HEADERS}


def goaway(found: list[Frame]) -> ErrorCode | None:
    codes = [payload[4:8] for kind, _, _, payload in found if kind == frames.GOAWAY]
    return ErrorCode(int.from_bytes(codes[0], "big")) if codes else None


def resets(found: list[Frame]) -> dict[int, ErrorCode]:
    return {of: ErrorCode(int.from_bytes(p, "big")) for kind, _, of, p in found if kind == frames.RST_STREAM}


async def test_calls_of_one_tick_are_answered_each_with_its_own() -> None:
    peer = Peer()
    peer.send(b"".join(peer.call(1 + 2 * index, request(index, 1)) for index in range(50)))
    found = await peer.received()
    assert [echoed(found, 1 + 2 * index) for index in range(50)] == [[index, 1] for index in range(50)]
    assert {ending["grpc-status"] for ending in endings(peer, found).values()} == {"0"}


async def test_bytes_one_by_one() -> None:
    peer = Peer(begin=False)
    for byte in frames.PREFACE + frames.settings({}) + peer.call(1, request(1, 2)):
        peer.send(bytes((byte,)))
    assert echoed(await peer.received(), 1) == [1, 2]


async def test_ids_and_tensors_differ_while_the_rest_is_remembered() -> None:
    peer = Peer()
    for index, name in enumerate(["", "a", "b", "", "longer", "b"]):
        peer.send(peer.call(1 + 2 * index, request(index, request_id=name)))
        answer = pb.ModelInferResponse.FromString(content(await peer.received(), 1 + 2 * index)[5:])
        assert answer.id == name
        assert answer.raw_output_contents[0] == np.float32(index).tobytes()


async def test_answers_wait_for_a_window_of_one_byte() -> None:
    peer = Peer()
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}) + peer.call(1, request(1, 2)))
    found = await peer.received()
    assert len(content(found, 1)) == 1
    parts = [content(found, 1)]
    while len(parts) < 500 and not any(kind == frames.HEADERS and flags & 1 for kind, flags, _, _ in found):
        peer.send(frames.window_update(1, 1))
        found = await peer.received()
        parts.append(content(found, 1))
    assert {len(part) for part in parts} <= {0, 1}
    answer = pb.ModelInferResponse.FromString(b"".join(parts)[5:])
    assert list(np.frombuffer(answer.raw_output_contents[0], np.float32)) == [1, 2]


async def test_the_connection_window_is_shared_in_turn() -> None:
    peer = Peer()
    values = [float(index) for index in range(15_000)]
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}))
    for stream_id in (1, 3):
        message = prefixed(request(*values))
        peer.send(peer.head(stream_id))
        for start in range(0, len(message), 16_000):
            last = start + 16_000 >= len(message)
            peer.send(data(stream_id, message[start : start + 16_000], frames.END_STREAM if last else 0))
    found = await peer.received()
    sizes = [len(content(found, stream_id)) for stream_id in (1, 3)]
    assert sum(sizes) == frames.DEFAULT_WINDOW
    assert abs(sizes[0] - sizes[1]) <= frames.DEFAULT_FRAME
    peer.send(frames.window_update(0, 1 << 20))
    found += await peer.received()
    assert echoed(found, 1) == echoed(found, 3) == values


async def test_a_smaller_initial_window_holds_for_open_streams() -> None:
    peer = Peer()
    peer.send(peer.head(1) + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.send(data(1, prefixed(request(1)), frames.END_STREAM))
    assert content(await peer.received(), 1) == b""
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    assert echoed(await peer.received(), 1) == [1]


FLOODS: dict[str, Callable[[Peer, int], bytes]] = {
    "ping": lambda peer, _: frames.frame(frames.PING, 0, 0, bytes(8)),
    "settings": lambda peer, _: frames.settings({}),
    "priority": lambda peer, _: frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
    "unknown": lambda peer, _: frames.frame(99, 0, 0, b"x"),
    "reset": lambda peer, index: (
        peer.call(3 + 2 * index, request(1, model="never")) + frames.reset(3 + 2 * index, ErrorCode.CANCEL)
    ),
    "empty data": lambda peer, index: (peer.head(3) if index == 0 else b"") + data(3, b""),
    "window": lambda peer, _: frames.window_update(0, 1),
    "refused": lambda peer, index: peer.head(3 + 2 * index, Upper="case"),
    "settings of a thousand values": lambda peer, _: frames.frame(frames.SETTINGS, 0, 0, bytes(6000)),
    "acknowledged settings": lambda peer, _: frames.frame(frames.SETTINGS, frames.ACK, 0),
    "acknowledged pings": lambda peer, _: frames.frame(frames.PING, frames.ACK, 0, bytes(8)),
    "data byte by byte": lambda peer, index: (peer.head(3) if index == 0 else b"") + data(3, b"\0"),
    "data byte by byte for a call that is over": lambda peer, index: (
        (peer.head(3, path="/x/y") if index == 0 else b"") + data(3, b"\0")
    ),
    "unknown methods": lambda peer, index: peer.head(3 + 2 * index, path="/x/y"),
    "a content type other than gRPC": lambda peer, index: peer.head(3 + 2 * index, content_type="text/html"),
    "malformed timeouts": lambda peer, index: peer.head(3 + 2 * index, grpc_timeout="soon"),
    "too much metadata": lambda peer, index: huffman(3 + 2 * index, 20_000),
}


def literal_call(stream_id: int, more: bytes, path: str = INFER) -> bytes:
    """Return the HEADERS of a call whose block ends with ``more``, and puts nothing into the table."""
    block = b"\x83\x86\x04" + bytes((len(path),)) + path.encode() + b"\x0f\x10\x10application/grpc" + more
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, block)


def huffman(stream_id: int, size: int, path: str = INFER) -> bytes:
    """Return a call with a header of ``size`` zeros, each of which is five bits long."""
    packed = size * 5 // 8  # of a multiple of eight, so that no padding is due
    return literal_call(stream_id, b"\x00\x01x" + integer(packed, 7, 0x80) + bytes(packed), path)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", FLOODS)
async def test_floods_end_the_connection(kind: str) -> None:
    peer = Peer()
    for index in range(3000):
        peer.send(FLOODS[kind](peer, index))
    assert goaway(await peer.received()) is ErrorCode.ENHANCE_YOUR_CALM
    assert peer.wire.closed
    assert all(ticket.cancelled for ticket in peer.plane.tickets)


@pytest.mark.matrix
async def test_a_client_that_works_may_ping_more() -> None:
    peer = Peer()
    for index in range(3000):
        peer.send(peer.call(1 + 2 * index, request(1)) + frames.frame(frames.PING, 0, 0, bytes(8)))
        if index % 100 == 0:
            await peer.received()
    assert goaway(await peer.received()) is None


async def test_the_last_window_of_a_frame_counts_and_calls_are_looked_at_once() -> None:
    class Counted(dict[int, Call]):
        """The streams of a connection; counts how many were given out by iteration."""

        looks = 0

        def values(self) -> Any:
            for stream in super().values():
                self.looks += 1
                yield stream

    peer = Peer()
    for index in range(1000):
        peer.send(peer.head(1 + 2 * index))
    streams = peer.connection.http2.sender.streams = Counted(peer.connection.http2.sender.streams)
    windows = [frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 70_000 + size) for size in range(60)]
    peer.send(frames.frame(frames.SETTINGS, 0, 0, b"".join(windows)))
    assert peer.connection.http2.sender.initial == 70_059
    assert streams.looks <= 2 * len(streams)
    peer.send(frames.frame(frames.SETTINGS, 0, 0, windows[-1]))
    assert streams.looks <= 2 * len(streams)
    for index in range(3000):
        peer.send(frames.frame(frames.SETTINGS, 0, 0, windows[index % 60]))
    assert goaway(await peer.received()) is ErrorCode.ENHANCE_YOUR_CALM
    assert streams.looks < 200 * 1000


@pytest.mark.parametrize("costs", ["one of Huffman's code", "many"])
async def test_headers_that_are_slow_to_read_use_up_the_limit(costs: str) -> None:
    many = b"".join(b"\x00\x01x\x06%06d" % number for number in range(300))
    peer = Peer()
    before = peer.connection.http2.abuse_budget._left
    for stream_id in (1, 3, 5, 7):
        peer.send(huffman(stream_id, 14_000) if costs != "many" else literal_call(stream_id, many))
    assert len(peer.connection.http2.sender.streams) == 4
    assert peer.connection.http2.abuse_budget._left <= before - 4 * 4


@pytest.mark.matrix
@pytest.mark.parametrize("path", [INFER, "/x/y"])
async def test_calls_do_not_earn_back_what_decoding_their_huffman_code_costs(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(abuse_budget, "_PER_SECOND", 0)
    peer = Peer()
    for index in range(2000):
        stream_id = 1 + 2 * index
        block = huffman(stream_id, 8000, path)  # less than half of what a client may send
        peer.send(block + data(stream_id, prefixed(request(1)), frames.END_STREAM))
        if goaway(await peer.received()) is ErrorCode.ENHANCE_YOUR_CALM:
            break
    assert peer.wire.closed
    assert index < 1999


def test_only_huffman_code_costs_more_than_the_bytes_it_stands_for() -> None:
    plain = b"\x00\x01x" + integer(5000, 7) + b"0" * 5000
    packed = b"\x00\x01x" + integer(3125, 7, 0x80) + bytes(3125)
    # A literal that joins the table, the same from there, and a name from the table with a value in Huffman's code.
    table = b"\x40\x01y" + integer(3000, 7) + b"0" * 3000 + b"\xbe" + b"\x0f\x2f" + packed[3:]
    costs = []
    for block in (plain, packed, table):
        heads = HeaderDecoder(Head)
        heads.decode(block)
        costs.append(heads.cost)
    assert costs == [5001 // 2048, (5001 + 3125) // 2048, (2 * 3001 + 5001 + 3125) // 2048]


@pytest.mark.matrix
async def test_a_client_that_works_may_send_headers_of_some_kib() -> None:
    peer = Peer()
    for index in range(1500):
        block = literal_call(1 + 2 * index, b"\x00\x01x" + integer(4000, 7) + b"%04000d" % index)
        peer.send(block + data(1 + 2 * index, prefixed(request(1)), frames.END_STREAM))
        if index % 100 == 0:
            await peer.received()
    assert goaway(await peer.received()) is None


class TestOpenCalls:
    """Memory of the server for waiting calls."""

    def counted(self, peer: Peer) -> int:
        return peer.listener._calls._open_calls._held

    @pytest.mark.matrix
    async def test_they_use_no_more_memory_than_is_counted(self) -> None:
        message = prefixed(request(1, model="never"))
        encoding = b"\x00\x0dgrpc-encoding" + integer(12_000, 7)
        for path, sent, each in (
            (INFER, b"", CALL_BYTES),
            ("", b"", CALL_BYTES),
            (STREAM, b"", CALL_BYTES),
            (STREAM, message, CALL_BYTES + STREAM_BYTES),
        ):
            peer = Peer()
            await peer.received()
            tracemalloc.start()
            for stream_id in range(1, 1000, 2):
                large = b"" if path else literal_call(stream_id, encoding + b"%012000d" % stream_id)
                peer.send(large or peer.head(stream_id, path) + (data(stream_id, sent) if sent else b""))
            await peer.received()
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert len(peer.connection.http2.sender.streams) == 500
            assert taken < 500 * each
            assert self.counted(peer) == 500 * (CALL_BYTES + (STREAM_BYTES if sent else 0))
            peer.connection.connection_lost(None)
            await peer.received()

    async def test_more_than_the_server_may_hold_are_refused(self) -> None:
        peer = Peer()
        peer.listener._calls._open_calls = Budget(2 * (CALL_BYTES + STREAM_BYTES), "open calls")
        message = prefixed(request(1, model="never"))
        for stream_id in (1, 3, 5):
            peer.send(peer.head(stream_id, STREAM) + data(stream_id, message))
        found = endings(peer, await peer.received())
        assert {of: ending["grpc-status"] for of, ending in found.items()} == {5: "14"}
        assert "memory limit for open calls" in found[5]["grpc-message"]
        peer.send(frames.reset(1, ErrorCode.CANCEL) + peer.call(7, request(1)))
        assert echoed(await peer.received(), 7) == [1]
        assert self.counted(peer) == CALL_BYTES + STREAM_BYTES
        peer.send(frames.reset(3, ErrorCode.CANCEL))
        assert self.counted(peer) == held(peer) == 0

    async def test_those_of_a_connection_that_is_lost_end_over_several_ticks(self) -> None:
        peers = [Peer(), Peer()]
        peers[1].listener._calls.cleanup = peers[0].listener._calls.cleanup  # as of one server
        for peer in peers:
            for index in range(500):
                peer.send(peer.call(1 + 2 * index, request(1, model="never")))
            peer.connection.connection_lost(None)
        left = [1000]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(sum(not ticket.cancelled for peer in peers for ticket in peer.plane.tickets))
        assert max(before - after for before, after in pairwise(left)) <= 128
        assert all(self.counted(peer) == 0 and not peer.connection.http2.sender.streams for peer in peers)


BROKEN: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "a frame that is too large": (lambda peer: data(1, bytes(20_000)), ErrorCode.FRAME_SIZE_ERROR),
    "data on an idle stream": (lambda peer: data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "an even stream": (lambda peer: peer.head(2), ErrorCode.PROTOCOL_ERROR),
    "a stream of an older number": (lambda peer: peer.head(3) + peer.head(1), ErrorCode.STREAM_CLOSED),
    "a reset of an idle stream": (lambda peer: frames.reset(1, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "a window that grows by nothing": (lambda peer: frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "a window over 2^31": (lambda peer: frames.window_update(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "an initial window over 2^31": (
        lambda peer: frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "settings of half a value": (lambda peer: frames.frame(frames.SETTINGS, 0, 0, b"xxx"), ErrorCode.FRAME_SIZE_ERROR),
    "a ping of seven bytes": (lambda peer: frames.frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "a push": (lambda peer: frames.frame(frames.PUSH_PROMISE, 4, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "a continuation of nothing": (lambda peer: frames.frame(frames.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
    "a frame between headers": (
        lambda peer: peer.head(1, flags=0) + frames.frame(frames.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "endless headers": (
        lambda peer: peer.head(1, flags=0) + 9 * frames.frame(frames.CONTINUATION, 0, 1, bytes(8000)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "endless empty headers": (
        lambda peer: peer.head(1, flags=0) + 2000 * frames.frame(frames.CONTINUATION, 0, 1),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "three changes of the table's size": (
        lambda peer: frames.frame(frames.HEADERS, 4, 1, b"\x20\x3f\xe1\x1f\x20"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "no HPACK": (lambda peer: frames.frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    "a header that unfolds to much": (
        lambda peer: frames.frame(frames.HEADERS, 4, 1, b"\x40\x01x\x7f\xa1\x1e" + 4000 * b"v" + 60 * b"\xbe"),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "padding longer than the frame": (
        lambda peer: peer.head(1) + data(1, b"\x09xx", frames.PADDED),
        ErrorCode.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_connection_errors_end_the_connection_with_their_code(case: str) -> None:
    peer = Peer()
    send, code = BROKEN[case]
    peer.send(send(peer))
    assert goaway(await peer.received()) is code
    assert peer.wire.closed
    labels = peer.plane.metrics.grpc_faults.labels(code.name.lower())
    assert labels._value.get() == 1


STREAM_ERRORS: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "an uppercase header": (lambda peer: peer.head(1, Upper="x"), ErrorCode.PROTOCOL_ERROR),
    "a header of HTTP/1": (lambda peer: peer.head(1, connection="close"), ErrorCode.PROTOCOL_ERROR),
    "no path": (lambda peer: peer.head(1, path=""), ErrorCode.PROTOCOL_ERROR),
    "a wrong content-length": (
        lambda peer: peer.head(1, content_length="3") + data(1, b"xx", frames.END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a content-length that is not a number": (
        lambda peer: peer.head(1, content_length="x") + data(1, prefixed(b""), frames.END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "two content-lengths": (
        lambda peer: frames.frame(
            frames.HEADERS,
            frames.END_HEADERS,
            1,
            peer.head(1, content_length="6")[9:] + b"\x00\x0econtent-length\x017",
        ),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window over 2^31": (
        lambda peer: peer.head(1) + frames.window_update(1, (1 << 31) - 1),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "data behind the end": (
        lambda peer: peer.call(1, request(1, model="never")) + data(1, b"x"),
        ErrorCode.STREAM_CLOSED,
    ),
}


@pytest.mark.parametrize("case", STREAM_ERRORS)
async def test_stream_errors_end_only_their_stream(case: str) -> None:
    peer = Peer()
    send, code = STREAM_ERRORS[case]
    peer.send(send(peer))
    found = await peer.received()
    assert resets(found) == {1: code}
    peer.send(peer.call(3, request(1)))
    assert echoed(await peer.received(), 3) == [1]


REFUSED: dict[str, tuple[Callable[[Peer], bytes], int, str]] = {
    "too large": (lambda peer: peer.head(1) + data(1, b"\0" + (LIMIT + 1).to_bytes(4, "big")), 8, "--max-body-mb"),
    "cut off": (lambda peer: peer.head(1) + data(1, b"\0\0\0\0\x09abc", frames.END_STREAM), 3, "ended"),
    "nothing": (lambda peer: peer.head(1) + data(1, b"", frames.END_STREAM), 3, "ended"),
    "two messages": (
        lambda peer: peer.head(1) + data(1, prefixed(request(1)) + prefixed(request(2)), frames.END_STREAM),
        3,
        "one message",
    ),
    "an unknown flag": (lambda peer: peer.head(1) + data(1, prefixed(b"", 7), frames.END_STREAM), 3, "begins with 7"),
    "an unknown compression": (
        lambda peer: peer.head(1, grpc_encoding="br") + data(1, prefixed(b"x", 1), frames.END_STREAM),
        12,
        "gzip",
    ),
    "a bomb": (
        lambda peer: (
            peer.head(1, grpc_encoding="deflate")
            + data(1, prefixed(zlib.compress(bytes(1 << 20)), 1), frames.END_STREAM)
        ),
        8,
        "--max-body-mb",
    ),
    "a timeout below zero": (lambda peer: peer.call(1, request(1), grpc_timeout="-1S"), 13, "grpc-timeout"),
    "a timeout of nine digits": (lambda peer: peer.call(1, request(1), grpc_timeout="123456789S"), 13, "grpc-timeout"),
    "an unknown method": (lambda peer: peer.head(1, path="/x/y"), 12, "/x/y"),
    "too much metadata": (lambda peer: peer.head(1, more="0" * 24_000, flags=frames.END_HEADERS), 8, "metadata"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_errors_of_a_call_are_its_status(case: str) -> None:
    peer = Peer()
    send, status, says = REFUSED[case]
    peer.send(send(peer))
    for _ in range(20):
        if found := endings(peer, await peer.received()):
            break
        await asyncio.sleep(0.01)
    assert found[1]["grpc-status"] == str(status)
    assert says in found[1]["grpc-message"]
    peer.send(peer.call(3, request(1)))
    assert echoed(await peer.received(), 3) == [1]


def held(peer: Peer) -> int:
    """Return the bytes that the server holds of its budget."""
    return peer.listener._calls._budget._held


async def settled(peer: Peer, stream_id: int) -> list[Frame]:
    """Return the frames until a stream ended, which may involve a thread."""
    found: list[Frame] = []
    for _ in range(500):
        found += await peer.received()
        if any(kind == frames.HEADERS and flags & 1 and of == stream_id for kind, flags, of, _ in found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("the stream does not end")


@pytest.mark.parametrize("cut", [1, 3, 5, 7, 1000])
def test_messages_round_trip_wherever_they_are_cut(cut: int) -> None:
    sent = [bytes((index % 256,)) * size for index, size in enumerate([0, 1, 5, 2000, 0, 0, 3, 1500, 1024, 7])]
    raw = b"".join(prefixed(message, index % 2) for index, message in enumerate(sent))
    messages = Messages(LIMIT)
    for start in range(0, len(raw), cut):
        messages.feed(raw[start : start + cut])
    assert messages.size == len(raw)
    taken = []
    while messages.ready():
        taken.append(messages.take())
    assert taken == [(index % 2 == 1, message) for index, message in enumerate(sent)]
    assert messages.size == 0


@pytest.mark.matrix
def test_messages_that_wait_take_about_the_bytes_that_came() -> None:
    raw = prefixed(b"\x0a\x00") * 50_000
    for cut in (1, 16_384):
        tracemalloc.start()
        messages = Messages(LIMIT)
        for start in range(0, len(raw), cut):
            messages.feed(raw[start : start + cut])
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < 1.5 * len(raw)


async def test_unread_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_MOST_QUEUED", 100_000)
    peer = Peer()
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    for index in range(40):
        peer.send(peer.call(1 + 2 * index, request(*range(3000))))
        await peer.received()
    assert peer.connection.http2.sender.queued <= 100_000
    refused = len(peer.plane.errors)
    assert 0 < refused < 40
    assert "windows" not in str(peer.plane.errors[0])
    assert "read" in str(peer.plane.errors[0])
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}) + frames.window_update(0, 1 << 20))
    found = await peer.received()
    assert len({of for kind, _, of, _ in found if kind == frames.DATA}) == 40 - refused
    assert peer.connection.http2.sender.queued == 0


async def test_a_client_that_answers_pings_but_reads_no_answers_is_closed() -> None:
    peer = Peer()
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}) + peer.call(1, request(1)))
    await peer.received()
    for look in range(8):
        peer.send(frames.frame(frames.PING, frames.ACK, 0, bytes(8)))
        if look == 3:
            peer.send(frames.window_update(1, 1))
            await peer.received()
        assert not peer.wire.closed
        peer.connection.poll(5, 7)
    peer.connection.poll(5, 7)
    assert goaway(await peer.received()) is ErrorCode.ENHANCE_YOUR_CALM
    assert peer.wire.closed
    assert peer.connection.http2.sender.queued == 0


async def test_a_decompressed_message_is_counted_until_its_call_is_over() -> None:
    peer = Peer()
    packed = zlib.compress(request(*20_000 * [0], model="never"))
    assert len(packed) < 1000
    peer.send(peer.head(1, grpc_encoding="deflate") + data(1, prefixed(packed, 1), frames.END_STREAM))
    while not peer.plane.requests:
        await asyncio.sleep(0.01)
    assert held(peer) > 80_000
    peer.send(frames.reset(1, ErrorCode.CANCEL))
    assert held(peer) == 0


@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_decompression_stops_when_its_call_is_over(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()
    unfolded: list[int] = []

    def slowly(data: bytes, encoding: bytes, limit: int) -> Iterator[bytes]:
        for number in range(1000):
            unfolded.append(number)
            if number == 20:  # in a thread
                loop.call_soon_threadsafe(begun.set)
                go_on.wait(30)
            yield b"x"

    monkeypatch.setattr(calls, "pieces", slowly)
    peer = Peer()
    message = data(1, prefixed(b"packed", 1), frames.END_STREAM if path == INFER else 0)
    peer.send(peer.head(1, path, grpc_encoding="gzip") + message)
    await begun.wait()
    assert held(peer) > 0
    peer.send(frames.reset(1, ErrorCode.CANCEL))
    assert held(peer) == 0
    go_on.set()
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert len(unfolded) < 100
    assert held(peer) == 0


async def test_concurrent_decompression_is_bounded_by_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is four times the limit of one message, and each of these is ten times the limit."""
    unfolded = dict.fromkeys(range(1, 17, 2), 0)

    def large(data: bytes, encoding: bytes, limit: int) -> Iterator[bytes]:
        for _ in range(1000):
            unfolded[data[0]] += LIMIT // 100
            yield bytes(LIMIT // 100)

    monkeypatch.setattr(calls, "pieces", large)
    peer = Peer()
    for stream_id in unfolded:
        packed = prefixed(bytes((stream_id,)), 1)
        peer.send(peer.head(stream_id, grpc_encoding="gzip") + data(stream_id, packed, frames.END_STREAM))
    while len(peer.plane.errors) < len(unfolded):
        await asyncio.sleep(0.01)
    assert sum(size == 10 * LIMIT for size in unfolded.values()) <= 1  # which was alone at last
    assert held(peer) == 0


async def test_a_stream_holds_its_messages_until_they_are_answered() -> None:
    peer = Peer()
    for stream_id, model in ((1, "m"), (3, "never")):
        message = prefixed(zlib.compress(request(*20_000 * [0], model=model)), 1)
        peer.send(peer.head(stream_id, STREAM, grpc_encoding="deflate") + data(stream_id, 3 * message))
        expected = len(peer.plane.requests) + 3
        while len(peer.plane.requests) < expected:
            await asyncio.sleep(0.01)
        await peer.received()
        assert held(peer) > 240_000 if model == "never" else held(peer) == 0
    peer.send(data(1, b"\0\0", frames.END_STREAM) + frames.reset(3, ErrorCode.CANCEL))
    assert "in the middle of a message" in endings(peer, await settled(peer, 1))[1]["grpc-message"]
    assert held(peer) == 0


class TestStalls:
    """Checks of a connection for stalls; three of them are a minute here."""

    async def test_a_message_that_is_too_slow_ends_only_its_call(self) -> None:
        peer = Peer()
        whole = prefixed(request(1))
        peer.send(peer.head(3, STREAM) + data(3, whole + whole[:10]) + peer.head(5, STREAM) + data(5, whole))
        peer.send(peer.call(7, request(1, model="never")))
        await peer.received()
        peer.connection.poll(3, 1 << 30)  # which sees that the begun message of stream 3 is its second one
        peer.send(peer.head(9) + data(9, whole[:10]))
        for part in whole[10:13]:
            peer.connection.poll(3, 1 << 30)
            peer.send(data(9, bytes((part,))))
            assert set(peer.connection.http2.sender.streams) == {3, 5, 7, 9}
        peer.connection.poll(3, 1 << 30)
        found = await peer.received()
        assert {of: ending["grpc-status"] for of, ending in endings(peer, found).items()} == {3: "4", 9: "4"}
        assert set(peer.connection.http2.sender.streams) == {5, 7}
        assert held(peer) == 0
        for _ in range(10):
            peer.connection.poll(3, 1 << 30)
        assert set(peer.connection.http2.sender.streams) == {5, 7}

    async def test_a_message_that_brings_enough_has_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(call_module, "BODY_BYTES", 10)
        peer = Peer()
        whole = prefixed(request(*range(50)))
        peer.send(peer.head(1))
        for start in range(0, len(whole) - 5, 5):
            peer.send(data(1, whole[start : start + 5]))
            peer.connection.poll(3, 1 << 30)
        peer.send(data(1, whole[start + 5 :], frames.END_STREAM))
        assert echoed(await peer.received(), 1) == list(range(50))

    async def test_messages_that_are_slow_only_together_have_time(self) -> None:
        peer = Peer()
        whole = prefixed(request(1))
        peer.send(peer.head(1, STREAM) + data(1, whole[:10]))
        for _ in range(10):
            peer.connection.poll(3, 1 << 30)
            peer.connection.poll(3, 1 << 30)
            peer.send(data(1, whole[10:] + whole[:10]))
            await peer.received()
        assert set(peer.connection.http2.sender.streams) == {1}

    async def test_bytes_that_the_server_does_not_read_have_no_time_limit(self) -> None:
        peer = Peer()
        peer.send(peer.head(1) + data(1, prefixed(request(1))[:10]))
        peer.connection.pause_writing()
        for _ in range(10):
            peer.connection.poll(3, 1 << 30)
        assert set(peer.connection.http2.sender.streams) == {1}


async def test_a_call_that_is_not_grpc_is_answered_in_http() -> None:
    peer = Peer()
    peer.send(peer.head(1, content_type="text/plain"))
    assert endings(peer, await peer.received())[1][":status"] == "415"
    browser = Peer(begin=False)
    browser.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert bytes(browser.wire.written).startswith(b"HTTP/1.1 400 ")
    assert browser.wire.closed


async def test_a_client_that_cancels_or_leaves_is_forgotten() -> None:
    peer = Peer()
    peer.send(peer.call(1, request(1, model="never")) + peer.call(3, request(1, model="never")))
    peer.send(frames.reset(1, ErrorCode.CANCEL))
    assert [ticket.cancelled for ticket in peer.plane.tickets] == [True, False]
    peer.connection.connection_lost(None)
    assert [ticket.cancelled for ticket in peer.plane.tickets] == [True, True]
    assert not peer.connection.http2.sender.streams


async def test_a_deadline_counts_while_the_request_arrives() -> None:
    peer = Peer()
    peer.send(peer.head(1, grpc_timeout="20m"))
    await asyncio.sleep(0.05)
    assert endings(peer, await peer.received())[1]["grpc-status"] == "4"
    peer.send(peer.call(3, request(1), grpc_timeout="1000S"))
    await peer.received()
    left = peer.plane.requests[-1].left
    assert left is not None
    assert 100 < left <= 1000


async def test_a_client_that_does_not_read_is_not_read() -> None:
    peer = Peer()
    peer.connection.pause_writing()
    assert peer.wire.reading_paused
    peer.connection.resume_writing()
    assert not peer.wire.reading_paused


async def test_a_server_that_stops_answers_what_was_sent_before_it_was_known() -> None:
    peer = Peer()
    await peer.received()
    stopping = asyncio.create_task(peer.listener.stop(20))
    found = await peer.received()
    assert goaway(found) is ErrorCode.NO_ERROR
    [ping] = [payload for kind, flags, _, payload in found if kind == frames.PING and not flags]
    peer.send(peer.call(1, request(1)))
    peer.send(frames.frame(frames.PING, frames.ACK, 0, ping) + peer.head(3))
    found = await peer.received()
    assert echoed(found, 1) == [1]
    assert resets(found) == {3: ErrorCode.REFUSED_STREAM}
    assert peer.wire.closed
    peer.connection.connection_lost(None)
    await stopping


async def test_a_silent_client_gets_a_ping_and_is_then_closed() -> None:
    peer = Peer()
    await peer.received()
    for _ in range(3):
        peer.connection.poll(3, 5)
    assert [kind for kind, _, _, _ in await peer.received()] == [frames.PING]
    peer.connection.poll(3, 5)
    assert not peer.wire.aborted
    peer.connection.poll(3, 5)
    assert peer.wire.aborted


async def test_headers_are_remembered_only_while_they_mean_the_same() -> None:
    peer = Peer()
    # \x44 puts a path into the table, and \xbe is the entry put there last.
    first = b"\x44" + bytes((len(INFER),)) + INFER.encode()
    peer.send(frames.frame(frames.HEADERS, 4, 1, b"\x83\x86" + first + b"\x0f\x10\x10application/grpc"))
    peer.send(frames.frame(frames.HEADERS, 4, 3, b"\x83\x86\xbe\x0f\x10\x10application/grpc"))
    peer.send(frames.frame(frames.HEADERS, 4, 5, b"\x83\x86\xbe\x0f\x10\x10application/grpc"))
    other = b"\x44\x04/a/b"
    peer.send(frames.frame(frames.HEADERS, 4, 7, b"\x83\x86" + other + b"\x0f\x10\x10application/grpc"))
    peer.send(frames.frame(frames.HEADERS, 4, 9, b"\x83\x86\xbe\x0f\x10\x10application/grpc"))
    found = endings(peer, await peer.received())
    assert set(found) == {7, 9}
    assert "/a/b" in found[9]["grpc-message"]
