"""Streams that end early: clients that leave or read slowly, and engine processes that end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.runtime.machine.memory import engine_processes
from tests.server.completion import written
from tests.server.outside import wait_until

PROMPT = "hello there"
# 64 answers of 117 tokens in 2 slots: seconds of work.
LONG = {"model": written.NAME, "prompt": PROMPT, "n": 64, "max_tokens": 117, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = written.archive(tmp_path_factory.mktemp("writer"))
    with ingot.serve(str(path), http_port=0, grpc_port=0, slots=2) as running:
        yield running


def metric(server: RunningServer, name: str, **labels: str) -> float:
    text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    assert lines, f"the metrics have no {name}"
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(value) for given, value in lines if all(each in given for each in wanted))


def cancelled(server: RunningServer) -> float:
    httpx.post(f"{server.http_url}/v1/completions", json={**LONG, "n": 1}, trust_env=False).raise_for_status()
    return metric(server, "ingot_requests_total", code="cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(server: RunningServer, stream: bool) -> None:
    before, made = cancelled(server), metric(server, "ingot_tokens_total", kind="answer")
    with httpx.Client(base_url=server.http_url, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=0.3)
    wait_until(lambda: metric(server, "ingot_slots_in_use") == 0)
    wait_until(lambda: cancelled(server) > before)
    assert metric(server, "ingot_in_flight_requests") == 0
    assert 0 < metric(server, "ingot_tokens_total", kind="answer") - made < 64 * 117


def test_an_engine_process_that_ends_ends_each_stream_with_one_error(server: RunningServer) -> None:
    found: list[list[str]] = []
    begun = threading.Barrier(3)

    def read() -> None:
        url = f"{server.http_url}/v1/completions"
        with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60, trust_env=False) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            first = next(lines)
            begun.wait(timeout=60)
            found.append([first, *lines])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    begun.wait(timeout=60)
    for process in engine_processes():
        os.kill(int(process), signal.SIGKILL)
    for reader in readers:
        reader.join(timeout=60)
    assert len(found) == 2
    ended = [lines for lines in found if '"error"' in lines[-1]]
    assert ended  # the answers of the other may all have waited for a slot just then: they are written later
    for lines in ended:
        *pieces, last = map(json.loads, lines)
        assert not any("error" in piece for piece in pieces)
        assert {"message", "type", "param", "code"} == {*last["error"]}
    for lines in found:
        assert lines in ended or (lines[-1] == "[DONE]" and not any('"error"' in line for line in lines))

    def answers() -> bool:
        body = {"model": written.NAME, "prompt": PROMPT}
        again = httpx.post(f"{server.http_url}/v1/completions", json=body, trust_env=False)
        return again.status_code == 200 and again.json()["choices"][0]["text"] == written.text(PROMPT, 16)

    wait_until(answers)
    assert metric(server, "ingot_slots_in_use") == 0


def test_a_client_that_does_not_read_delays_nobody(server: RunningServer) -> None:
    place = urlsplit(server.http_url)
    body = json.dumps({**LONG, "n": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((place.hostname, place.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(head + body)
        for _ in range(4):
            answer = httpx.post(f"{server.http_url}/v1/completions", json={**LONG, "n": 1}, trust_env=False, timeout=30)
            assert answer.json()["choices"][0]["text"] == written.text(PROMPT, 117, stop=False)
        wait_until(lambda: metric(server, "ingot_slots_in_use") == 0)
        received = b""
        while b"[DONE]" not in received:
            received += slow.recv(1 << 16)
            time.sleep(0.001)


def test_a_stop_text_frees_the_row_before_its_piece_is_read(server: RunningServer) -> None:
    whole = written.text(PROMPT, 40)
    made = metric(server, "ingot_tokens_total", kind="answer")
    body: dict[str, Any] = {**LONG, "n": 1, "stop": whole[3:5]}
    assert httpx.post(f"{server.http_url}/v1/completions", json=body, trust_env=False).status_code == 200
    wait_until(lambda: metric(server, "ingot_slots_in_use") == 0)
    assert 5 <= metric(server, "ingot_tokens_total", kind="answer") - made < 60


def test_too_many_requests_are_refused_in_the_apis_form(tmp_path: Path) -> None:
    path = written.archive(tmp_path)
    with ingot.serve(str(path), http_port=0, grpc_port=0, slots=1, max_queue=2) as small:
        answer = httpx.post(f"{small.http_url}/v1/completions", json=LONG, trust_env=False)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["retry-after"]
