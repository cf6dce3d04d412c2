"""What metrics, the access log and traces cost: ``python -m benchmarks.serving.observability``.

Each table shows the figures of a server with them divided by those of one without.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer

from benchmarks.serving.contestants import Ingot, Start
from benchmarks.serving.loads import WrongAnswer
from benchmarks.serving.pairs import compare, options

_KINDS: Mapping[str, tuple[str, ...]] = {
    "metrics": (),
    "access-log-sampled": ("--access-log=sampled",),
    "access-log-all": ("--access-log=all",),
    "traces-none": ("--otlp={collector}", "--otlp-share=0"),
    "traces-sampled": ("--otlp={collector}", "--otlp-share=0.01"),
    "traces-all": ("--otlp={collector}", "--otlp-share=1"),
}
# Nothing is counted per request or batch. Users cannot turn metrics off.
_UNCOUNTED = """
from ingot.runtime import counts
counts.Count.inc = lambda self, by=1: None
counts.Histogram.observe = counts.Histogram.observe_all = lambda self, value: None
from ingot.__main__ import main
main()
"""


@dataclass(frozen=True)
class _Uncounted(Ingot):
    """The server with metrics that count nothing."""

    name: str = "uncounted"

    def command(self, start: Start) -> list[str]:
        python, _, _, *rest = super().command(start)
        return [python, "-c", _UNCOUNTED, *rest]


class _Sink(BaseHTTPRequestHandler):
    """Takes traces and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the standard library names it
        pass


@contextmanager
def _collector() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Sink) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.observability")
    parser.add_argument("kinds", nargs="*", default=list(_KINDS), help=f"of {', '.join(_KINDS)}; by default all")
    parsed = options(parser, ("tiny",))
    if unknown := {*parsed.kinds} - {*_KINDS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with _collector() as collector:
        for kind in parsed.kinds:
            print(f"{kind}:", flush=True)
            given = tuple(option.format(collector=collector) for option in _KINDS[kind])
            compare(Ingot(kind, options=given), _Uncounted() if kind == "metrics" else Ingot("plain"), parsed)


if __name__ == "__main__":
    try:
        main()
    except WrongAnswer as error:
        raise SystemExit(str(error)) from error
