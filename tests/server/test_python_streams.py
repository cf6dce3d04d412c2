"""Models in Python that answer in parts: over each protocol, with errors, clients that leave, and lost processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferResult

import ingot
from ingot import RunningServer
from ingot.cli.serving.serve import curl
from ingot.errors import ExportError, IngotError, InvalidArgument, Unavailable, Unsupported
from ingot.export.python_model import export_class
from ingot.runtime.engines.python.generators import Ended, Generators
from ingot.server.torchserve import torchserve_inference_pb2 as inference_pb
from tests import onnx_models
from tests.server.outside import wait_until
from tests.server.test_decoupled import events, stream
from tests.server.test_python_models import engine_processes, serving, source_of, text, wait_ready
from tests.server.test_sequences import metric
from tests.server.torchserve.test_grpc import INFERENCE, ask
from tests.support import RequireTool, RunIngot, succeeded

CODE = """
import asyncio, os
from collections.abc import AsyncIterator, Iterator

CLOSED = []

def words_of(text):
    try:
        for index, word in enumerate(text.split()):
            if word == "fail":
                raise ValueError("a bad word")
            if word == "die":
                os._exit(3)
            while word == "forever":
                yield f"{index}:{word}"
            yield f"{index}:{word}"
    finally:
        CLOSED.append(text)

class Words:
    def predict_one(self, text: str) -> Iterator[str]:
        return iter(CLOSED[-1:]) if text == "closed?" else words_of(text)

    def example(self):
        return ["a b", "c"]

class Letters:
    async def predict_one(self, text: str) -> AsyncIterator[str]:
        for letter in text:  # without waiting for anything
            yield letter

class Ticks:
    inputs = ["text:str[batch]", "size:int64[batch]"]
    outputs = ["text:bytes[batch]", "at:int64[batch]", "open:int64[batch]"]
    running = 0

    async def predict_one(self, sample):
        at = 0
        self.running += 1
        try:
            while True:
                await asyncio.sleep(0)
                yield {"text": sample["text"] + "x" * sample["size"], "at": at, "open": self.running}
                at += 1
        finally:
            self.running -= 1
"""
MODELS = ("Words", "Ticks", "Letters")


def sources(folder: Path) -> list[str]:
    return [source_of(folder, CODE, name) for name in MODELS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(*sources(tmp_path_factory.mktemp("models"))) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.http_url}/v2/models", trust_env=False, timeout=60) as client:
        yield client


def tick(word: str = "t", size: int = 0) -> dict[str, Any]:
    return {**text(word), "size": np.array([size])}


def answers(url: str, model: str, inputs: dict[str, Any], **parameters: float) -> Iterator[Any]:
    """Yield the first output of each answer."""
    with ingot.Client(url) as client:
        for answer in client.stream(model, inputs, parameters=parameters):
            [value] = next(iter(answer.values()))
            yield value.decode()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_each_value_that_the_code_yields_is_an_answer(server: RunningServer, protocol: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    assert [*answers(url, "words", text("a b c"))] == ["0:a", "1:b", "2:c"]
    assert not [*answers(url, "words", text(""))]
    assert [*answers(url, "letters", text("abc"))] == ["a", "b", "c"]
    assert not [*answers(url, "letters", text(""))]
    assert [*answers(url, "words", text("a b c"), max_steps=2)] == ["0:a", "1:b"]
    found = answers(url, "words", text("a fail b"))
    assert next(found) == "0:a"
    with pytest.raises(IngotError, match="the model rejects this input: a bad word"):
        next(found)
    with pytest.raises(IngotError, match="whole number above 0"):
        next(answers(url, "words", text("a"), max_steps=0))
    with ingot.Client(url) as client:
        with pytest.raises(Unsupported, match="generate_stream"):
            client.infer("words", text("a"))
        with pytest.raises(IngotError, match="send one sample per request"):
            next(client.stream("words", text("a", "b")))
    with pytest.raises(IngotError, match=r"the request's time was over after \d+ answers"):
        for _ in answers(url, "ticks", tick(), timeout=300_000):
            pass


def test_server_sent_events_end_with_one_error(http: httpx.Client) -> None:
    with http.stream("POST", "words/generate_stream", json={"text": "a fail b", "id": "7"}) as response:
        first, last = events(response)
    assert first == {"id": "7", "model_name": "words", "model_version": "1", "output": "0:a"}
    assert last == {"error": "the model rejects this input: a bad word"}
    refused = http.post("words/generate_stream", json={"text": "fail"})
    assert refused.status_code == 400
    assert refused.json()["error"].endswith("a bad word")
    assert http.post("words/generate_stream", json={"text": ""}).text == ""
    assert http.post("words/generate", json={"text": "a b", "max_steps": 1}).json()["output"] == "0:a"
    assert http.post("words/generate", json={"text": "", "max_steps": 1}).status_code == 500


def test_hugging_faces_form_streams_if_it_says_so(server: RunningServer, http: httpx.Client) -> None:
    url = f"{server.http_url}/models/words"
    with http.stream("POST", url, json={"inputs": "a fail b", "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert events(response) == [{"output": "0:a"}, {"error": "the model rejects this input: a bad word"}]
    with http.stream("POST", url, json={"inputs": {"text": "a b"}, "stream": True}) as response:
        assert events(response) == [{"output": "0:a"}, {"output": "1:b"}]
    assert http.post(url, json={"inputs": ["a", "b"], "stream": True}).status_code == 400
    refused = http.post(url, json={"inputs": "a"})
    assert refused.status_code == 501
    assert "'stream': true" in refused.json()["error"]


def test_tritons_client_reads_the_last_answer_of_many_streams(server: RunningServer) -> None:
    with stream(server) as (client, found):
        for index in range(20):
            tensor = InferInput("text", [1], "BYTES")
            tensor.set_data_from_numpy(np.array([" ".join("ab"[: 1 + index % 2])], object))
            client.async_stream_infer("words", [tensor], request_id=str(index), enable_empty_final_response=True)
        values: dict[str, list[Any]] = {}
        while sum(each[-1] is None for each in values.values()) < 20:
            answer = found.get(timeout=60)
            assert isinstance(answer, InferResult)
            response, output = answer.get_response(), answer.as_numpy("output")
            assert response.parameters["triton_final_response"].bool_param is (output is None)
            values.setdefault(response.id, []).append(None if output is None else output[0])
    assert values == {str(index): [b"0:a", *[b"1:b"] * (index % 2), None] for index in range(20)}


def test_answers_are_printed_as_they_come(server: RunningServer, run_ingot: RunIngot) -> None:
    for url in (server.http_url, server.grpc_url):
        printed = succeeded(run_ingot("infer", url, "words", "--input", "text=one two"))
        assert printed.index("0:one") < printed.index("1:two")
        failed = run_ingot("infer", url, "words", "--input", "text=one fail")
        assert failed.returncode == 1
        assert "0:one" in failed.stdout
        assert "the stream ended after 1 answer: " in failed.stderr
        assert "a bad word" in failed.stderr


def test_the_command_that_serve_prints_streams(server: RunningServer, require_tool: RequireTool) -> None:
    require_tool("curl")
    words, ticks, _ = server._server.repository
    done = subprocess.run(["bash", "-c", curl(server.http_url, words)], capture_output=True, text=True, check=True)
    assert [json.loads(line[6:])["output"] for line in done.stdout.split("\n\n") if line] == ["0:a", "1:b"]
    assert curl(server.http_url, ticks).endswith('/generate_stream -d \'{"text":"1","size":1}\'')


def test_torchserves_grpc_streams(tmp_path: Path) -> None:
    ports: dict[str, Any] = {"torchserve": True, "torchserve_ports": "0,0,0,0,0", "insecure": True}
    with (
        serving(sources(tmp_path)[0], **ports) as running,
        grpc.insecure_channel(running.torchserve_urls["gRPC inference"].removeprefix("grpc://")) as channel,
    ):
        request = inference_pb.PredictionsRequest(model_name="words", input={"data": b"a b fail"})
        found = ask(channel, INFERENCE + "StreamPredictions", request, inference_pb.PredictionResponse, stream=True)
        assert [json.loads(next(found).prediction) for _ in range(2)] == ["0:a", "1:b"]
        with pytest.raises(grpc.RpcError, match="a bad word"):
            next(found)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_that_leaves_ends_its_generator(server: RunningServer, protocol: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    found = answers(url, "words", text(f"left {protocol} forever"))
    assert next(found) == "0:left"
    assert metric(server.http_url, 'ingot_in_flight_requests{model="words"') == 1
    found.close()  # type: ignore[attr-defined]
    wait_until(lambda: metric(server.http_url, 'ingot_in_flight_requests{model="words"') == 0)
    wait_until(lambda: [*answers(url, "words", text("closed?"))] == [f"left {protocol} forever"])
    assert metric(server.http_url, f'ingot_requests_total{{code="cancelled",model="words",protocol="{protocol}"') == 1


def test_a_slow_reader_holds_back_its_own_stream_only(server: RunningServer) -> None:
    """The slow client's generator stops, once the buffers on the way are full; the other one continues."""
    host, port = server.http_url.removeprefix("http://").split(":")
    body = json.dumps({"text": "slow", "size": 1 << 20}).encode()
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v2/models/ticks/generate_stream HTTP/1.1\r\nHost: x\r\n")
        slow.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert slow.recv(100)
        with ingot.Client(server.http_url) as client:
            for count, answer in enumerate(client.stream("ticks", tick("quick"))):
                assert answer["at"].tolist() == [count]
                assert answer["open"].tolist() == [2]
                if count == 300:
                    break
        seen = b""
        while b'"at":200' not in seen and (part := slow.recv(1 << 20)):  # the slow one's answers, all in order
            seen = seen[-100:] + part
        assert b'"at":200' in seen
    wait_until(lambda: metric(server.http_url, 'ingot_in_flight_requests{model="ticks"') == 0)
    with ingot.Client(server.http_url) as client:
        assert next(client.stream("ticks", tick()))["open"].tolist() == [1]


def test_streams_share_batches(server: RunningServer) -> None:
    before = metric(server.http_url, 'ingot_batch_rows_count{model="ticks"')
    barrier = threading.Barrier(8)

    def ask(index: int) -> list[str]:
        barrier.wait()
        return [*answers(server.http_url, "ticks", tick(str(index)), max_steps=50)]

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(ask, range(8))] == [[str(index)] * 50 for index in range(8)]
    assert metric(server.http_url, 'ingot_batch_rows_count{model="ticks"') - before < 8 * 50


def test_a_killed_process_ends_its_streams_with_one_error_each(tmp_path: Path) -> None:
    before = engine_processes()
    with serving(*sources(tmp_path)[:1]) as server:
        opened = [answers(server.http_url, "words", text(f"{index} forever")) for index in range(3)]
        assert [next(each) for each in opened] == ["0:0", "0:1", "0:2"]
        [process] = {*engine_processes()} - {*before}
        os.kill(process, signal.SIGKILL)
        for each in opened:
            with pytest.raises(IngotError, match=r"lost|ended by SIGKILL|restarting"):
                list(each)
        wait_ready(server, "words")
        assert [*answers(server.http_url, "words", text("a"))] == ["0:a"]
        found = answers(server.http_url, "words", text("a die"))
        assert next(found) == "0:a"
        with pytest.raises(IngotError, match="exit code 3; the request may have caused it"):
            next(found)


def test_a_version_that_is_replaced_finishes_its_streams(tmp_path: Path) -> None:
    file = Path(sources(tmp_path)[0].partition(":")[0])
    before = engine_processes()
    with serving(f"{file}:Words") as server:
        found = answers(server.http_url, "words", text("a b forever"), max_steps=3000)
        assert next(found) == "0:a"
        file.write_text(CODE.replace("{index}:", "new "))
        [done] = server.reload()
        assert done.result == "ok", done
        assert next(answers(server.http_url, "words", text("a"))) == "new a"
        assert [*found] == ["1:b", *["2:forever"] * 2998]
        wait_until(lambda: len(engine_processes()) == len(before) + 1)


def test_a_server_that_stops_ends_its_streams(tmp_path: Path) -> None:
    with serving(sources(tmp_path)[1], drain_timeout=1) as server, ThreadPoolExecutor(1) as pool:
        found = answers(server.http_url, "ticks", tick())
        next(found)
        stopping = pool.submit(server.close)
        with pytest.raises(IngotError):
            list(found)
        stopping.result(60)


ODD = """
from collections.abc import AsyncIterator, Iterator

class Plain:
    def predict_one(self, text: str) -> Iterator[str]:
        return text

class Wrong:
    def predict_one(self, text: str) -> Iterator[str]:
        yield text
        yield 1

class Caller:
    def load(self, context):
        self.context = context

    async def predict_one(self, text: str) -> AsyncIterator[str]:
        for each in text.split():
            found = await self.context.infer("affine", {"x": [[float(each)] * 3]})
            yield str(found["y"][0, 0])

class Keeps:
    kept = []

    def predict_one(self, count: int) -> Iterator[int]:
        for at in range(count):
            self.kept.append(bytearray(4 << 20))
            yield at
"""


def test_code_that_cannot_be_streamed_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="leave out --instances"), serving(sources(tmp_path)[0], instances=2):
        pass
    with serving(source_of(tmp_path, ODD, "Plain"), source_of(tmp_path, ODD, "Wrong")) as server:
        with pytest.raises(IngotError, match="returned a str, not a generator"):
            [*answers(server.http_url, "plain", text("a"))]
        found = answers(server.http_url, "wrong", text("a"))
        assert next(found) == "a"
        with pytest.raises(IngotError, match="returned a int in 'output'"):
            next(found)


def test_a_generator_calls_other_models(tmp_path: Path) -> None:
    with serving(source_of(tmp_path, ODD, "Caller"), str(onnx_models.affine(tmp_path))) as server:
        assert [*answers(server.http_url, "caller", text("1 2"))] == ["3.0", "5.0"]
        found = answers(server.http_url, "caller", text("1 no"))
        assert next(found) == "3.0"
        with pytest.raises(IngotError, match="could not convert string to float"):
            next(found)


@pytest.mark.matrix
def test_a_process_that_has_grown_is_replaced_once_its_streams_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(source_of(tmp_path, ODD, "Keeps"), engine_memory_mb=1024) as server:
        with ingot.Client(server.http_url) as client:
            found = [int(each["output"][0]) for each in client.stream("keeps", {"count": np.array([200])})]
        assert found == [*range(200)]
        assert "was replaced" not in caplog.text
        with ingot.Client(server.http_url) as client:
            assert len([*client.stream("keeps", {"count": np.array([1])})]) == 1
        wait_until(lambda: "was replaced: it had grown to" in caplog.text)


def test_an_archive_streams_as_the_file(tmp_path: Path, run_ingot: RunIngot) -> None:
    out = tmp_path / "words.ingot"
    succeeded(run_ingot("export", sources(tmp_path)[0], "-o", out))
    [variant] = ingot.Archive.open(out).variants
    assert [(each.error, each.cases) for each in variant.serving.evidence.parity] == [(0, 3)]
    with serving(str(out), allow_code=True) as server:
        assert [*answers(server.http_url, "words", text("a b"))] == ["0:a", "1:b"]
    random = CODE.replace("{index}:", "{id(object()) if index else 0} {os.urandom(4) if index else 0}")
    with pytest.raises(ExportError, match="the model is random"):
        export_class(source_of(tmp_path, random, "Words"), name="words")


def test_a_batch_that_runs_again_in_halves_advances_each_generator_once() -> None:
    generators = Generators(lambda sample: iter(range(sample)), lambda found: found)
    handles = np.array([[1, 0], [2, 0]])
    for _ in range(2):
        assert generators.advance(handles, [2, 1]) == [0, 0]
    assert generators.advance(np.array([[1, 1]]), [2]) == [1]
    assert isinstance(generators.advance(np.array([[2, 1]]), [1])[0], Ended)
    [lost] = generators.advance(np.array([[3, 1]]), [9])
    assert isinstance(lost, Unavailable)
    generators.end([1, 2, 4])
    assert len(generators) == 0
    [late] = generators.advance(np.array([[4, 0]]), [9])  # its client left before its first call arrived
    assert isinstance(late, Unavailable)
    assert len(generators) == 0
