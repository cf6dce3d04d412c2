"""A closed-loop HTTP load generator: so many clients, each sending its next request when the last is answered.

It is a separate program (``python -m ingot.bench.load URL < BODY``), so that it does not share an
interpreter lock with the server that it measures, and speaks HTTP/1.1 by hand, since client libraries cost more time
than the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run measured. ``errors`` are answers other than 200."""

    requests: int
    errors: int
    seconds: float
    p50_ms: float
    p99_ms: float

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return (self.requests - self.errors) / self.seconds


def run(url: str, body: bytes, header_length: int | None, *, clients: int, seconds: float) -> Load:
    """Measure a server from another process.

    Args:
        url: an infer endpoint.
        body: the request that every client repeats.
        header_length: the length of its JSON header if raw tensors follow it.
        clients: how many requests are in flight at any time.
        seconds: how long; the first tenth warms up and is not counted.
    """
    command = [sys.executable, "-m", "ingot.bench.load", url, "--clients", str(clients), "--seconds", str(seconds)]
    if header_length is not None:
        command += ["--header-length", str(header_length)]
    result = subprocess.run(command, check=True, input=body, stdout=subprocess.PIPE)
    return Load(**json.loads(result.stdout))


async def _client(host: str, port: int, request: bytes, end: float, times: list[tuple[float, float, bool]]) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        while (began := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(next(lengths).split(b":")[1]))
            times.append((began, time.perf_counter() - began, head.startswith(b"HTTP/1.1 200")))
    finally:
        writer.close()


async def _measure(url: str, body: bytes, header_length: int | None, clients: int, seconds: float, key: str) -> Load:
    parts = urlsplit(url)
    more = "" if header_length is None else f"Inference-Header-Content-Length: {header_length}\r\n"
    more += f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    times: list[tuple[float, float, bool]] = []
    start = time.perf_counter()
    counted_from = start + seconds / 10
    await asyncio.gather(
        *(
            _client(parts.hostname or "", parts.port or 80, head.encode() + body, start + seconds, times)
            for _ in range(clients)
        )
    )
    counted = [(took, good) for began, took, good in times if began >= counted_from]
    if not counted:
        raise SystemExit("no request was answered in the time given")
    latencies = sorted(took for took, _ in counted)
    return Load(
        requests=len(counted),
        errors=sum(not good for _, good in counted),
        seconds=time.perf_counter() - counted_from,
        p50_ms=latencies[len(latencies) // 2] * 1e3,
        p99_ms=latencies[len(latencies) * 99 // 100] * 1e3,
    )


def main() -> None:
    """Run from the command line and print the result as JSON."""
    parser = argparse.ArgumentParser(description="Closed-loop HTTP load")
    parser.add_argument("url")
    parser.add_argument("--header-length", type=int, help="length of the JSON header before raw tensors")
    parser.add_argument("--key-file", type=Path, help="file of the API key, if the server needs one")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    key = "" if options.key_file is None else options.key_file.read_text().strip()
    work = _measure(options.url, sys.stdin.buffer.read(), options.header_length, options.clients, options.seconds, key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(work))))


if __name__ == "__main__":
    main()
