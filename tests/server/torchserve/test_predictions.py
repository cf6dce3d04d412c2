"""Predictions by TorchServe's API: what clients send, and what they read."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from ingot import RunningServer
from ingot.runtime.engines.python.torchserve.rows import Part
from ingot.server.torchserve import predictions
from ingot.server.torchserve.bodies import parts_of
from tests.server.test_image_steps import files
from tests.server.torchserve.conftest import client

ROW = [1.0, 2.0, 3.0]
PART = b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n[1,2,3]\r\n'


def affine(server: RunningServer, rows: Any) -> list[Any]:
    """Return the two outputs of each row."""
    outputs = server.infer("affine", {"x": np.array(rows, np.float32)})
    return [{"y": y, "z": z} for y, z in zip(outputs["y"].tolist(), outputs["z"].tolist(), strict=True)]


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def refused(answer: httpx.Response, status: int, kind: str, *parts: str) -> None:
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert (content["code"], content["type"]) == (status, kind)
    for part in parts:
        assert part in content["message"]


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("path", ["/predictions/affine", "/predictions/affine/1", "/models/affine/invoke"])
def test_one_sample_in_json(torchserve: RunningServer, inference: httpx.Client, method: str, path: str) -> None:
    answer = inference.request(method, path, json=ROW)
    assert ok(answer) == affine(torchserve, [ROW])[0]
    assert answer.text == json.dumps(affine(torchserve, [ROW])[0], indent=2), "as TorchServe's workers write it"


def test_several_samples_in_json(torchserve: RunningServer, inference: httpx.Client) -> None:
    assert ok(inference.post("/predictions/affine", json=[ROW, ROW])) == affine(torchserve, [ROW, ROW])


@pytest.mark.parametrize(
    ("body", "media"),
    [
        (np.array(ROW, np.float32).tobytes(), "application/octet-stream"),
        (np.array(ROW, np.float32).tobytes(), None),
        (b"[1, 2, 3]", "application/x-www-form-urlencoded"),
        (b"x=%5B1%2C2%2C3%5D", "application/x-www-form-urlencoded"),
        (b"[1, 2, 3]", "text/plain; charset=utf-8"),
        (b'{"x": [1, 2, 3]}', "application/json"),
        (b'{"data": [1, 2, 3]}', "application/json"),
    ],
)
def test_other_bodies(torchserve: RunningServer, inference: httpx.Client, body: bytes, media: str | None) -> None:
    headers = {} if media is None else {"content-type": media}
    assert ok(inference.post("/predictions/affine", content=body, headers=headers)) == affine(torchserve, [ROW])[0]


def test_several_samples_as_bytes(torchserve: RunningServer, inference: httpx.Client) -> None:
    body = np.array([ROW, ROW], np.float32).tobytes()
    assert ok(inference.put("/predictions/affine", content=body)) == affine(torchserve, [ROW, ROW])


@pytest.mark.parametrize("part", ["x", "data", "body"])
def test_a_form_names_its_values(torchserve: RunningServer, inference: httpx.Client, part: str) -> None:
    form = {part: ("file.json", b"[1, 2, 3]", "application/json")}
    assert ok(inference.post("/predictions/affine", files=form)) == affine(torchserve, [ROW])[0]


def test_several_inputs_and_outputs_have_names(torchserve: RunningServer, inference: httpx.Client) -> None:
    arrays = {name: np.ones((1, 2), np.float32) for name in ("a", "b")}
    outputs = torchserve.infer("pair", arrays)
    wanted = {name: array.tolist()[0] for name, array in outputs.items()}
    found = ok(inference.post("/predictions/pair", json={"a": [1, 1], "b": [1, 1]}))
    assert found == (wanted if len(wanted) > 1 else next(iter(wanted.values())))


def test_a_picture_gets_labels(inference: httpx.Client) -> None:
    [red] = files("red")
    for answer in (
        inference.put("/predictions/colour", content=red),
        inference.post("/predictions/colour", content=red, headers={"content-type": "image/png"}),
        inference.post("/predictions/colour", files={"data": ("red.png", red)}),
        inference.post("/predictions/colour", files={"image": ("red.png", red)}),
        inference.post("/predictions/colour", json={"data": base64.b64encode(red).decode()}),
        inference.post("/predictions/colour", json=base64.b64encode(red).decode()),
    ):
        found = ok(answer)
        assert [*found] == ["red", "green", "blue"]
        assert found["red"] > 0.99


def test_a_list_of_pictures_gets_a_list(inference: httpx.Client) -> None:
    pictures = [base64.b64encode(each).decode() for each in files("red", "blue")]
    assert [next(iter(each)) for each in ok(inference.post("/predictions/colour", json=pictures))] == ["red", "blue"]


def test_kserves_first_protocol(torchserve: RunningServer, inference: httpx.Client) -> None:
    found = ok(inference.post("/v1/models/affine:predict", json={"instances": [{"data": ROW}, ROW]}))
    assert found == {"predictions": affine(torchserve, [ROW, ROW])}
    assert ok(inference.post("/v1/models/affine:predict", json=ROW)) == affine(torchserve, [ROW])[0]
    empty = inference.post("/v1/models/affine:predict", json={"instances": []})
    refused(empty, 400, "BadRequestException", "'instances' must be a list")


def test_invocations_name_the_model(torchserve: RunningServer, inference: httpx.Client) -> None:
    assert ok(inference.post("/invocations?model_name=affine", json=ROW)) == affine(torchserve, [ROW])[0]
    form = {"model_name": (None, "affine"), "data": (None, "[1, 2, 3]")}
    assert ok(inference.post("/invocations", files=form)) == affine(torchserve, [ROW])[0]
    refused(inference.post("/invocations", json=ROW), 400, "BadRequestException", "model_name is required")


def test_a_compressed_body(torchserve: RunningServer, inference: httpx.Client) -> None:
    import gzip

    body, headers = gzip.compress(b"[1, 2, 3]"), {"content-encoding": "gzip", "content-type": "application/json"}
    assert ok(inference.post("/predictions/affine", content=body, headers=headers)) == affine(torchserve, [ROW])[0]


def test_a_large_body_in_json(torchserve: RunningServer, inference: httpx.Client) -> None:
    rows = np.arange(3 * 8000, dtype=np.float32).reshape(-1, 3).tolist()
    assert ok(inference.post("/predictions/affine", json=rows)) == affine(torchserve, rows)


def test_a_model_without_a_batch(torchserve: RunningServer, inference: httpx.Client) -> None:
    signature = torchserve._server.repository.get("unbatched").signature
    [spec] = signature.inputs
    array = np.ones([size if isinstance(size, int) else 2 for size in spec.shape], np.float32)
    outputs = torchserve.infer("unbatched", {spec.name: array})
    [wanted] = [each.tolist() for each in outputs.values()]
    assert ok(inference.post("/predictions/unbatched", json=array.tolist())) == wanted


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "part"),
    [
        ("/predictions/nope", b"[]", 404, "ModelNotFoundException", "Model not found: nope"),
        ("/predictions/affine/9", b"[]", 404, "ModelVersionNotFoundException", "Model version: 9 does not exist"),
        ("/predictions", b"[]", 404, "ResourceNotFoundException", "OPTIONS /"),
        ("/predictions/affine", b"[1, 2]", 400, "BadRequestException", "the model takes 3"),
        ("/predictions/affine", b"[1, 2", 400, "BadRequestException", "not JSON"),
        ("/predictions/affine", b'{"z": 1}', 400, "BadRequestException", "'x' is missing"),
        ("/predictions/affine", b'{"x": 1, "z": 1}', 400, "BadRequestException", "'z' is not one of them"),
        ("/explanations/affine", b"[1, 2, 3]", 405, "MethodNotAllowedException", "has no code that explains"),
        ("/v1/models/affine:explain", b"[1, 2, 3]", 405, "MethodNotAllowedException", "explanations"),
    ],
)
def test_errors_have_torchserves_form(
    inference: httpx.Client, path: str, body: bytes, status: int, kind: str, part: str
) -> None:
    refused(inference.post(path, content=body, headers={"content-type": "application/json"}), status, kind, part)


def test_a_picture_that_is_none(inference: httpx.Client) -> None:
    refused(inference.put("/predictions/colour", content=b"hello"), 400, "BadRequestException", "not a JPEG")


def test_a_body_over_the_limit(inference: httpx.Client) -> None:
    refused(inference.put("/predictions/colour", content=b"x" * (5 << 20)), 413, "TooLongFrameException")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n[1,2,3]', "no end"),
        (b"--b\r\n\r\n[1,2,3]\r\n--b--", "no header 'Content-Disposition"),
        (
            b"".join(b"--b\r\nContent-Disposition: form-data; name=a%d\r\n\r\n\r\n" % each for each in range(80))
            + b"--b--",
            "64",
        ),
        (b"", "no end"),
        (b'--b\r\nContent-Disposition: form-data; name="x"' + b";" * (1 << 20) + b"\r\n\r\n1\r\n--b--", "4096"),
    ],
)
def test_forms_that_are_none(inference: httpx.Client, body: bytes, part: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused(inference.post("/predictions/affine", content=body, headers=headers), 400, "BadRequestException", part)


@pytest.mark.source  # patches parts_of
@pytest.mark.parametrize(("size", "thread"), [(0, "ingot-server"), (100_000, "ingot-bodies")])
def test_large_forms_are_read_in_a_thread(
    torchserve: RunningServer, inference: httpx.Client, monkeypatch: pytest.MonkeyPatch, size: int, thread: str
) -> None:
    seen: list[str] = []

    def noted(body: bytes, media_type: str) -> list[Part]:
        seen.append(threading.current_thread().name.partition("_")[0])
        return parts_of(body, media_type)

    monkeypatch.setattr(predictions, "parts_of", noted)
    part = PART.replace(b"\r\n\r\n", b"\r\nContent-Type: application/json\r\n\r\n" + b" " * size)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = inference.post("/predictions/affine", content=part + b"--b--", headers=headers)
    assert ok(answer) == affine(torchserve, [ROW])[0]
    assert seen == [thread]


def test_a_content_type_of_many_parameters(inference: httpx.Client) -> None:
    headers = {"content-type": "multipart/form-data" + ";" * 8192}
    answer = inference.post("/predictions/affine", content=b"x", headers=headers)
    refused(answer, 400, "BadRequestException", "Content-Type", "4096")


def test_a_form_without_a_boundary(inference: httpx.Client) -> None:
    headers = {"content-type": "multipart/form-data"}
    refused(
        inference.post("/predictions/affine", content=b"x", headers=headers), 400, "BadRequestException", "boundary"
    )


def test_other_methods_and_paths(inference: httpx.Client) -> None:
    refused(inference.get("/predictions/affine"), 405, "MethodNotAllowedException")
    refused(inference.get("/models"), 404, "ResourceNotFoundException")
    refused(inference.post("/models?url=net:1"), 404, "ResourceNotFoundException")
    refused(inference.get("/metrics"), 404, "ResourceNotFoundException")


def test_the_description_lists_the_operations(inference: httpx.Client) -> None:
    assert "/predictions/{model}" in ok(inference.options("/"))["paths"]


def test_ping(inference: httpx.Client) -> None:
    answer = inference.get("/ping")
    assert (answer.status_code, answer.text) == (200, '{\n  "status": "Healthy"\n}\n')


def test_the_port_of_metrics_serves_only_these(torchserve: RunningServer, inference: httpx.Client) -> None:
    with client(torchserve, "metrics") as metrics:
        before = counted(metrics)
        ok(inference.post("/predictions/affine", json=ROW))
        assert counted(metrics) == before + 1
        for request in (("POST", "/predictions/affine"), ("GET", "/models"), ("GET", "/ping")):
            refused(metrics.request(*request, json=ROW), 404, "ResourceNotFoundException")
        names = {line.split("{")[0] for line in metrics.get("/metrics").text.splitlines() if not line.startswith("#")}
        assert {"ts_inference_latency_microseconds", "Requests2XX", "ingot_requests_total"} <= names


def counted(metrics: httpx.Client) -> float:
    text = metrics.get("/metrics", params={"name[]": "ts_inference_requests_total"}).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.startswith("ts_inference_requests_total{") for line in lines)
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'model_name="affine"' in line)
