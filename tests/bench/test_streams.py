"""``ingot bench --protocol openai``: tokens and their times, of Ingot and of a server whose times are known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

import ingot
from tests.server.completion import written
from tests.support import RunIngot, refused, succeeded

SHORT = ("--protocol", "openai", "--seconds", "1", "--warmup", "0", "--json")


def points(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["points"]
    return found


def test_tokens_of_answers_are_counted(run_ingot: RunIngot, tmp_path: Path) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 9, "ignore_eos": True} for prompt in ("one", "two")]
    (tmp_path / "bodies.json").write_text(json.dumps(bodies))
    with ingot.serve(str(written.archive(tmp_path)), http_port=0, grpc_port=0) as server:
        given = ("bench", server.http_url, written.NAME, "-c", "3", "--data", tmp_path / "bodies.json", *SHORT[:-1])
        [found] = points(succeeded(run_ingot(*given, "--json")))
        table = succeeded(run_ingot(*given))
    assert (found["failed"], found["requests"] > 3) == (0, True)
    assert found["tokens_rate"] == pytest.approx(9 * found["rate"])
    assert 0 < found["ttft_p50"] < found["p50"]
    assert 0 < found["itl_p50"] < found["p50"] / 8 + 1e-9
    assert "tokens/s" in table
    assert "ttft p50" in table


class Stream(BaseHTTPRequestHandler):
    """Answers each request with events at known times."""

    protocol_version = "HTTP/1.1"
    events: ClassVar[tuple[tuple[float, str], ...]] = ()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["stream"]
        assert body["stream_options"] == {"include_usage": True}
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError):  # at the end of the load
            for wait, event in self.events:
                time.sleep(wait)
                content = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(*events: tuple[float, str]) -> Iterator[str]:
    handler = type("Handler", (Stream,), {"events": events})
    quiet = type("Server", (ThreadingHTTPServer,), {"handle_error": lambda *_: None, "daemon_threads": True})
    with quiet(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


USAGE = '{"choices": [], "usage": {"completion_tokens": 3}}'


def test_times_are_those_of_the_server(run_ingot: RunIngot) -> None:
    piece = '{"choices": [{"text": "a"}]}'
    with serving((0.1, piece), (0.05, piece), (0.05, piece), (0, USAGE), (0, "[DONE]")) as url:
        [found] = points(succeeded(run_ingot("bench", url, "any", "-c", "1", *SHORT)))
    assert found["ttft_p50"] >= 0.1
    assert found["itl_p50"] >= 0.05
    assert found["p50"] >= 0.2


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (((0, "{}"), (0, '{"error": "out of slots"}')), "the stream ended early: out of slots"),
        (((0, "{}"), (0, "[DONE]")), "does not support stream_options.include_usage"),
    ],
)
def test_streams_that_fail_are_counted(
    run_ingot: RunIngot, events: tuple[tuple[float, str], ...], message: str
) -> None:
    with serving(*events) as url:
        result = run_ingot("bench", url, "any", "-c", "1", *SHORT)
    assert result.returncode == 1
    assert message in result.stderr


def test_other_files_are_refused(run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text('["a text"]')
    result = run_ingot("bench", "http://127.0.0.1:9", "any", "--data", tmp_path / "text.json", "--protocol", "openai")
    assert "has to hold one body of /v1/completions" in refused(result)
