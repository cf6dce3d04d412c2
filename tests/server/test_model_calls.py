"""Models in Python that call other models of their server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import ingot
from ingot.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from ingot.export.python_model import export_class
from ingot.server.main import RunningServer
from tests import onnx_models
from tests.server.outside import wait_until
from tests.server.test_observation import PARENT
from tests.server.test_observation import collector as collector

CODE = """
import asyncio, os, time
import numpy as np

class Base:
    inputs = ["x:float32[batch,3]"]
    outputs = ["y:float32[batch,3]"]

    def load(self, context):
        self.context = context

class Plain(Base):
    def predict(self, batch):
        return {"y": self.context.infer("affine", {"x": batch["x"]})["y"] + 1}

class Gathering(Base):
    async def predict_one(self, sample):
        calls = [self.context.infer("affine", {"x": [[int(n) for n in sample["x"] * k]]}) for k in range(20)]
        return {"y": sum(found["y"][0] for found in await asyncio.gather(*calls))}

class Through(Base):
    async def predict_one(self, sample):
        return (await self.context.infer("gathering", {"x": sample["x"][None]}))["y"][0]

class Chosen:
    inputs = ["model:str[batch]"]
    outputs = ["answer:str[batch]"]

    def load(self, context):
        self.context = context

    def predict_one(self, sample):
        name, _, timeout = sample["model"].partition(" ")
        if name == "last":
            return self.last
        try:
            found = self.context.infer(name, {"model": ["chosen"]}, timeout=float(timeout) if timeout else None)
        except Exception as error:
            self.last = str(error)
            raise
        return found["answer"][0]

class Slow:
    inputs = ["model:str[batch]"]
    outputs = ["answer:str[batch]"]

    def predict_one(self, sample):
        time.sleep(1.5)
        return "late"

class Circle(Chosen):
    pass

class Abandons(Base):
    async def predict_one(self, sample):
        call = asyncio.ensure_future(self.context.infer("slow", {"model": ["x"]}))
        try:
            await asyncio.wait_for(call, 0.05)
        except TimeoutError:
            return sample["x"]

class Large:
    inputs = ["x:float32[batch,n]"]
    outputs = ["y:float32[batch,n]"]

    def load(self, context):
        self.context = context

    def predict(self, batch):
        kept = self.context.infer("same", batch)["x"]
        self.context.infer("same", {"x": np.zeros_like(batch["x"])})
        return {"y": kept + 1}

class Same:
    inputs = ["x:float32[batch,n]"]
    outputs = ["x:float32[batch,n]"]

    def predict(self, batch):
        return batch

class Dies(Base):
    async def predict_one(self, sample):
        asyncio.ensure_future(self.context.infer("slow", {"model": ["x"]}))
        await asyncio.sleep(0.1)
        os._exit(3)

class Many(Base):
    async def predict_one(self, sample):
        calls = [self.context.infer("affine", {"x": sample["x"][None]}) for _ in range(400)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return np.full(3, sum(not isinstance(each, Exception) for each in found), np.float32)
"""
NAMES = ("Plain", "Gathering", "Through", "Chosen", "Slow", "Circle", "Abandons", "Large", "Same", "Many", "Dies")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("calls"), *NAMES) as opened:
        yield opened


def serving(folder: Path, *names: str, **settings: Any) -> RunningServer:
    file = folder / "calling_models.py"
    file.write_text(CODE)
    sources = [*(f"{file}:{name}" for name in names), str(onnx_models.affine(folder))]
    return ingot.serve(*sources, http_port=0, grpc_port=0, device="cpu", **settings)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[ingot.Client]:
    with ingot.Client(server.http_url) as opened:
        yield opened


X = np.array([[1, 2, 3]], np.float32)


def named(model: str) -> dict[str, Any]:
    return {"model": np.array([model.encode()], object)}


def test_code_calls_a_graph(client: ingot.Client) -> None:
    assert client.infer("plain", {"x": X})["y"].tolist() == [[4, 6, 8]]


def test_coroutines_call_at_the_same_time_and_share_batches(client: ingot.Client) -> None:
    before = int(client.statistics("affine")[0]["execution_count"])
    expected = (2 * X * sum(range(20)) + 20).tolist()
    assert client.infer("gathering", {"x": X})["y"].tolist() == expected
    assert int(client.statistics("affine")[0]["execution_count"]) - before < 20
    assert client.infer("through", {"x": X})["y"].tolist() == expected


def test_clients_that_ask_at_once_get_their_own_answers(client: ingot.Client) -> None:
    def ask(k: int) -> Any:
        return client.infer("plain", {"x": k * X})["y"].tolist()

    with ThreadPoolExecutor(16) as pool:
        assert [*pool.map(ask, range(64))] == [(2 * k * X + 2).tolist() for k in range(64)]


def test_large_answers_can_be_kept(client: ingot.Client) -> None:
    x = np.arange(3 * 65536, dtype=np.float32).reshape(3, 65536)
    assert np.array_equal(client.infer("large", {"x": x})["y"], x + 1)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("absent", NotFound, "model 'absent', which 'chosen' calls: Request for unknown model: 'absent' is not found"),
        ("slow:9", NotFound, "unknown model: 'slow' version 9 is not found"),
        ("affine", InvalidArgument, "model 'affine', which 'chosen' calls: .*'model'"),
        ("chosen", InvalidArgument, "model 'chosen' cannot call 'chosen': that is a cycle"),
        ("circle", InvalidArgument, "'circle' cannot call 'chosen', which calls it, at once or by others"),
        ("slow 0.2", DeadlineExceeded, "model 'slow' did not answer within 0.2 s"),
    ],
)
def test_a_call_that_fails_names_the_model(
    client: ingot.Client, model: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.infer("chosen", named(model))
    assert client.infer("plain", {"x": X})["y"].tolist() == [[4, 6, 8]]


def test_a_call_ends_with_the_deadline_of_its_request(client: ingot.Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.infer("chosen", named("slow"), parameters={"timeout": 300_000})
    [last] = client.infer("chosen", named("last"))["answer"].tolist()
    assert b"model 'slow', which 'chosen' calls: model 'slow' did not answer within 0." in last
    assert client.infer("slow", named("x"))["answer"].tolist() == [b"late"]


def test_answers_that_code_does_not_wait_for_are_read_before_the_next_batch(client: ingot.Client) -> None:
    for _ in range(2):
        assert client.infer("abandons", {"x": X})["y"].tolist() == X.tolist()


def test_an_answer_to_a_process_that_has_ended_is_dropped(client: ingot.Client) -> None:
    with pytest.raises(Unavailable, match="exit code 3"):
        client.infer("dies", {"x": X})
    assert client.infer("slow", named("x"))["answer"].tolist() == [b"late"]


def test_the_calls_of_a_batch_are_bounded(client: ingot.Client) -> None:
    answered = client.infer("many", {"x": X})["y"][0, 0]
    assert 256 <= answered <= 400


@pytest.mark.matrix
def test_a_trace_has_a_span_for_each_call(tmp_path: Path, collector: tuple[str, list[Span]]) -> None:
    endpoint, spans = collector
    with serving(tmp_path, "Plain", otlp=endpoint, replica="blue-3") as server:
        url, body = f"{server.http_url}/models/plain", {"inputs": [1, 2, 3]}
        found = httpx.post(url, json=body, headers={"traceparent": PARENT}, trust_env=False)
        assert found.json() == {"y": [4, 6, 8]}
    [whole] = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    stages = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
    call, compute = stages["call affine"], stages["compute"]
    assert compute.start_time_unix_nano <= call.start_time_unix_nano < call.end_time_unix_nano
    assert call.end_time_unix_nano <= compute.end_time_unix_nano


def test_calls_in_flight_are_answered_before_the_server_ends(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        serving(tmp_path, "Slow", "Chosen") as server,
        ingot.Client(server.http_url) as client,
    ):
        asking = pool.submit(client.infer, "chosen", named("slow"))
        waiting = 'in_flight_requests{model="slow",version="1"} 1.0'
        wait_until(lambda: waiting in httpx.get(f"{server.http_url}/metrics", trust_env=False).text)
        server.close()
        assert asking.result(60)["answer"].tolist() == [b"late"]


def test_a_client_that_leaves_cancels_the_calls_of_its_batch(server: RunningServer, client: ingot.Client) -> None:
    body = {"inputs": [{"name": "model", "datatype": "BYTES", "shape": [1], "data": ["slow"]}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.http_url}/v2/models/chosen/infer", json=body, timeout=0.4, trust_env=False)
    [last] = client.infer("chosen", named("last"))["answer"].tolist()
    assert last == b"model 'slow', which 'chosen' calls: the clients that waited for the call have left"
    assert client.infer("slow", named("x"))["answer"].tolist() == [b"late"]


def test_calls_outside_of_a_batch_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "early_models.py"
    file.write_text(
        CODE
        + """
class Early(Plain):
    def load(self, context):
        context.infer("affine", {"x": [[1.0, 2.0, 3.0]]})

class Example(Plain):
    def example(self):
        return {"x": np.zeros((1, 3), np.float32)}
"""
    )
    with pytest.raises(Unavailable, match="can be called while a batch runs in a server"):
        ingot.serve(f"{file}:Early", http_port=0, grpc_port=0, device="cpu")
    with pytest.raises(Unavailable, match=r"once the model is loaded: not for example\(\)"):
        export_class(f"{file}:Example", name="example")
    affine = str(onnx_models.affine(tmp_path))
    with (
        ingot.serve(affine, f"{file}:Example", http_port=0, grpc_port=0, device="cpu") as server,
        ingot.Client(server.http_url) as client,
    ):
        assert client.infer("example", {"x": X})["y"].tolist() == [[4, 6, 8]]
    assert "model example: its example is not run before it is ready, nor batches timed: " in caplog.text
