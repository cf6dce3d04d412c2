"""HTTP/1.1 as events: independent of how the bytes are cut, with bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.protocol.keys import BoundedCache
from ingot.server.http.parser import MAX_HEAD_BYTES, Event, Parser, RequestHead, Signal

POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
CHUNKS = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
OTHER = b"GET /v2/models HTTP/1.1\r\nHost: x\r\n\r\n"


def parser() -> Parser:
    return Parser(BoundedCache(8), 1 << 20)


def joined(events: list[Event]) -> list[Event]:
    """Return events with the parts of a body joined."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += event
        else:
            found.append(event)
    return found


@pytest.mark.matrix
@given(st.lists(st.sampled_from([POST, CHUNKS, LIVE, OTHER]), max_size=4), st.data())
def test_the_cut_of_the_bytes_changes_nothing(requests: list[bytes], draw: st.DataObject) -> None:
    stream = b"".join(requests)
    whole = joined(parser().receive(stream))
    cuts = sorted(draw.draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    cut = parser()
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert joined([event for part in parts if part for event in cut.receive(part)]) == whole
    assert sum(isinstance(event, RequestHead) for event in whole) == len(requests) == whole.count(Signal.END)


def test_a_head_is_parsed() -> None:
    post, chunks, live, other = (parser().receive(data)[0] for data in (POST, CHUNKS, LIVE, OTHER))
    assert isinstance(post, RequestHead)
    assert (post.length, post.infer and post.infer.model, post.keep_alive) == (3, "m", True)
    assert isinstance(chunks, RequestHead)
    assert chunks.length is None
    assert isinstance(live, RequestHead)
    assert live.probe == b"/v2/health/live"
    assert isinstance(other, RequestHead)
    assert (other.probe, other.infer) == (None, None)


def test_only_plain_heads_are_remembered() -> None:
    known: BoundedCache[bytes, RequestHead] = BoundedCache(8)
    for data in (POST, CHUNKS, LIVE, OTHER, POST.replace(b"Host", b"Expect: 100-continue\r\nHost")):
        head = data[: data.index(b"\r\n\r\n") + 4]
        Parser(known, 1 << 20).learn(head)
    assert list(known) == [POST[:-3], LIVE]
    known.clear()
    Parser(known, 2).learn(POST[:-3])
    assert not known


WRONG = {
    "garbage": (b"\x16\x03\x01\x02\x00\r\n\r\n", Signal.MALFORMED),
    "another version": (LIVE.replace(b"1.1", b"3.0"), Signal.WRONG_VERSION),
    "a path that is not ASCII": (POST.replace(b"/m/", b"/\xff/"), Signal.MALFORMED),
}


@pytest.mark.parametrize("case", WRONG)
def test_unparsable_bytes_are_an_event(case: str) -> None:
    data, signal = WRONG[case]
    assert parser().receive(data) == [signal]


@pytest.mark.parametrize("begin", [LIVE[:-2], CHUNKS[:-2], CHUNKS[: CHUNKS.index(b"3\r\n") + 1] + b";"])
def test_buffered_bytes_are_bounded(begin: bytes) -> None:
    """Headers, trailers, and the extension of a chunk that never end."""
    endless = parser()
    events = endless.receive(begin)
    for _ in range(2 * MAX_HEAD_BYTES // 1000):
        events = endless.receive(b"a: %b\r\n" % (b"b" * 995) if begin.endswith(b"\r\n") else b"b" * 1000)
        if events:
            break
    assert events == [Signal.TOO_LARGE]
