"""Management by TorchServe's API: texts, codes and descriptions as its clients and its own tests expect them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from ingot import RunningServer, Store
from tests.server.access.served import make_key
from tests.server.torchserve.conftest import PORTS, client
from tests.server.torchserve.test_predictions import ROW, ok, refused
from tests.support import RunIngot, succeeded
from tests.support import refused as refused_command

QUIET = {"http_port": 0, "grpc_port": 0, "torchserve": True, "torchserve_ports": PORTS}


@pytest.fixture
def server(store: Store) -> Iterator[RunningServer]:
    with ingot.serve("colour:1", store=store, insecure=True, **QUIET) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture
def manage(server: RunningServer) -> Iterator[httpx.Client]:
    with client(server, "management") as found:
        yield found


@pytest.fixture
def predict(server: RunningServer) -> Iterator[httpx.Client]:
    with client(server, "inference") as found:
        yield found


def status(answer: httpx.Response, code: int, text: str) -> None:
    assert (answer.status_code, answer.json()) == (code, {"status": text})


def test_a_model_is_registered_scaled_and_unregistered(manage: httpx.Client, predict: httpx.Client) -> None:
    status(
        manage.post("/models?url=net.mar&initial_workers=0"),
        200,
        'Model "net" Version: 2 registered with 0 initial workers. Use scale workers API to add workers for the model.',
    )
    idle = predict.post("/predictions/net", json=ROW)
    refused(idle, 503, "ServiceUnavailableException", 'Model "net" has no worker', "PUT /models/net?min_worker=1")
    assert manage.get("/models/net").json()[0]["workers"] == []
    refused(manage.post("/models?url=net:2"), 409, "ConflictStatusException", "Model version 2 is already registered")
    status(manage.put("/models/net?min_worker=2&synchronous=true"), 200, "Workers scaled to 2 for model: net")
    assert len(manage.get("/models/net").json()[0]["workers"]) == 2
    ok(predict.post("/predictions/net", json=ROW))
    status(
        manage.put("/models/net/2?min_worker=1&synchronous=true"), 200, "Workers scaled to 1 for model: net, version: 2"
    )
    status(manage.put("/models/net?min_worker=0&synchronous=true"), 200, "Workers scaled to 0 for model: net")
    refused(predict.post("/predictions/net", json=ROW), 503, "ServiceUnavailableException")
    status(manage.delete("/models/net"), 200, 'Model "net" unregistered')
    refused(manage.get("/models/net"), 404, "ModelNotFoundException", "Model not found: net")
    refused(manage.delete("/models/net"), 404, "ModelNotFoundException")
    refused(predict.post("/predictions/net", json=ROW), 404, "ModelNotFoundException")


def test_the_first_version_is_the_default_until_another_is_set(manage: httpx.Client, predict: httpx.Client) -> None:
    for tag, url in (("1", "net:1"), ("2", "net:2.mar")):
        answer = manage.post(f"/models?url={url}&initial_workers=1&synchronous=true")
        status(answer, 200, f'Model "net" Version: {tag} registered with 1 initial workers')
    assert version(manage) == "1"
    assert {each["modelVersion"] for each in manage.get("/models/net/all").json()} == {"1", "2"}
    text = 'Default version successfully updated for model "net" to "2"'
    status(manage.put("/models/net/2/set-default"), 200, text)
    assert version(manage) == "2"
    refused(manage.put("/models/net/9/set-default"), 404, "ModelVersionNotFoundException", "Model version: 9 does not")
    kept = manage.delete("/models/net/2")
    refused(kept, 403, "InvalidModelVersionException", "Cannot remove default version for model net")
    status(manage.delete("/models/net/1"), 200, 'Model "net" unregistered')
    refused(predict.post("/predictions/net/1", json=ROW), 404, "ModelVersionNotFoundException")
    ok(predict.post("/predictions/net", json=ROW))


def version(manage: httpx.Client) -> Any:
    return manage.get("/models/net").json()[0]["modelVersion"]


def test_asynchronous_changes_are_accepted(manage: httpx.Client, predict: httpx.Client) -> None:
    query = "url=net:1&initial_workers=1&synchronous=false"
    status(manage.post(f"/models?{query}"), 202, "Processing worker updates...")
    status(manage.put("/models/net?min_worker=2"), 202, "Processing worker updates...")
    status(manage.put("/models/net?min_worker=2&synchronous=true"), 200, "Workers scaled to 2 for model: net")
    ok(predict.post("/predictions/net", json=ROW))


def test_another_name_and_settings(manage: httpx.Client) -> None:
    query = "url=net&model_name=mine&batch_size=4&max_batch_delay=50&initial_workers=1&synchronous=true"
    status(manage.post(f"/models?{query}"), 200, 'Model "mine" Version: 2 registered with 1 initial workers')
    [described] = manage.get("/models/mine").json()
    assert (described["batchSize"], described["maxBatchDelay"], described["modelUrl"]) == (4, 50, "net")
    assert (described["loadedAtStartup"], described["minWorkers"]) == (False, 1)
    manage.put("/models/mine?min_worker=2&synchronous=true")
    [described] = manage.get("/models/mine").json()
    assert (described["batchSize"], described["maxBatchDelay"], described["minWorkers"]) == (4, 50, 2)


def test_a_description_has_the_fields_of_torchserve(manage: httpx.Client) -> None:
    [described] = manage.get("/models/colour").json()
    assert [*described] == [
        "modelName",
        "modelVersion",
        "modelUrl",
        "runtime",
        "minWorkers",
        "maxWorkers",
        "batchSize",
        "maxBatchDelay",
        "responseTimeout",
        "startupTimeout",
        "loadedAtStartup",
        "workers",
        "jobQueueStatus",
    ]
    [worker] = described["workers"]
    assert [*worker] == ["id", "startTime", "status", "memoryUsage", "pid", "gpu", "gpuUsage"]
    assert (worker["status"], described["loadedAtStartup"]) == ("READY", True)
    assert [*described["jobQueueStatus"]] == ["remainingCapacity", "pendingRequests"]
    refused(manage.get("/models/colour/7"), 404, "ModelVersionNotFoundException")


def test_models_are_listed_in_pages(manage: httpx.Client) -> None:
    manage.post("/models?url=net:1")
    manage.post("/models?url=other:1")
    first = manage.get("/models?limit=2").json()
    assert [each["modelName"] for each in first["models"]] == ["colour", "net"]
    second = manage.get(f"/models?limit=2&next_page_token={first['nextPageToken']}").json()
    assert second == {"models": [{"modelName": "other", "modelUrl": "other:1"}]}
    assert len(manage.get("/models?limit=&next_page_token=").json()["models"]) == 3


@pytest.mark.parametrize(
    ("query", "code", "kind", "part"),
    [
        ("", 400, "BadRequestException", "Parameter url is required."),
        ("url=https://models.example.com/net.mar", 400, "BadRequestException", "does not match any allowed URL"),
        ("url=file:///etc/passwd", 400, "BadRequestException", "does not match any allowed URL"),
        ("url=oci://models.example.com/net:1", 400, "BadRequestException", "does not match any allowed URL"),
        ("url=../net.mar", 404, "ModelNotFoundException", "Relative path is not allowed in url: ../net.mar"),
        ("url=/etc/passwd", 404, "ModelNotFoundException", "Relative path"),
        ("url=net.onnx", 403, "InvalidKeyException", "'net.onnx' is not in the server's store"),
        ("url=nope.mar", 404, "ModelNotFoundException", "the store has no model 'nope'"),
        ("url=net:9", 404, "ModelNotFoundException", "the store has no 'net:9'"),
        ("url=net&handler=evil.py:handle", 400, "BadRequestException", "handler"),
        ("url=net&runtime=python4", 400, "BadRequestException", "Invalid RuntimeType value: python4"),
        ("url=net&initial_workers=100", 400, "BadRequestException", "instances"),
    ],
)
def test_what_is_not_registered(manage: httpx.Client, query: str, code: int, kind: str, part: str) -> None:
    refused(manage.post(f"/models?{query}"), code, kind, part)
    assert [each["modelName"] for each in manage.get("/models").json()["models"]] == ["colour"]


@pytest.mark.parametrize(
    ("method", "path", "code", "kind"),
    [
        ("PUT", "/models/nope?min_worker=1", 404, "ModelNotFoundException"),
        ("PUT", "/models/colour/0.0?min_worker=1&synchronous=true", 404, "ModelVersionNotFoundException"),
        ("PUT", "/models/colour?min_worker=3&max_worker=1", 400, "BadRequestException"),
        ("PUT", "/models/colour?min_worker=100000", 400, "BadRequestException"),
        ("PATCH", "/models/colour", 405, "MethodNotAllowedException"),
        ("DELETE", "/models", 405, "MethodNotAllowedException"),
        ("POST", "/predictions/colour", 404, "ResourceNotFoundException"),
        ("GET", "/other", 404, "ResourceNotFoundException"),
    ],
)
def test_other_errors(manage: httpx.Client, method: str, path: str, code: int, kind: str) -> None:
    refused(manage.request(method, path), code, kind)


def test_web_pages_change_nothing(manage: httpx.Client) -> None:
    page = {"origin": "https://evil.example.com"}
    refused(manage.post("/models?url=net:1", headers=page), 403, "InvalidKeyException", "web pages")
    rebound = manage.get("/models", headers={"host": "evil.example.com"})
    assert rebound.status_code == 421, "a name that a page made resolve to this machine"


def test_management_is_closed_without_keys(store: Store) -> None:
    with ingot.serve("colour:1", store=store, **QUIET) as running:  # type: ignore[arg-type]
        assert [*running.torchserve_urls] == ["inference", "metrics", "gRPC inference"]


def test_management_needs_a_key_that_may_manage(store: Store, tmp_path: Path) -> None:
    made = {scope: make_key(tmp_path / "keys.toml", scope) for scope in ("infer", "manage")}
    auth = tmp_path / "keys.toml"
    with (
        ingot.serve("colour:1", store=store, auth=auth, **QUIET) as running,  # type: ignore[arg-type]
        client(running, "management") as manage,
        client(running, "inference") as predict,
    ):
        assert (manage.get("/ping").status_code, predict.get("/ping").status_code) == (200, 200)
        refused(manage.get("/models"), 401, "InvalidKeyException")
        refused(predict.put("/predictions/colour", content=b"x"), 401, "InvalidKeyException")
        for name, code in (("infer", 403), ("manage", 200)):
            assert manage.get("/models", headers={"authorization": f"Bearer {made[name]}"}).status_code == code
        key = {"authorization": f"Bearer {made['infer']}"}
        assert predict.put("/predictions/colour", content=b"x", headers=key).status_code == 400


def test_a_token_file_of_torchserve_opens_both_apis(store: Store, tmp_path: Path, run_ingot: RunIngot) -> None:
    auth, file = tmp_path / "keys.toml", tmp_path / "key_file.json"
    command = ("server", "keys", "torchserve", str(file), "--file", str(auth), "--expires", "1h")
    succeeded(run_ingot(*command))
    assert file.stat().st_mode & 0o777 == 0o600
    assert "exists; remove it" in refused_command(run_ingot(*command))
    keys = json.loads(file.read_text())
    assert all(datetime.fromisoformat(keys[name]["expiration time"]) > datetime.now(UTC) for name in keys)
    with (
        ingot.serve("colour:1", store=store, auth=auth, **QUIET) as running,  # type: ignore[arg-type]
        client(running, "management") as manage,
        client(running, "inference") as predict,
    ):
        for name, models, predictions in (("management", 200, 403), ("inference", 403, 400)):
            header = {"authorization": f"Bearer {keys[name]['key']}"}
            assert manage.get("/models", headers=header).status_code == models
            assert predict.put("/predictions/colour", content=b"x", headers=header).status_code == predictions


def test_the_store_is_read_in_vain_for_files(manage: httpx.Client, tmp_path: Path) -> None:
    """ShellTorch and its followers: no path and no address in a request makes the server read or write a file."""
    before = {path.name for path in Path.cwd().iterdir()}
    for url in (f"{tmp_path}/x.mar", "..%2f..%2fx.mar", "~/x.mar", "x.mar%00", "s3://bucket/x.mar", "a=../x"):
        assert manage.post(f"/models?url={url}").status_code in (400, 403, 404)
    assert {path.name for path in Path.cwd().iterdir()} == before
