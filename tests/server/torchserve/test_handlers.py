"""Custom handlers of TorchServe: imported, served, and their answers compared with their own code, run by hand."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

import ingot
from ingot.errors import InternalError, InvalidArgument
from ingot.runtime.engines.python.torchserve.rows import Part, packed, unpacked
from ingot.server.main import RunningServer
from ingot.server.torchserve import torchserve_inference_pb2 as pb
from tests.importing.sources import mar
from tests.server.torchserve import handlers
from tests.server.torchserve.conftest import PORTS, client
from tests.support import FREE_PORTS, ROOT, RunIngot, refused, succeeded

NAMES = ("words", "classes", "vision", "plain", "function", "entry", "graph", "modules", "parts", "tensor", "faults")


@pytest.fixture(scope="module")
def cases() -> dict[str, handlers.Case]:
    pytest.importorskip("PIL")
    return handlers.cases()


@pytest.fixture(scope="module")
def served(
    cases: dict[str, handlers.Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, httpx.Client]]:
    folder = tmp_path_factory.mktemp("handlers")
    for name, case in cases.items():
        ingot.import_model(handlers.archive(folder, name, case), allow_code=True).save(folder / f"{name}.ingot")
    sources = [str(folder / f"{name}.ingot") for name in NAMES]
    with (
        ingot.serve(
            *sources,
            http_port=0,
            grpc_port=0,
            device="cpu",
            allow_code=True,
            insecure=True,
            torchserve=True,
            torchserve_ports=PORTS,
        ) as server,
        client(server, "inference") as found,
    ):
        yield server, found


def faulty(client: httpx.Client, do: str) -> httpx.Response:
    return client.post("/predictions/faults", content=do.encode())


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    content = answer.json()
    assert content["code"] == answer.status_code
    return answer.status_code, content["type"], content["message"]


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_the_handlers_own_code(
    cases: dict[str, handlers.Case], served: tuple[RunningServer, httpx.Client], tmp_path: Path, name: str
) -> None:
    case, (_, client) = cases[name], served
    command = [sys.executable, "-m", "tests.server.torchserve.handlers", str(tmp_path), name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [*map(base64.b64decode, json.loads(done.stdout.splitlines()[-1]))]
    for request, wanted in zip(case.requests, expected, strict=True):
        sent = {**request.sent, "headers": {**case.headers, **request.sent.get("headers", {})}}
        answer = client.post(request.path or f"/predictions/{name}{request.query}", **sent)
        assert answer.status_code == 200, answer.text
        assert answer.content == wanted


def test_headers_are_those_that_the_handler_sets(
    cases: dict[str, handlers.Case], served: tuple[RunningServer, httpx.Client]
) -> None:
    _, client = served
    answer = client.post("/predictions/graph", **cases["graph"].requests[0].sent)
    assert (answer.headers["content-type"], answer.headers["x-shape"]) == ("application/x-floats", "1,4")
    assert "content-type" not in client.post("/predictions/tensor", json=[1]).headers


def test_a_batch_of_several_requests(served: tuple[RunningServer, httpx.Client]) -> None:
    _, client = served
    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(lambda side: client.post("/predictions/modules", json={"side": side}).json(), range(48))]
    assert [each["area"] for each in found] == [side * side * 20 for side in range(48)]
    assert {each["batch"] for each in found} <= {1, 2, 3, 4}
    assert max(each["batch"] for each in found) > 1


def test_parts_come_before_the_result(served: tuple[RunningServer, httpx.Client]) -> None:
    _, client = served
    answer = client.post("/predictions/parts", json={"words": ["one", "two", "three"]})
    assert (answer.status_code, answer.text) == (200, "one two three")


@pytest.mark.parametrize("path", ["/explanations/parts", "/explanations/parts/1", "/v1/models/parts:explain"])
def test_explanations_are_those_of_the_handler(served: tuple[RunningServer, httpx.Client], path: str) -> None:
    _, client = served
    sent = {"words": ["one", "two"]}
    assert client.post(path, json=sent).json() == {"words": 2, "raw": sent, "target": 0}
    assert client.post("/predictions/parts", json=sent).text == "one two"


def test_explanations_are_not_those_of_other_requests_of_a_batch(served: tuple[RunningServer, httpx.Client]) -> None:
    _, client = served
    sent = {"words": ["one", "two"]}
    paths = ["/explanations/parts", "/predictions/parts"] * 20
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda path: client.post(path, json=sent).text, paths)]
    explained = json.dumps({"words": 2, "raw": sent, "target": 0}, indent=2)
    assert found == [explained, "one two"] * 20


def test_a_handler_without_explanations_fails_as_in_torchserve(served: tuple[RunningServer, httpx.Client]) -> None:
    _, client = served
    answer = client.post("/explanations/modules", json={"side": 3})
    assert refusal(answer) == (503, "InternalServerException", "Prediction failed")


@pytest.mark.parametrize(
    ("do", "status", "message"),
    [
        ("raise", 503, "Prediction failed"),
        ("code", 422, "the picture is too dark"),
        ("odd", 500, "an odd code"),
        ("memory", 507, "Out of resources"),
        ("exit", 503, "Prediction failed"),
        ("short", 503, "number of batch response mismatched"),
        ("text", 503, "Invalid model predict output"),
        ("object", 503, "Unsupported model output data type."),
        ("wrong-status", 500, "the head of the handler's answer is not valid: ValueError: the status 999"),
        ("header", 500, "the head of the handler's answer is not valid: ValueError: the header 'x-evil'"),
    ],
)
def test_failures_have_torchserves_form(
    served: tuple[RunningServer, httpx.Client], do: str, status: int, message: str
) -> None:
    _, client = served
    assert refusal(faulty(client, do)) == (status, "InternalServerException", message)
    assert faulty(client, "work").json() == {"did": "work"}


def test_a_status_is_that_of_its_row(served: tuple[RunningServer, httpx.Client]) -> None:
    _, client = served
    answer = faulty(client, "status")
    assert (answer.status_code, answer.json()) == (404, {"did": "status"})
    assert faulty(client, "work").status_code == 200


def test_places_and_metrics_are_in_the_log(
    served: tuple[RunningServer, httpx.Client], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    faulty(served[1], "raise")
    line = handlers.FAULTS.splitlines().index('                raise KeyError("no such key")') + 1
    assert f"faults.py raised KeyError: 'no such key' (faults.py, line {line})" in caplog.text
    for text in ("Waited 2.5 ms of faults", "Requests 1 of faults", "Counted 1 count ModelName=faults of faults"):
        assert text in caplog.text


def test_other_protocols(served: tuple[RunningServer, httpx.Client]) -> None:
    server, _ = served
    value = np.array([b"[1, 2]"], object)
    with ingot.Client(server.http_url) as client:
        found = client.infer("plain", {"data": value})
        assert json.loads(found["body"][0]) == [3.5, 4.5]
        assert found["head"].tolist() == [b""]
        assert client.metadata("plain")["platform"] == "python_torchserve"
        with pytest.raises(InternalError, match="Prediction failed"):
            client.infer("plain", {"data": np.array([b"x"], object)})
        with pytest.raises(InvalidArgument, match="the picture is too dark"):
            client.infer("faults", {"data": np.array([b"code"], object)})
        with pytest.raises(InvalidArgument, match="the request is not valid"):
            client.infer("plain", {"data": np.array([packed([], {})[:20]], object)})
        sent = packed([Part("data", b"work")], {})
        assert json.loads(client.infer("faults", {"data": np.array([sent], object)})["body"][0]) == {"did": "work"}
    with grpc.insecure_channel(server.torchserve_urls["gRPC inference"].removeprefix("grpc://")) as channel:
        call = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
            request_serializer=pb.PredictionsRequest.SerializeToString,
            response_deserializer=pb.PredictionResponse.FromString,
        )
        answer = call(pb.PredictionsRequest(model_name="faults", input={"data": b"work"}), timeout=30)
        assert json.loads(answer.prediction) == {"did": "work"}


def test_rows_are_those_of_torchserves_workers() -> None:
    parts = [
        Part("a", "é"),
        Part("b", b"{}", "application/json"),
        Part("c", b"{", "application/json"),
        Part("d", b"\xc3\xa9", "text/csv"),
        Part("e", b"\xff", "text/plain"),
        Part("f", b"1", "image/png"),
    ]
    request = unpacked(packed(parts, {"X-One": "1"}))
    assert request.row == {
        "a": bytearray("é".encode()),
        "b": {},
        "c": bytearray(b"{"),
        "d": "é",
        "e": bytearray(b"\xff"),
        "f": bytearray(b"1"),
    }
    assert request.headers == {"x-one": "1"}
    assert unpacked(b"x").row == {"body": bytearray(b"x")}
    for cut in (14, 20, len(packed(parts, {})) - 1):
        with pytest.raises(ValueError, match="request"):
            unpacked(packed(parts, {})[:cut])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(): ...", "h.py must have a function handle(data, context), or one class with a method handle"),
        ("class A:\n    def handle(self): ...\nclass B: ...", "its classes are: A, B"),
        ("import ts.torch_handler.dali_handler", "No module named 'ts.torch_handler.dali_handler'"),
        ("class A:\n    def initialize(self, c): 1 / 0\n    def handle(self, d, c): ...", "(h.py, line 2)"),
        ("import os\nos._exit(4)", "ended with exit code 4"),
    ],
)
def test_a_handler_that_does_not_load_is_refused(tmp_path: Path, run_ingot: RunIngot, code: str, message: str) -> None:
    path = mar(tmp_path / "h.mar", {"h.py": code.encode()}, handler="h.py")
    found = refused(run_ingot("import", path, "--allow-code", "-o", tmp_path / "h.ingot"))
    assert message in " ".join(found.split())


def test_code_runs_in_no_process_without_consent(tmp_path: Path, run_ingot: RunIngot) -> None:
    trace = tmp_path / "trace"
    code = f"import os\ntry:\n    os.mkdir({str(trace)!r})\nexcept OSError:\n    pass\n"
    code += "def handle(d, c): return d and ['']\n"
    path = mar(tmp_path / "h.mar", {"h.py": code.encode()}, handler="h.py")
    assert "--allow-code" in refused(run_ingot("import", path, "-o", tmp_path / "h.ingot"))
    succeeded(run_ingot("import", path, "--allow-code", "-o", tmp_path / "h.ingot"))
    assert "handle of h.py" in succeeded(run_ingot("inspect", tmp_path / "h.ingot"))
    assert "--allow-code" in refused(run_ingot("serve", tmp_path / "h.ingot", *FREE_PORTS))
    assert not trace.exists()


def test_permissions_are_recorded_and_named(tmp_path: Path, run_ingot: RunIngot) -> None:
    path = mar(tmp_path / "h.mar", {"h.py": b"def handle(d, c): return d and ['']\n"}, handler="h.py")
    out = tmp_path / "h.ingot"
    succeeded(run_ingot("import", path, "--allow-code", "--permit", "network-at-load", "-o", out))
    assert "network-at-load" in succeeded(run_ingot("inspect", out))
    assert "--permit network-at-load" in refused(run_ingot("serve", out, "--allow-code", *FREE_PORTS))
