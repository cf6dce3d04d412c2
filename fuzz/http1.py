"""HTTP/1.1, whole against cut and chunked: ``make fuzz``, or ``python -m fuzz.http1 [-max_total_time=60]``.

An input is the bytes of a connection, behind a byte that chooses how they are cut. The events must not depend on the
cuts, nor on heads that the parser remembers; and a body must be the same whether its length was announced or it came
in chunks.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ingot.server.http.parser"]):
    from ingot.protocol.keys import BoundedCache
    from ingot.server.http.parser import Event, Parser, RequestHead, Signal
    from tests.server.http.test_parser import CHUNKS, LIVE, OTHER, POST, joined

_HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"
_KNOWN: BoundedCache[bytes, RequestHead] = BoundedCache(64)


def target(data: bytes) -> None:
    """Parse one input in several ways."""
    if not data:
        return
    step, stream = 1 + data[0] % 64, data[1:]
    whole = str(_events([stream]))  # errors have no equality
    if (cut := str(_events([stream[at : at + step] for at in range(0, len(stream), step)]))) != whole:
        raise AssertionError(f"cut at {step}: {whole} becomes {cut}")
    if (single := str(_events([stream[at : at + 1] for at in range(len(stream))]))) != whole:
        raise AssertionError(f"byte by byte: {whole} becomes {single}")
    if (known := str(_events([stream], _KNOWN))) != whole:
        raise AssertionError(f"with heads that are known: {whole} becomes {known}")
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for at in range(0, len(stream), step) if (part := stream[at : at + step])
    )
    sized = _body(_HEAD + b"Content-Length: %d\r\n\r\n" % len(stream) + stream)
    if sized != stream or _body(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n") != sized:
        raise AssertionError("a body in chunks differs from the same body whole")


def _events(parts: list[bytes], known: BoundedCache[bytes, RequestHead] | None = None) -> list[Event]:
    parser = Parser(BoundedCache(1) if known is None else known, 1 << 16)
    found: list[Event] = []
    for part in parts:
        if part and not any(isinstance(event, Signal) and event is not Signal.END for event in found):  # it is over
            found += parser.receive(part)
    return joined(found)


def _body(request: bytes) -> bytes:
    events = _events([request])
    if events[-1] is not Signal.END or not isinstance(events[0], RequestHead):
        raise AssertionError(f"a plain request is read as {events}")
    return b"".join(event for event in events if isinstance(event, bytes))


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix="ingot-fuzz-")) / "corpus"
    corpus.mkdir()
    for number, seed in enumerate((POST, CHUNKS, LIVE, OTHER, POST + CHUNKS + LIVE, LIVE * 3)):
        (corpus / str(number)).write_bytes(b"\x07" + seed)
    atheris.Setup([*sys.argv, str(corpus), "-max_len=2000"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
