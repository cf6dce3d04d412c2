from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.protocol.requests import MAX_PARAMETERS
from ingot.tensors import DType, arrays
from tests import onnx_models
from tests.server.samples import sample
from tests.support import matrix

LARGE = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[10001,3],"data":[' + b"1.5," * 30_002 + b"NaN]}]}"
LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(scope="module", params=matrix("connection", "fastapi"))
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Both implementations share one contract: the server's own connections, and FastAPI."""
    fastapi = request.param == "fastapi"
    url = request.getfixturevalue("app_url") if fastapi else request.getfixturevalue("server").http_url
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:  # busy machines need more than 5 s
        yield client


def tensor(name: str = "x", datatype: str = "FP32", shape: Any = (1, 3), **rest: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **rest}


def affine(**changes: Any) -> dict[str, Any]:
    return {"inputs": [tensor(**{"data": [1, 2, 3], **changes})]}


def binary(header: dict[str, Any], *buffers: bytes) -> tuple[bytes, dict[str, str]]:
    raw = json.dumps(header).encode()
    return raw + b"".join(buffers), {LENGTH: str(len(raw))}


def split(answer: httpx.Response) -> tuple[dict[str, Any], bytes]:
    length = int(answer.headers[LENGTH])
    return json.loads(answer.content[:length]), answer.content[length:]


@pytest.mark.matrix
def test_health_and_metadata(http: httpx.Client) -> None:
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2").json() == http.get("/v2/").json()
    assert http.get("/v2").json()["name"] == "ingot"
    assert http.get("/v2/models/affine/ready").json() == {"name": "affine", "ready": True}
    assert http.get("/v2/models/affine").json() == {
        "name": "affine",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "z", "datatype": "FP32", "shape": [-1, 3]},
        ],
    }
    assert http.get("/v2/models/affine/versions/1").json() == http.get("/v2/models/affine").json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/nope/ready", 404),
        ("GET", "/v2/models/affine/versions/7", 404),
        ("POST", "/v2/models/nope/infer", 404),
        ("POST", "/v2/models/affine/versions/7/infer", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/affine/infer", 405),
        ("DELETE", "/v2", 405),
    ],
)
def test_unknown_things_are_named(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path, json=affine() if method == "POST" else None)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    if path == "/v2/models/affine/infer" and method == "GET":
        assert answer.json()["error"].endswith("Method Not Allowed; use POST")
    if path == "/nothing":
        assert "POST /v2/models/{model}/infer" in answer.json()["error"]
    if "nope" in path:
        assert answer.json()["error"].startswith("Request for unknown model: 'nope' is not found; this server has: ")
        assert "affine" in answer.json()["error"]


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}], ids=["plain", "gzip"])
def test_an_unknown_model_is_named_before_a_body_that_cannot_be_read(
    http: httpx.Client, headers: dict[str, str]
) -> None:
    statuses = [http.post(f"/v2/models/{name}/infer", content=b"{", headers=headers) for name in ("nope", "affine")]
    assert [answer.status_code for answer in statuses] == [404, 400]


@pytest.mark.parametrize("holders", [("request",), ("inputs", "outputs")])
def test_too_many_parameters_are_refused(http: httpx.Client, holders: tuple[str, ...]) -> None:
    body: dict[str, Any] = {**affine(), "outputs": [{"name": "y"}]}
    for holder in holders:
        found = body if holder == "request" else body[holder][0]
        found["parameters"] = {f"p{index}": 1 for index in range(MAX_PARAMETERS // len(holders) + 1)}
    answer = http.post("/v2/models/affine/infer", json=body)
    assert (answer.status_code, f"at most {MAX_PARAMETERS} are accepted" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]], ids=["flat", "nested"])
def test_json_inference(http: httpx.Client, data: list[Any]) -> None:
    body = {"id": "mine", **affine(shape=[2, 3], data=data)}
    answer = http.post("/v2/models/affine/versions/1/infer", json=body)
    assert answer.json() == {
        "model_name": "affine",
        "model_version": "1",
        "id": "mine",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [2, 3], "data": [3, 5, 7, 9, 11, 13]},
            {"name": "z", "datatype": "FP32", "shape": [2, 3], "data": [-1, -2, -3, -4, -5, -6]},
        ],
    }


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_every_datatype_in_json(http: httpx.Client, dtype: DType) -> None:
    array = sample(dtype)
    data = [item.decode() for item in array.reshape(-1)] if dtype is DType.BYTES else array.astype(object).tolist()
    if dtype.is_float:
        data = array.astype(np.float64).tolist()
    body = {"inputs": [tensor(datatype=dtype.value, shape=[3, 2], data=data)]}
    answer = http.post(f"/v2/models/identity-{dtype.value.lower()}/infer", json=body).json()
    assert answer["outputs"][0]["datatype"] == dtype.value
    assert answer["outputs"][0]["data"] == np.array(data, dtype=object).reshape(-1).tolist()


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_every_datatype_in_binary(http: httpx.Client, dtype: DType) -> None:
    raw = arrays.to_bytes(sample(dtype))
    parameters = {"binary_data_size": len(raw)}
    # The identifier shifts where the tensor starts, so that unaligned data is met too.
    for identifier in ("", "a", "ab", "abc"):
        header = {
            "id": identifier,
            "inputs": [tensor(datatype=dtype.value, shape=[3, 2], parameters=parameters)],
            "parameters": {"binary_data_output": True},
        }
        body, headers = binary(header, raw)
        answer = http.post(f"/v2/models/identity-{dtype.value.lower()}/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        described, data = split(answer)
        assert described["outputs"][0]["parameters"] == parameters
        assert data == raw


def test_outputs_are_chosen_and_each_in_its_own_form(http: httpx.Client) -> None:
    wanted = [{"name": "z", "parameters": {"binary_data": True}}, {"name": "y"}]
    answer = http.post("/v2/models/affine/infer", json={**affine(), "outputs": wanted})
    described, data = split(answer)
    assert [output["name"] for output in described["outputs"]] == ["z", "y"]
    assert data == np.array([-1, -2, -3], "<f4").tobytes()
    assert described["outputs"][1]["data"] == [3, 5, 7]


def test_a_raw_body_is_one_input(http: httpx.Client) -> None:
    body = np.array([1, 2, 3], "<f4").tobytes()
    answer = http.post("/v2/models/affine/infer", content=body, headers={LENGTH: "0"})
    described, data = split(answer)
    assert described["outputs"][0]["shape"] == [1, 3]
    assert np.frombuffer(data, "<f4").tolist() == [3, 5, 7, -1, -2, -3]
    text = http.post("/v2/models/identity-bytes/infer", content=b"hello", headers={LENGTH: "0"})
    says = "For BYTE datatype raw input 'x', the model must have input shape [1]; it has [batch, 2]"
    assert (text.status_code, says in text.json()["error"]) == (400, True)
    two = http.post("/v2/models/pair/infer", content=body, headers={LENGTH: "0"})
    assert "must only have 1 input" in two.json()["error"]


BAD: list[tuple[str, Any, str]] = [
    ("missing input", {"inputs": []}, "'x' is missing"),
    ("no inputs at all", {}, "inputs"),
    ("unknown input", {"inputs": [tensor("w", data=[1, 2, 3])]}, "unknown input 'w'"),
    ("extra input", {"inputs": [*affine()["inputs"], tensor("w", data=[1, 2, 3])]}, "unknown input 'w'"),
    ("duplicate input", {"inputs": affine()["inputs"] * 2}, "twice"),
    ("wrong datatype", affine(datatype="FP64"), "FP64, the model takes FP32"),
    ("unknown datatype", affine(datatype="FLOAT"), "'FLOAT'"),
    ("wrong rank", affine(shape=[3]), "1 dimensions"),
    ("wrong fixed dimension", affine(shape=[1, 4], data=[1, 2, 3, 4]), "dimension 1"),
    ("too few values", affine(data=[1, 2]), "2 values"),
    ("ragged", affine(data=[[1, 2], [3]]), "ragged"),
    ("text in numbers", affine(data=["1", "2", "3"]), "numbers"),
    ("null", affine(data=[1, None, 3]), "numbers"),
    ("booleans in numbers", affine(data=[True, False, True]), "booleans"),
    ("number over FP32", affine(data=[1e300, 0, 0]), "range"),
    ("no data", {"inputs": [tensor()]}, "neither"),
    ("data not a list", affine(data=7), "list"),
    ("objects as data", affine(data=[{}, {}, {}]), "numbers"),
    ("negative shape", affine(shape=[-1, 3]), "-1"),
    ("shape of floats", affine(shape=[1.0, 3]), "1.0"),
    ("huge shape", affine(shape=[10**30, 3]), "not a size"),
    ("shape missing", {"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]}, "shape"),
    ("name not text", affine(name=7), "name"),
    ("inputs not a list", {"inputs": {}}, "inputs"),
    ("inputs of numbers", {"inputs": [1]}, "inputs"),
    ("parameters not an object", {**affine(), "parameters": 3}, "parameters"),
    ("id not text", {**affine(), "id": 3}, "id"),
    ("unknown output", {**affine(), "outputs": [{"name": "w"}]}, "unknown output 'w'"),
    ("output twice", {**affine(), "outputs": [{"name": "y"}, {"name": "y"}]}, "already exists"),
    ("flag not a flag", {**affine(), "parameters": {"binary_data_output": 1}}, "true or false"),
    ("timeout not a number", {**affine(), "parameters": {"timeout": "soon"}}, "microseconds"),
    ("a list", [1, 2], "object"),
]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(("body", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_json_requests(http: httpx.Client, body: Any, says: str) -> None:
    answer = http.post("/v2/models/affine/infer", json=body)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert says in answer.json()["error"]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"inputs": [NaN]}', b'{"a":' * 100_000, b"null", b'{"inputs": [1e999]}'],
    ids=["empty", "cut", "not utf-8", "NaN", "deep", "null", "infinite"],
)
def test_broken_json(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v2/models/affine/infer", content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(
    ("datatype", "data", "says"),
    [
        ("INT64", "[18446744073709551616, 0]", "64 bits"),
        ("INT64", "[9223372036854775808, 0]", "range"),
        ("INT64", "[1.5, 0]", "whole numbers"),
        ("INT64", "[1, 3.0]", "holds 3.0; write whole numbers of at most 64 bits, without a point"),
        ("INT8", "[128, 0]", "-128 to 127"),
        ("UINT8", "[-1, 0]", "0 to 255"),
        ("UINT64", "[18446744073709551615, -1]", "range"),
        ("BOOL", "[2, 0]", "true"),
        ("BYTES", "[1, 2]", "text"),
    ],
)
def test_numbers_that_do_not_fit(http: httpx.Client, datatype: str, data: str, says: str) -> None:
    body = f'{{"inputs": [{{"name": "x", "datatype": "{datatype}", "shape": [1, 2], "data": {data}}}]}}'
    answer = http.post(f"/v2/models/identity-{datatype.lower()}/infer", content=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(
    ("size", "given", "says"),
    [
        (12, 8, "only 8 bytes are left"),
        (8, 12, "8 bytes of data"),
        (12, 16, "4 bytes that no tensor"),
        (-1, 12, "number of bytes"),
        (2**63, 12, "only 12 bytes"),
        ("12", 12, "number of bytes"),
        (True, 12, "number of bytes"),
    ],
)
def test_lying_binary_sizes(http: httpx.Client, size: Any, given: int, says: str) -> None:
    body, headers = binary({"inputs": [tensor(parameters={"binary_data_size": size})]}, bytes(given))
    answer = http.post("/v2/models/affine/infer", content=body, headers=headers)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


VALUES = np.array([0, 2, 300], "<f4").tobytes()


@pytest.mark.parametrize("raw", [VALUES, b"abcdabcdabcd", bytes(12)], ids=["floats", "text", "zeros"])
@pytest.mark.parametrize("alone", [False, True])
def test_raw_tensors_without_the_header_are_explained(http: httpx.Client, raw: bytes, alone: bool) -> None:
    body, _ = binary({"inputs": [tensor(parameters={"binary_data_size": 12})]}, raw)
    answer = http.post("/v2/models/affine/infer", content=raw if alone else body)
    assert answer.status_code == 400
    assert f"the header {LENGTH} must be the JSON's length in bytes, and 0 if" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\x89PNG\r\n\x1a\n\0\xff", "it is a PNG image; if raw tensors"),
        (b"\xff\xd8\xff\xe0", "it is a JPEG image; if raw tensors"),
        (b"\xff\xfe\0", "it is not UTF-8; if raw tensors"),
        (
            b'{"inputs":[{"data":[1, NaN]}]}',
            r"JSON has no NaN .line 1 column 24 .char 23..; send the tensor as binary data",
        ),
        (b'{"inputs":[{"data":[-Infinity]}]}', "JSON has no -Infinity "),
        (LARGE, "data of tensor 'x' is not valid JSON: JSON has no NaN "),
        (b'{"inputs":[NO]}', "unexpected character"),
    ],
)
def test_what_is_not_json_is_named(http: httpx.Client, body: bytes, says: str) -> None:
    answer = http.post("/v2/models/affine/infer", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert re.search(says, answer.json()["error"])
    assert "surrogates" not in answer.text


@pytest.mark.parametrize("wrong", [-5, 5])
def test_a_header_that_cuts_the_json_elsewhere_is_named(http: httpx.Client, wrong: int) -> None:
    body, headers = binary({"inputs": [tensor(parameters={"binary_data_size": 12})]}, VALUES)
    length = int(headers[LENGTH]) + wrong
    answer = http.post("/v2/models/affine/infer", content=body, headers={LENGTH: str(length)})
    assert answer.status_code == 400
    assert f"{LENGTH} says that the first {length} bytes of the body are the JSON" in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b'{"inputs": [NaN]}', b"[1"])
def test_malformed_json_is_not_treated_as_raw_tensors(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v2/models/affine/infer", content=body)
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]
    assert LENGTH not in answer.json()["error"]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize("length", ["-1", "x", "99999999999999999999", "10000", "1.0", "3"])
def test_lying_header_lengths(http: httpx.Client, length: str) -> None:
    body, _ = binary(affine())
    answer = http.post("/v2/models/affine/infer", content=body, headers={LENGTH: length})
    assert answer.status_code == 400


@pytest.mark.usefixtures("still_answers")
def test_truncated_text_tensors(http: httpx.Client) -> None:
    raw = arrays.to_bytes(sample(DType.BYTES))
    for cut in (0, 3, 4, 10, len(raw) - 1):
        header = {"inputs": [tensor(datatype="BYTES", shape=[3, 2], parameters={"binary_data_size": cut})]}
        body, headers = binary(header, raw[:cut])
        assert http.post("/v2/models/identity-bytes/infer", content=body, headers=headers).status_code == 400


def test_text_that_is_not_utf8(http: httpx.Client) -> None:
    raw = arrays.to_bytes(np.array([[b"\xff", b"ok"]], dtype=object))
    body, headers = binary(
        {"inputs": [tensor(datatype="BYTES", shape=[1, 2], parameters={"binary_data_size": len(raw)})]}, raw
    )
    answer = http.post("/v2/models/identity-bytes/infer", content=body, headers=headers)
    assert (answer.status_code, "UTF-8" in answer.json()["error"]) == (400, True)


@pytest.mark.usefixtures("still_answers")
def test_shared_memory_is_off_by_default(http: httpx.Client) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    without = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": place}]}
    for body in (without, {**affine(), "outputs": [{"name": "y", "parameters": place}]}):
        answer = http.post("/v2/models/affine/infer", json=body)
        assert answer.status_code == 501
        assert "--shared-memory" in answer.json()["error"]


def test_infinity_is_answered_in_binary_and_refused_in_json(http: httpx.Client) -> None:
    body = {"inputs": [tensor(shape=[1, 1], data=[0])]}
    refused = http.post("/v2/models/reciprocal/infer", json=body)
    assert refused.status_code == 400
    assert "binary" in refused.json()["error"]
    answer = http.post("/v2/models/reciprocal/infer", json={**body, "parameters": {"binary_data_output": True}})
    assert np.frombuffer(split(answer)[1], "<f4").tolist() == [np.inf]


@pytest.mark.usefixtures("still_answers")
def test_a_value_that_the_model_rejects(http: httpx.Client) -> None:
    body = {"inputs": [tensor("ids", "INT64", [1, 2], data=[3, 99])]}
    answer = http.post("/v2/models/embedding/infer", json=body)
    assert answer.status_code == 400
    assert "out of data bounds" in answer.json()["error"]
    assert "/" not in answer.json()["error"].replace("[-10,9]", "")


def test_dimensions_that_disagree(http: httpx.Client) -> None:
    body = {"inputs": [tensor("a", shape=[1, 2], data=[1, 2]), tensor("b", shape=[1, 3], data=[1, 2, 3])]}
    answer = http.post("/v2/models/pair/infer", json=body)
    assert answer.status_code == 400
    assert "'seq' is 3" in answer.json()["error"]


def test_a_model_without_a_batch_is_served_whole(http: httpx.Client) -> None:
    body = {"inputs": [tensor(shape=[4], data=[1, 2, 3, 6])]}
    answer = http.post("/v2/models/unbatched/infer", json=body).json()
    assert answer["outputs"][0]["data"] == [-2, -1, 0, 3]


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compression_both_ways(http: httpx.Client, encoding: str, encode: Any) -> None:
    headers = {"Content-Encoding": encoding, "Accept-Encoding": encoding}
    answer = http.post("/v2/models/affine/infer", content=encode(json.dumps(affine()).encode()), headers=headers)
    assert answer.headers["content-encoding"] == encoding
    assert answer.json()["outputs"][0]["data"] == [3, 5, 7]  # httpx has decompressed it


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize("rows", [4000, 100_000])
def test_large_bodies_that_are_compressed(http: httpx.Client, rows: int) -> None:
    x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    sizes = tensor(shape=[rows, 3], parameters={"binary_data_size": x.nbytes})
    body, headers = binary({"inputs": [sizes], "parameters": {"binary_data_output": True}}, x.tobytes())
    packed = {**headers, "Content-Encoding": "gzip", "Accept-Encoding": "deflate"}
    answer = http.post("/v2/models/affine/infer", content=gzip.compress(body, 1), headers=packed)
    assert answer.headers["content-encoding"] == "deflate"
    assert split(answer)[1][: x.nbytes] == (2 * x + 1).tobytes()


def test_one_body_may_decompress_beyond_the_budget_but_not_with_others(folder: Path) -> None:
    body = gzip.compress(json.dumps(affine()).encode() + b" " * (3 << 20))
    headers = {"Content-Encoding": "gzip"}
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, max_bodies_mb=1) as own:
        url = f"{own.http_url}/v2/models/affine/infer"
        assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 200
        host, port = own.http_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as first:
            first.sendall(
                b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + bytes(800)
            )
            for _ in range(200):  # until the server has read the first one's bytes
                answer = httpx.post(url, content=body, headers=headers, trust_env=False)
                if answer.status_code == 503:
                    break
            assert "memory limit for request bodies" in answer.json()["error"]


def test_models_are_listed(http: httpx.Client) -> None:
    listed = http.get("/v2/models").json()["models"]
    assert {"name": "affine", "version": "1", "ready": True} in listed
    assert len(listed) > 5
    assert {"/v2/models", "/metrics"} <= set(http.get("/openapi.json").json()["paths"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, '"shape": [1, 2], "data": [1.5, 2]'),
        ({"inputs": [1]}, "'inputs' is not a list of objects"),
        ({**affine(), "id": 5}, "'id' of the request is 5; it must be text"),
        ({"inputs": [{"datatype": "FP32"}]}, "a tensor has no 'name'"),
    ],
)
def test_malformed_requests_are_answered_with_the_right_form(
    http: httpx.Client, body: dict[str, Any], says: str
) -> None:
    answer = http.post("/v2/models/affine/infer", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def test_a_list_of_encodings_does_not_request_one(http: httpx.Client) -> None:
    answer = http.post("/v2/models/affine/infer", json=affine(), headers={"Accept-Encoding": "gzip, deflate, br"})
    assert "content-encoding" not in answer.headers


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(json.dumps(affine()).encode())[:-6], 400),
        ("br", b"x", 415),
        ("gzip", gzip.compress(bytes(64 << 20)), 413),
    ],
    ids=["garbage", "cut", "unknown", "bomb"],
)
def test_bad_compression(http: httpx.Client, encoding: str, body: bytes, status: int) -> None:
    answer = http.post("/v2/models/affine/infer", content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == status
    assert answer.headers.get("accept-encoding") == ("deflate, gzip" if status == 415 else None)


@pytest.mark.parametrize(("depth", "status"), [(50, 200), (99, 200), (101, 400), (900, 400)])
def test_data_may_be_nested_in_a_hundred_lists(http: httpx.Client, depth: int, status: int) -> None:
    """As deep as Triton allows (its L0_http, test_json_recursion_depth_limit)."""
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": "VALUES"}
    body = json.dumps({"inputs": [tensor]}).replace('"VALUES"', "[" * depth + '"a", "b"' + "]" * depth)
    answer = http.post("/v2/models/identity-bytes/infer", content=body)
    assert answer.status_code == status
    if status == 400:
        assert "JSON nesting depth exceeds maximum allowed limit (100)" in answer.json()["error"]


def _raw(server: RunningServer, request: bytes) -> bytes:
    host, port = server.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.usefixtures("still_answers")
def test_a_gigabyte_is_refused_before_it_is_sent(server: RunningServer) -> None:
    head = "POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n"
    answer = _raw(server, head.encode())  # returns at all only because the server answers and closes
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"--max-body-mb" in answer


@pytest.mark.usefixtures("still_answers")
def test_an_endless_chunked_body_is_cut(server: RunningServer) -> None:
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    head = b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    try:
        answer = _raw(server, head + chunk * 128)  # 8 MiB; the limit here is 4
    except (ConnectionResetError, BrokenPipeError):
        return  # closed while we were still sending: refused as well
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.usefixtures("still_answers")
def test_a_client_that_leaves_in_the_middle(server: RunningServer, http: httpx.Client) -> None:
    """It is not an error of the server: not counted as internal, and not logged with a traceback."""

    def internal() -> list[str]:
        return [line for line in http.get("/metrics").text.splitlines() if 'code="internal",protocol="http"' in line]

    before = internal()
    host, port = server.http_url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert http.get("/v2/health/live").status_code == 200
    assert internal() == before


def test_errors_are_counted(http: httpx.Client) -> None:
    def count() -> float:
        lines = http.get("/metrics").text.splitlines()
        wanted = [line for line in lines if line.startswith('ingot_errors_total{code="not_found",protocol="http"}')]
        return float(wanted[0].split()[-1]) if wanted else 0.0

    before = count()
    http.get("/v2/models/nope")
    http.get("/nowhere")
    http.post("/v2/models/nope/infer", json=affine())
    assert count() == before + 3


def test_the_openapi_description_names_the_bodies(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    body = description["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]
    assert "inputs" in body["content"]["application/json"]["schema"]["properties"]


@pytest.mark.usefixtures("still_answers")
def test_a_long_text_among_numbers_costs_nothing(http: httpx.Client) -> None:
    """numpy alone would allocate an array of equally long texts: some terabytes."""
    body = affine(shape=[1 << 18, 3], data=["a" * (1 << 20), *[1] * (3 * (1 << 18) - 1)])
    answer = http.post("/v2/models/affine/infer", json=body)
    assert (answer.status_code, "numbers" in answer.json()["error"]) == (400, True)


@pytest.mark.usefixtures("still_answers")
def test_more_tensors_than_any_model_has(http: httpx.Client) -> None:
    many = [tensor(f"x{index}", shape=[0], data=[]) for index in range(2000)]
    assert "1024" in http.post("/v2/models/affine/infer", json={"inputs": many}).json()["error"]
    outputs = [{"name": "y"}] * 2000
    assert "1024" in http.post("/v2/models/affine/infer", json={**affine(), "outputs": outputs}).json()["error"]


def test_a_name_of_megabytes_is_not_sent_back(http: httpx.Client) -> None:
    answer = http.post("/v2/models/affine/infer", json={"inputs": [tensor("x" * (1 << 20), data=[1, 2, 3])]})
    assert answer.status_code == 400
    assert len(answer.content) < 2000


def test_the_version_is_in_the_path_and_nowhere_else(http: httpx.Client) -> None:
    assert http.post("/v2/models/affine/infer?version=9", json=affine()).status_code == 200


def test_gzip_of_several_members(http: httpx.Client) -> None:
    raw = json.dumps(affine()).encode()
    body = gzip.compress(raw[:20]) + gzip.compress(raw[20:])
    headers = {"Content-Encoding": "gzip"}
    assert http.post("/v2/models/affine/infer", content=body, headers=headers).status_code == 200
    assert http.post("/v2/models/affine/infer", content=body + b"junk", headers=headers).status_code == 400
    many = http.post("/v2/models/affine/infer", content=gzip.compress(b"") * 100_000 + body, headers=headers)
    assert many.status_code == 400
    assert "send it as one stream" in many.json()["error"]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize("line", [b"X-n: aaaaaaaaaaaaaaaa\r\n", b"a"], ids=["many headers", "one endless header"])
def test_headers_without_end_are_cut(server: RunningServer, line: bytes) -> None:
    head = b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-start: "
    try:
        answer = _raw(server, head + line * (200_000 // len(line)))
    except (ConnectionResetError, BrokenPipeError):
        return  # closed while we were still sending: refused as well
    assert answer.startswith(b"HTTP/1.1 431")


def test_bodies_together_are_bounded(folder: Path) -> None:
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, max_bodies_mb=1) as own:
        host, port = own.http_url.removeprefix("http://").split(":")
        head = b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as first:
            first.sendall(head + bytes(800_000))
            body = json.dumps(affine()).encode() + b" " * 500_000
            for _ in range(200):  # until the server has read the first one's bytes
                answer = httpx.post(f"{own.http_url}/v2/models/affine/infer", content=body, trust_env=False)
                if answer.status_code == 503:
                    break
            assert "memory limit for request bodies" in answer.json()["error"]
        for _ in range(200):  # and its part is given back when it leaves
            answer = httpx.post(f"{own.http_url}/v2/models/affine/infer", content=body, trust_env=False)
            if answer.status_code == 200:
                break
        assert answer.status_code == 200


def test_a_pipelined_request_whose_head_arrives_with_a_large_body(server: RunningServer) -> None:
    body = json.dumps(affine()).encode() + b" " * 300_000
    head = b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, port = server.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + body + b"GET /v2/health/live HTTP/1.1\r\nHost:")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b" x\r\nConnection: close\r\n\r\n")
        rest = b""
        while part := connection.recv(65536):
            rest += part
    assert b"HTTP/1.1 200" in rest
    assert rest.endswith(b'{"live":true}')


def test_a_refusal_keeps_the_connection_unless_the_body_was_left_unread(server: RunningServer) -> None:
    """Refused clients must not have to reconnect each time."""
    late = json.dumps({**affine(), "parameters": {"timeout": 1}}).encode()
    bomb = gzip.compress(bytes(8 << 20))  # read to its end, and over the limit only when it is decompressed
    head = b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n"
    requests = (
        head % (b"affine", 1, b"") + b"{",
        head % (b"nope", len(late), b"") + late,
        head % (b"affine", len(bomb), b"Content-Encoding: gzip\r\n") + bomb,
        head % (b"affine", len(late), b"Connection: close\r\n") + late,
    )
    answer = _raw(server, b"".join(requests))
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"400", b"404", b"413", b"504"]
