"""HTTP/2 programs without gRPC: curl, h2load and nghttp, which send the bytes that gRPC would."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.protocol import open_inference_pb2 as pb
from tests.server.outside import (
    INFER,
    Service,
    affine,
    affine_of,
    floats,
    large,
    message,
    request_of,
    row,
    unpacked,
    wait_until,
)
from tests.support import RequireTool

pytestmark = pytest.mark.usefixtures("still_answers")

HEADERS = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
NGHTTP_HEADERS = ["-H:method: POST", *HEADERS]


def run(*command: str, seconds: float = 60) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def body(folder: Path, request: pb.ModelInferRequest, name: str = "body") -> str:
    path = folder / name
    path.write_bytes(message(request))
    return str(path)


class TestCurl:
    @pytest.fixture
    def curl(self, require_tool: RequireTool, service: Service) -> list[str]:
        program = require_tool("curl")
        assert "HTTP2" in run(program, "--version")
        return [program, "-sS", "--http2-prior-knowledge", "--noproxy", "*", *HEADERS, f"http://{service.grpc}{INFER}"]

    @pytest.mark.matrix
    def test_many_at_once(self, curl: list[str], tmp_path: Path) -> None:
        def ask(number: int) -> None:
            # A process each: curl 7.88 stumbles when it uses a connection again that it knew beforehand to be HTTP/2.
            sent, answer = body(tmp_path, affine(row(number)), f"body{number}"), tmp_path / f"answer{number}"
            head = tmp_path / f"head{number}"
            run(*curl, "--data-binary", f"@{sent}", "-o", str(answer), "-D", str(head))
            assert floats(unpacked(answer.read_bytes())) == affine_of(row(number))
            assert "grpc-status: 0" in head.read_text()

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(60)))

    def test_4_mib_both_ways(self, curl: list[str], tmp_path: Path) -> None:
        sent, answer = body(tmp_path, request_of(large(7), "increment")), tmp_path / "answer"
        run(*curl, "--data-binary", f"@{sent}", "-o", str(answer))
        reply = unpacked(answer.read_bytes())
        assert np.array_equal(np.frombuffer(reply.raw_output_contents[0], np.float32), large(7)[0] + 1)

    @pytest.mark.matrix
    def test_a_deadline_is_answered_with_a_status_and_a_client_that_gives_up_is_forgotten(
        self, curl: list[str], service: Service, tmp_path: Path
    ) -> None:
        sent, head = body(tmp_path, request_of(np.ones((1, 3), np.float32), "held")), tmp_path / "head"
        before = service.count("ingot_requests_total", model="held", code="cancelled")
        with service.gate.closed():
            with subprocess.Popen([*curl, "--data-binary", f"@{sent}"], stdout=subprocess.DEVNULL) as leaving:
                wait_until(lambda: service.count("ingot_in_flight_requests", model="held") > 0)
                leaving.kill()
            wait_until(lambda: service.count("ingot_requests_total", model="held", code="cancelled") == before + 1)
            # grpcio ends the stream with an error of HTTP/2, ours with a status; clients of gRPC accept both.
            subprocess.run(
                [*curl, "--data-binary", f"@{sent}", "-H", "grpc-timeout: 20m", "-D", str(head)], capture_output=True
            )
        assert "grpc-status: 0" not in head.read_text()
        wait_until(lambda: service.count("ingot_in_flight_requests") == 0)


class TestH2load:
    @pytest.mark.parametrize(("clients", "streams"), [(1, 1), (1, 100), (8, 16)])
    def test_every_answer_arrives_whole(
        self, service: Service, require_tool: RequireTool, tmp_path: Path, clients: int, streams: int
    ) -> None:
        program, calls = require_tool("h2load"), 800
        before = service.count("ingot_requests_total", model="affine", code="ok", protocol="grpc")
        # One thread: with more, h2load counts what each has sent, not what each was asked to.
        shape = ["-t", "1", "-n", str(calls), "-c", str(clients), "-m", str(streams)]
        sent = body(tmp_path, affine([1, 2, 3]))
        told = run(program, *shape, "-d", sent, *HEADERS, f"http://{service.grpc}{INFER}")
        assert f"{calls} succeeded, 0 failed, 0 errored, 0 timeout" in told
        # h2load does not check answers, but all are the same, so each has as many bytes as one.
        answer = pb.ModelInferResponse.FromString(ask_once(service))
        found = re.search(r"\((\d+)\) data", told)
        assert found is not None
        assert int(found[1]) == calls * (5 + answer.ByteSize())
        after = service.count("ingot_requests_total", model="affine", code="ok", protocol="grpc")
        assert after - before == calls + 1

    @pytest.mark.matrix
    def test_4_mib_both_ways_through_tiny_and_huge_windows(
        self, service: Service, require_tool: RequireTool, tmp_path: Path
    ) -> None:
        program, sent = require_tool("h2load"), body(tmp_path, request_of(large(1), "increment"))
        for bits in ("12", "30"):
            windows = ["-w", bits, "-W", bits]
            told = run(
                program, "-t1", "-n8", "-c2", "-m2", *windows, "-d", sent, *HEADERS, f"http://{service.grpc}{INFER}"
            )
            assert "8 succeeded, 0 failed, 0 errored, 0 timeout" in told
            found = re.search(r"\((\d+)\) data", told)
            assert found is not None
            assert int(found[1]) > 8 * (4 << 20)


class TestNghttp:
    def test_answers_come_with_their_trailers(
        self, service: Service, require_tool: RequireTool, tmp_path: Path
    ) -> None:
        program, sent = require_tool("nghttp"), body(tmp_path, affine([1, 2, 3]))
        told = run(program, "-nv", "-m", "50", "-d", sent, *NGHTTP_HEADERS, f"http://{service.grpc}{INFER}")
        assert told.count(":status: 200") == 50
        assert told.count("grpc-status: 0") == 50
        assert "error" not in told.replace("error_code=NO_ERROR", "").lower()

    def test_4_mib_both_ways_through_a_small_window(
        self, service: Service, require_tool: RequireTool, tmp_path: Path
    ) -> None:
        program, sent = require_tool("nghttp"), body(tmp_path, request_of(large(2), "increment"))
        command = [program, "-w", "14", "-W", "16", "-d", sent, *NGHTTP_HEADERS, f"http://{service.grpc}{INFER}"]
        result = subprocess.run(command, capture_output=True, timeout=60)
        assert result.returncode == 0
        reply = unpacked(result.stdout)
        assert np.array_equal(np.frombuffer(reply.raw_output_contents[0], np.float32), large(2)[0] + 1)

    def test_padding_and_trailers_of_the_client(
        self, service: Service, require_tool: RequireTool, tmp_path: Path
    ) -> None:
        if service.kind == "grpcio":
            pytest.skip("gRPC's core does not accept padded HEADERS (grpc/grpc: 'Invalid HPACK index received')")
        program, sent = require_tool("nghttp"), body(tmp_path, affine([1, 2, 3]))
        options = ["-nv", "-b", "200", "--trailer", "x-checksum: 1", "-d", sent]
        told = run(program, *options, *NGHTTP_HEADERS, f"http://{service.grpc}{INFER}")
        assert "grpc-status: 0" in told


def ask_once(service: Service) -> bytes:
    # Imported late: these tests ask with gRPC's library only to know the answer's size.
    import grpc

    with grpc.insecure_channel(service.grpc) as channel:
        ask: Any = channel.unary_unary(INFER)
        return bytes(ask(affine([1, 2, 3]).SerializeToString(), timeout=60))
