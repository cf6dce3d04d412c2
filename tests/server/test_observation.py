"""What an operator sees of single requests: ids, the access log, and traces."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export import SpanExportResult

import ingot
from ingot import RunningServer
from ingot._build import BUILD
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.context import RequestContext
from ingot.runtime import Metrics
from ingot.runtime.scheduling.scheduler import REASONS
from ingot.server.observation.access_log import AccessLog
from ingot.server.observation.spans import _exporter
from tests import onnx_models
from tests.server.test_steps import make
from tests.support import matrix

INFER = "/v2/models/affine/infer"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 2.0, 3.0]}]}
KINDS: dict[str, dict[str, Any]] = {"fast": {}, "grpcio": {"grpc_server": "grpcio"}}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def call(server: RunningServer, metadata: tuple[tuple[str, str], ...] = (), name: str = "affine") -> dict[str, Any]:
    """Send an inference request over gRPC; return the trailers, with the status under its name."""
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=[bytes(12)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel:
        infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{proto_codec.SERVICE}/ModelInfer")
        try:
            _, done = infer.with_call(message.SerializeToString(), metadata=metadata, timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            done = error  # type: ignore[assignment]  # which is the call too
        return {**dict(done.trailing_metadata() or ()), "status": done.code().name}


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = onnx_models.affine(tmp_path_factory.mktemp("model"))
    with ingot.serve(model, http_port=0, grpc_port=0, **KINDS[request.param]) as running:
        yield running


class TestRequestId:
    def test_it_is_taken_or_made_and_sent_back_over_http(self, server: RunningServer) -> None:
        with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
            for method, path, body in (("POST", INFER, BODY), ("GET", "/v2", None), ("GET", "/v2/models/none", None)):
                given = client.request(method, path, json=body, headers={"X-Request-Id": "order-7"})
                assert given.headers["x-request-id"] == "order-7"
                assert "traceparent" not in given.headers
                first, second = (client.request(method, path, json=body).headers["x-request-id"] for _ in range(2))
                assert first
                assert first != second
            traced = client.post(INFER, json=BODY, headers={"traceparent": PARENT})
            assert traced.headers["traceparent"] == PARENT

    @pytest.mark.parametrize("name", ["a blank", "x" * 129, "\u00e9"])
    def test_a_bad_one_is_replaced(self, server: RunningServer, name: str) -> None:
        headers = {b"X-Request-Id": name.encode("latin-1"), b"traceparent": b"00-0-0-01"}
        answer = httpx.post(server.http_url + INFER, json=BODY, headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] not in ("", name)
        assert "traceparent" not in answer.headers

    def test_it_is_in_the_trailers_of_a_call(self, server: RunningServer) -> None:
        given = call(server, (("x-request-id", "order-8"), ("traceparent", PARENT)))
        assert given["status"] == "OK"
        assert (given["x-request-id"], given["traceparent"]) == ("order-8", PARENT)
        assert call(server)["x-request-id"] != call(server)["x-request-id"]
        refused = call(server, (("x-request-id", "order-9"),), name="none")
        assert (refused["status"], refused["x-request-id"]) == ("NOT_FOUND", "order-9")

    def test_a_request_that_cannot_be_read_has_one(self, server: RunningServer) -> None:
        answer = httpx.post(server.http_url + INFER, content=b"{", headers={"X-Request-Id": "bad"}, trust_env=False)
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "bad")


class Lines(logging.Handler):
    """Collects the lines of the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, getattr(record, "fields", {})))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("ingot.access")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class TestAccessLog:
    @pytest.mark.matrix
    @pytest.mark.parametrize("kind", matrix("fast", "grpcio"))
    def test_all_requests_are_in_it(self, tmp_path: Path, lines: Lines, kind: Any) -> None:
        model = onnx_models.affine(tmp_path)
        with ingot.serve(model, http_port=0, grpc_port=0, access_log="all", grpc_server=kind) as running:
            httpx.post(f"{running.http_url}{INFER}?key=secret", json=BODY, trust_env=False, timeout=60)
            httpx.get(f"{running.http_url}/v2/models/none", trust_env=False, timeout=60)
            call(running)
            counted = httpx.get(f"{running.http_url}/metrics", trust_env=False, timeout=60).text
        inferred, missing, called = (fields for _, fields in lines.lines[:3])
        assert inferred["path"] == INFER
        assert (inferred["method"], inferred["status"], inferred["model"], inferred["rows"]) == (
            "POST",
            "200",
            "affine",
            1,
        )
        assert inferred["batch_rows"] == 1
        assert inferred["batch_reason"] in REASONS
        assert 0 <= inferred["queue_ms"] + inferred["compute_ms"] <= inferred["total_ms"]
        assert (missing["status"], "model" in missing) == ("404", False)
        assert (called["method"], called["status"], called["rows"]) == ("gRPC", "OK", 1)
        assert 'ingot_access_log_lines_total{level="info"} 3.0' in counted
        assert 'ingot_batches_total{model="affine",reason="' in counted.replace('version="1",', "")

    def test_only_slow_ones_are_in_it(self, tmp_path: Path, lines: Lines) -> None:
        for slow, expected in ((3600.0, 0), (0.0, 1)):
            model = onnx_models.affine(tmp_path)
            with ingot.serve(model, http_port=0, grpc_port=0, access_log="slow", access_log_slow=slow) as running:
                httpx.post(running.http_url + INFER, json=BODY, trust_env=False, timeout=60)
            assert len(lines.lines) == expected

    @pytest.mark.parametrize(("method", "failed"), [("POST", 503), ("gRPC", 14)])
    def test_failed_ones_are_in_it_at_a_limited_rate(self, lines: Lines, method: str, failed: int) -> None:
        context = RequestContext()
        for mode in ("sampled", "slow"):
            context.target = method.encode(), f"/{method}{mode}".encode()
            lines.lines.clear()
            access_log = AccessLog(mode, 1e-12, 3600.0, Metrics().access_log_lines)
            for status in (0, 200, 5, 404, *[failed] * 8):
                access_log.write(context, status, 0.001)
            assert [level for level, _ in lines.lines] == ["ERROR"] * 5

    @pytest.mark.matrix
    def test_lines_on_stderr_are_json_with_the_id(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "ingot", "serve", str(onnx_models.affine(tmp_path)), "--json"]
        options = ["--http-port=0", "--grpc-port=0", "--access-log=all", "--log-format=json", "--log-level=info"]
        with subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["http"]
            headers = {"X-Request-Id": "order-7", "traceparent": PARENT}
            httpx.post(url + INFER, json=BODY, headers=headers, trust_env=False, timeout=60)
            process.terminate()
            _, errors = process.communicate(timeout=60)
        records = [json.loads(line) for line in errors.splitlines()]
        [found] = [record for record in records if record["logger"] == "ingot.access"]
        assert found["message"] == f"POST {INFER} 200"
        assert (found["request_id"], found["trace_id"]) == ("order-7", PARENT[3:35])
        assert (found["rows"], found["batch_rows"]) == (1, 1)
        assert found["batch_reason"] in REASONS
        assert 0 < found["queue_ms"] + found["compute_ms"] <= found["total_ms"]
        assert "data" not in errors
        assert any("draining" in record["message"] for record in records)


class Collector(BaseHTTPRequestHandler):
    """Takes spans as an OpenTelemetry collector does."""

    spans: list[Span]

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            content = gzip.decompress(content)
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert (names["service.name"], names["service.instance.id"]) == ("ingot", "blue-3")
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the standard library names it
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    spans: list[Span] = []
    handler = type("Handler", (Collector,), {"spans": spans})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_address[1]}", spans
        listener.shutdown()


class TestTraces:
    @pytest.mark.matrix
    @pytest.mark.parametrize("kind", matrix("fast", "grpcio"))
    def test_a_collector_gets_one_of_each_protocol(
        self, tmp_path: Path, collector: tuple[str, list[Span]], kind: Any
    ) -> None:
        endpoint, spans = collector
        options: dict[str, Any] = {"otlp": endpoint, "otlp_share": 0.0, "replica": "blue-3", **KINDS[kind]}
        model = onnx_models.affine(tmp_path)
        with ingot.serve(model, http_port=0, grpc_port=0, **options) as running:
            unsampled = f"{PARENT[:-2]}00"
            for parent in (PARENT, unsampled):
                headers = {"traceparent": parent}
                answer = httpx.post(running.http_url + INFER, json=BODY, headers=headers, trust_env=False, timeout=60)
                assert answer.headers["traceparent"][:35] == PARENT[:35]
            httpx.post(running.http_url + INFER, json=BODY, trust_env=False, timeout=60)
            metrics = httpx.get(f"{running.http_url}/metrics", trust_env=False, timeout=60).text
            assert f'ingot_server_info{{build="{BUILD}",replica="blue-3",version="{ingot.__version__}"}} 1.0' in metrics
            call(running, (("traceparent", PARENT),))
        servers = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        assert [span.name for span in servers] == ["infer affine", "infer affine"]
        for span in servers:
            assert (span.trace_id.hex(), span.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
            stages = [each for each in spans if each.parent_span_id == span.span_id]
            assert sorted(each.name for each in stages) == ["batch", "compute", "decode", "encode", "queue"]
            for each in stages:
                assert each.trace_id == span.trace_id
                assert span.start_time_unix_nano <= each.start_time_unix_nano <= each.end_time_unix_nano
                assert each.end_time_unix_nano <= span.end_time_unix_nano
        batches = [span for span in spans if span.name == "batch affine"]
        assert {link.span_id for batch in batches for link in batch.links} == {span.span_id for span in servers}
        reasons = {each.key: each.value.string_value for batch in batches for each in batch.attributes}
        assert reasons["ingot.batch.reason"] in REASONS

    @pytest.mark.matrix
    def test_steps_have_spans(self, tmp_path: Path, collector: tuple[str, list[Span]]) -> None:
        endpoint, spans = collector
        make(tmp_path).save(tmp_path / "length.ingot")
        with ingot.serve(
            str(tmp_path / "length.ingot"), http_port=0, grpc_port=0, otlp=endpoint, replica="blue-3"
        ) as running:
            body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a fine film"]}]}
            url = f"{running.http_url}/v2/models/length/infer"
            httpx.post(url, json=body, headers={"traceparent": PARENT}, trust_env=False, timeout=60)
        [span] = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        stages = {each.name: each for each in spans if each.parent_span_id == span.span_id}
        assert sorted(stages) == ["batch", "classify", "compute", "decode", "encode", "queue", "tokenize"]
        assert stages["tokenize"].end_time_unix_nano <= stages["queue"].start_time_unix_nano
        assert stages["compute"].end_time_unix_nano <= stages["classify"].start_time_unix_nano

    def test_a_server_ends_though_the_collector_does_not_answer(
        self, tmp_path: Path, collector: tuple[str, list[Span]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endpoint, _ = collector
        closed = threading.Event()
        waited: list[bool] = []
        monkeypatch.setattr(Collector, "do_POST", lambda _: waited.append(closed.wait(10)))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
        monkeypatch.setattr("ingot.server.observation.spans._FLUSH", 0.1)
        with ingot.serve(
            onnx_models.affine(tmp_path), http_port=0, grpc_port=0, otlp=endpoint, replica="blue-3"
        ) as running:
            httpx.post(running.http_url + INFER, json=BODY, headers={"traceparent": PARENT}, trust_env=False)
        assert not waited
        closed.set()

    def test_an_endless_answer_of_the_collector_is_not_read_to_its_end(
        self, collector: tuple[str, list[Span]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent = [0]  # by each call of the collector

        def answer(handler: Collector) -> None:
            sent.append(0)
            handler.rfile.read(int(handler.headers["Content-Length"]))
            handler.send_response(400)
            handler.end_headers()
            with contextlib.suppress(OSError):
                while sent[-1] < 1 << 28:
                    sent[-1] += handler.wfile.write(bytes(1 << 16))

        monkeypatch.setattr(Collector, "do_POST", answer)
        exporter = _exporter(collector[0])
        assert exporter.export([]) is not SpanExportResult.SUCCESS
        exporter.shutdown()
        assert len(sent) > 1
        assert max(sent) < 1 << 28

    def test_a_wrong_address_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ingot.IngotError, match="address of a collector"):
            ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0, otlp="collector:4318")

    @pytest.mark.matrix
    def test_without_a_collector_nothing_of_opentelemetry_is_imported(self, tmp_path: Path) -> None:
        program = (
            "import sys, ingot\n"
            f"with ingot.serve({str(onnx_models.affine(tmp_path))!r}, http_port=0, grpc_port=0, access_log='all'):\n"
            "    assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
