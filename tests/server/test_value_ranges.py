"""Declared ranges of values and guarded divisions, from ``ingot export`` to clients of both protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import RunningServer
from ingot.bench.payload import payload
from ingot.cli.serving.serve import curl
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.tensors import Array
from tests import onnx_models
from tests.server.test_values import message, over_grpc, over_http
from tests.support import RunIngot, matrix, refused, succeeded

pytestmark = pytest.mark.one_case  # of each test; the others by `make test-matrix`

RANGE = "0..9"
DERIVED = ", outside the range that the model takes: -10..9, as it selects from 10 of 'table' in node 'y' (Gather)"
INT64 = np.iinfo(np.int64)


def counted(folder: Path) -> Path:
    """y = 0, 1, ... n - 1: INT64, of which a request of a few bytes can ask for any number."""
    constants = [numpy_helper.from_array(np.array(value), name) for name, value in (("zero", 0), ("one", 1))]
    nodes = [helper.make_node("Range", ["zero", "n", "one"], ["y"])]
    inputs: list[tuple[str, int, onnx_models.Dims]] = [("n", TensorProto.INT64, ())]
    return onnx_models.save(folder / "counted.onnx", nodes, inputs, [("y", TensorProto.INT64, ("k",))], constants)


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def served(request: pytest.FixtureRequest, archives: dict[str, Path]) -> Iterator[RunningServer]:
    sources = [f"{name}={path}" for name, path in archives.items()]
    with ingot.serve(*sources, http_port=0, grpc_port=0, grpc_server=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("archives")
    made = {
        "embedding": (onnx_models.embedding, [f"ids:int64[batch,seq]={RANGE}"]),
        "lookup": (onnx_models.lookup, []),
        "counted": (counted, ["n:int64[]=0..4096"]),
        "affine": (onnx_models.affine, ["x:float32[batch,3]=-1.5..1.5"]),
        "quotient": (onnx_models.quotient, ["x:int64[batch,2]", "d:int64[batch,2]"]),
    }
    found = {}
    for name, (build, inputs) in made.items():
        found[name] = folder / f"{name}.ingot"
        example = {"x": np.array([[7, 8], [9, -3]]), "d": np.array([[2, 3], [-1, 4]])} if name == "quotient" else None
        ingot.export_model(build(folder), example, inputs=inputs).save(found[name])
    found["bare"] = onnx_models.lookup(folder)
    found["described"] = onnx_models.described_wrongly(folder)
    found["embeddings"] = onnx_models.embeddings(folder)
    return found


Send = Callable[[str, dict[str, Array]], tuple[str, dict[str, Array]]]


@pytest.fixture(params=["HTTP", "HTTP binary", "gRPC"])
def send(request: pytest.FixtureRequest, served: RunningServer) -> Iterator[Send]:
    """Send a request, and return its error or an empty text, and its outputs."""

    def http(model: str, inputs: dict[str, Array]) -> tuple[str, dict[str, Array]]:
        answer = over_http(served, model, inputs, binary=False)
        if answer.status_code == 200:
            return "", {item["name"]: np.array(item["data"]) for item in answer.json()["outputs"]}
        assert answer.status_code == 400
        return answer.json()["error"], {}

    def binary(model: str, inputs: dict[str, Array]) -> tuple[str, dict[str, Array]]:
        answer = over_http(served, model, inputs, binary=True)
        if answer.status_code == 200:
            length = int(answer.headers["Inference-Header-Content-Length"])
            kind = np.float32 if json.loads(answer.content[:length])["outputs"][0]["datatype"] == "FP32" else np.int64
            return "", {"y": np.frombuffer(answer.content[length:], kind)}
        assert answer.status_code == 400
        return answer.json()["error"], {}

    if request.param != "gRPC":
        yield binary if "binary" in request.param else http
        return
    with grpc.insecure_channel(served.grpc_url.partition("://")[2]) as channel:

        def rpc(model: str, inputs: dict[str, Array]) -> tuple[str, dict[str, Array]]:
            try:
                return "", proto_codec.decode_response(over_grpc(channel, message(model, inputs)))
            except grpc.RpcError as error:
                failed: Any = error
                assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
                return failed.details(), {}

        yield rpc


@pytest.mark.parametrize(
    ("model", "good", "bad", "says"),
    [
        ("embedding", {"ids": np.array([[0, 9]])}, {"ids": np.array([[0, 10]])}, "input 'ids' holds 10 at index [0,1]"),
        ("embedding", {"ids": np.array([[3]])}, {"ids": np.array([[-1]])}, "input 'ids' holds -1 at index [0,0]"),
        ("lookup", {"ids": np.array([[-10]])}, {"ids": np.array([[0, 10]])}, f"10 at index [0,1]{DERIVED}"),
        ("bare", {"ids": np.array([[9]])}, {"ids": np.array([[-11]])}, f"-11 at index [0,0]{DERIVED}"),
        ("counted", {"n": np.array(4096)}, {"n": np.array(2**62)}, "input 'n' holds 4611686018427387904, outside"),
        ("counted", {"n": np.array(0)}, {"n": np.array(-1)}, "input 'n' holds -1, outside the range that the model"),
        (
            "affine",
            {"x": np.full((1, 3), 1.5, np.float32)},
            {"x": np.array([[0, np.nan, 2]], np.float32)},
            "input 'x' holds nan at index [0,1]",
        ),
    ],
)
def test_values_outside_the_range_are_refused(
    send: Send, model: str, good: dict[str, Array], bad: dict[str, Array], says: str
) -> None:
    if model == "affine" and "nan" in says and send.__name__ == "http":
        bad = {"x": np.array([[0, 1.75, 2]], np.float32)}  # JSON has no NaN
        says = "input 'x' holds 1.75 at index [0,1]"
    assert send(model, good)[0] == ""
    for _ in range(2):
        assert says in send(model, bad)[0]
        assert send(model, good)[0] == ""


def test_sizes_of_results_that_a_file_states_limit_no_request(send: Send) -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    error, outputs = send("described", {"x": x, "ids": np.array([3])})
    assert error == ""
    assert outputs["y"].reshape(-1).tolist() == [6, 7]


@pytest.mark.parametrize(("name", "size"), [("words", 10), ("segments", 2), ("places", 5)])
def test_operators_that_count_from_the_start_have_no_negative_index(send: Send, name: str, size: int) -> None:
    def inputs(value: int) -> dict[str, Array]:
        ids = {other: np.array([[0, 1, 1]], np.int32) for other in ("words", "segments", "places")}
        return {**ids, name: np.array([[0, value, 1]], np.int32)}

    for value in (-1, size):
        assert f"input '{name}' holds {value} at index [0,1], outside the range" in send("embeddings", inputs(value))[0]
    assert send("embeddings", inputs(size - 1))[0] == ""


def test_the_least_integer_by_minus_one_wraps_around(send: Send) -> None:
    """Before the guard, this request ended the server."""
    error, outputs = send("quotient", {"x": np.array([[INT64.min, 7]]), "d": np.array([[-1, -1]])})
    assert error == ""
    assert outputs["y"].reshape(-1).tolist() == [INT64.min, -7]
    error, _ = send("quotient", {"x": np.array([[INT64.min, 7]]), "d": np.array([[0, -1]])})
    assert "by zero" in error


@pytest.mark.matrix
def test_the_command_line_client_shows_the_refusal(served: RunningServer, run_ingot: RunIngot) -> None:
    for url in (served.http_url, served.grpc_url):
        assert "input 'n' holds 4097, outside" in refused(run_ingot("infer", url, "counted", "--input", "n=4097"))
        assert succeeded(run_ingot("infer", url, "counted", "--input", "n=3"))


def test_metadata_states_the_ranges(served: RunningServer) -> None:
    document = httpx.get(f"{served.http_url}/v2/models/affine", trust_env=False).json()
    assert document["properties"]["values.x"] == "-1.5..1.5"
    for name in ("lookup", "bare"):
        document = httpx.get(f"{served.http_url}/v2/models/{name}", trust_env=False).json()
        assert document["properties"]["values.ids"] == "-10..9"
    assert "values" not in str(httpx.get(f"{served.http_url}/v2/models/quotient", trust_env=False).json())
    with grpc.insecure_channel(served.grpc_url.partition("://")[2]) as channel:
        ask: Any = channel.unary_unary(
            f"/{proto_codec.SERVICE}/ModelMetadata",
            pb.ModelMetadataRequest.SerializeToString,
            pb.ModelMetadataResponse.FromString,
        )
        assert ask(pb.ModelMetadataRequest(name="counted"), timeout=60).properties["values.n"] == "0..4096"
    assert "values.NAME" in httpx.get(f"{served.http_url}/openapi.json", trust_env=False).text


def test_the_command_that_serve_prints_and_bench_use_no_negative_index(served: RunningServer) -> None:
    models = {model.name: model for model in served._server.repository}
    for name in ("lookup", "bare"):
        assert '"shape":[1,1],"data":[1]' in curl(served.http_url, models[name])
        document = httpx.get(f"{served.http_url}/v2/models/{name}", trust_env=False).json()
        made = payload(document, None, {"ids": (8, 8)}, 8, 0).requests
        assert {int(value) for request in made for value in np.unique(request["ids"])} == set(range(10))  # type: ignore[call-overload]


@pytest.mark.matrix
def test_the_command_line_declares_shows_and_compares_ranges(run_ingot: RunIngot, tmp_path: Path) -> None:
    model, narrow, wide = counted(tmp_path), tmp_path / "narrow.ingot", tmp_path / "wide.ingot"
    succeeded(run_ingot("export", model, "--input", "n:int64[]=0..64", "--out", narrow))
    succeeded(run_ingot("import", model, "--input", "n:int64[]=0..4096", "--out", wide))
    assert "n:int64[]=0..64" in succeeded(run_ingot("inspect", narrow))
    inputs = json.loads(succeeded(run_ingot("inspect", wide, "--json")))["variants"][0]["signature"]["inputs"]
    assert inputs[0]["values"] == {"low": 0, "high": 4096, "source": None}
    changes = run_ingot("diff", narrow, wide).stdout
    assert "n:int64[]=0..64" in changes
    assert "n:int64[]=0..4096" in changes
    for wrong, says in (("9..0", "is empty"), ("0.5..1", "write whole numbers"), ("7", "is not a range of values")):
        result = run_ingot("export", model, "--input", f"n:int64[]={wrong}", "--out", tmp_path / "no.ingot")
        assert says in refused(result)


def test_a_range_that_the_model_does_not_accept_is_found_by_the_export(run_ingot: RunIngot, tmp_path: Path) -> None:
    model = onnx_models.embedding(tmp_path)
    result = run_ingot("export", model, "--input", "ids:int64[batch,seq]=0..10", "--out", tmp_path / "no.ingot")
    message = refused(result)
    assert "the model does not run on all values of ids:int64[batch,seq]=0..10: indices element out of data" in message
    assert "declare a range that it accepts" in message


@pytest.mark.matrix
def test_the_export_reports_guarded_divisions(run_ingot: RunIngot, tmp_path: Path) -> None:
    out = tmp_path / "quotient.ingot"
    np.savez(tmp_path / "rows.npz", x=np.array([[7, 8], [9, -3]]), d=np.array([[2, 3], [-1, 4]]))
    given = ("--input", "x:int64[batch,2]", "--input", "d:int64[batch,2]", "--example", tmp_path / "rows.npz")
    result = run_ingot("export", onnx_models.quotient(tmp_path), *given, "--out", out)
    assert "note: rule 'guarded-division' changed 1 node: the least integer divided by -1 is itself" in result.stderr
    succeeded(run_ingot("inspect", out, "--report", tmp_path / "report.json"))
    rules = {item["rule"]: item for item in json.loads((tmp_path / "report.json").read_text())["rewrites"]}
    assert rules["guarded-division"]["matches"] == 1
    assert not rules["guarded-division"]["rejected"]
