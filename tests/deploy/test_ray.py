"""`ingot deploy ray`: a configuration that Serve reads, and replicas on a real cluster of three raylets."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import yaml
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

import ingot
from ingot.deploy.ray.plan import Plan
from ingot.deploy.ray.proxy import JsonErrors, middlewares
from ingot.deploy.ray.scaling import ExpectedWait
from ingot.errors import IngotError, InvalidArgument, NotFound
from ingot.model_store import Store
from tests.serving.rolling import X, times
from tests.support import RunIngot, refused, succeeded

if TYPE_CHECKING:
    from tests.deploy.raylets import Raylets


@pytest.fixture
def stored(run_ingot: RunIngot, tmp_path: Path) -> Store:
    """The store of ``run_ingot``, with two versions and an alias of the first."""
    store = Store(tmp_path / "home")
    fill(store)
    return store


def fill(store: Store) -> None:
    for version in (1, 2):
        store.push(times(version), f"times:{version}")
    store.promote("times:1", "prod")


def written(run_ingot: RunIngot, *args: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(succeeded(run_ingot("deploy", "ray", *args)))
    return config


def deployed(config: dict[str, Any]) -> dict[str, Any]:
    [application] = config["applications"]
    [deployment] = application["deployments"]
    assert application["name"] == deployment["name"] == application["args"]["name"]
    found: dict[str, Any] = deployment
    return found


def test_values_follow_from_settings(run_ingot: RunIngot, stored: Store) -> None:
    config = written(run_ingot, "times:prod", "--replicas", "1..8", "--num-gpus", "0.25", "--slo", "50ms")
    found = deployed(config)
    scaling = found["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 8)
    assert scaling["policy"] == {
        "policy_function": "ingot.deploy.ray.scaling:ExpectedWait",
        "policy_kwargs": {"target": 0.025},
    }
    assert found["ray_actor_options"]["num_gpus"] == 0.25
    assert found["max_ongoing_requests"] > 4096  # so that the queue is the scheduler's
    arguments = config["applications"][0]["args"]
    assert arguments["settings"] == {"slo": 0.05, "device": "cuda"}
    assert arguments["store"] == str(stored.root)


@pytest.mark.matrix
def test_aliases_are_followed_and_versions_are_fixed(run_ingot: RunIngot, stored: Store) -> None:
    for source in ("times:prod", "times:2", "two=times:2#fp32"):
        [model] = deployed(written(run_ingot, source))["user_config"]["models"]
        if source == "times:prod":
            assert model == "times=times:prod"
        else:
            name, variant = ("two", "#fp32") if "=" in source else ("times", "")
            assert model == f"{name}=times:2@{stored.find('times:2')[0].digest}{variant}"


@pytest.mark.matrix
def test_replicas_read_a_registry(run_ingot: RunIngot, pushed: str) -> None:
    config = written(run_ingot, pushed, "--replicas", "3")
    assert deployed(config)["user_config"]["models"] == [f"digits={pushed}"]
    scaling = deployed(config)["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (3, 3)
    assert "store" not in config["applications"][0]["args"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent:1"], "no model 'absent'"),
        (["times:1", "times:2"], "two models are called 'times'"),
        (["./times.ingot"], "replicas cannot read the file ./times.ingot; copy it to a registry: ingot copy"),
        (["times:1", "--replicas", "8..1"], "the least must be at least 1 and at most the most"),
        (["times:1", "--num-gpus", "1.5"], "a share of one, such as 0.25, or a whole number"),
        (["times:1", "--num-gpus", "-1"], "a share of one, such as 0.25, or a whole number"),
        (["times:1", "--num-gpus", "1", "--device", "cpu"], "contradict each other"),
        (["times:1", "--device", "cuda"], "add --num-gpus 1"),
        (["times:1", "--auth", "keys.toml"], "--auth (INGOT_AUTH) has no effect behind the proxies of Ray Serve"),
        (["times:1", "--management", "127.0.0.1:1", "--insecure"], "--management (INGOT_MANAGEMENT) has no effect"),
        (["times:1", "--states", "a=b", "--replicas", "2"], "requests of one sequence would reach several replicas"),
        (["times:1", "--route-prefix", "a"], "--route-prefix 'a' must begin with a slash"),
        (["times:1", "--address", "auto"], "--address needs --run"),
    ],
)
def test_wrong_input_is_refused(run_ingot: RunIngot, stored: Store, arguments: list[str], message: str) -> None:
    assert message in refused(run_ingot("deploy", "ray", *arguments))


def test_a_setting_of_the_file_alone_is_refused_by_its_name(stored: Store) -> None:
    with pytest.raises(InvalidArgument, match=r"^sticky_header has no effect behind the proxies of Ray Serve"):
        Plan.of(["times:1"], store=stored.root, settings={"sticky_header": "x-u"})
    assert Plan.of(["times:1"], store=stored.root, settings={"management": "off"}).models  # as replicas have none


def test_running_needs_ray(run_ingot: RunIngot, stored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'ingot-serve[ray]'" in refused(run_ingot("deploy", "ray", "times:1", "--run"))


@pytest.mark.parametrize(
    ("current", "waits", "loads", "wanted"),
    [
        (1, [0.01], [0.2], 1),
        (1, [0.35], [1.0], 4),  # the queued work, shared by four, is below the target for each
        (2, [0.0, 0.0], [0.7, 0.7], 2),  # one replica could not take the load
        (4, [0.0] * 4, [0.2] * 4, 1),
        (3, [0.0] * 3, [0.5] * 3, 2),
        (3, [], [], 3),  # nothing is known yet
    ],
)
def test_replicas_share_the_expected_wait(current: int, waits: list[float], loads: list[float], wanted: int) -> None:
    metrics = {name: dict(enumerate(values)) for name, values in (("wait", waits), ("load", loads)) if values}
    context = SimpleNamespace(target_num_replicas=current, aggregated_metrics=metrics)
    assert ExpectedWait(target=0.1)(context) == (wanted, {})


@pytest.mark.parametrize(
    ("path", "answer", "expected"),
    [
        ("/v2/models/a/infer", None, (500, {"error": "the replica ended before it answered; send the request again"})),
        (
            "/prefix/v2",
            PlainTextResponse("busy", 503, {"Retry-After": "3"}),
            (503, {"error": "busy"}),
        ),
        ("/v2", JSONResponse({"error": "no model"}, 404), (404, {"error": "no model"})),
        ("/v2/health/live", PlainTextResponse("text"), (200, "text")),
        ("/other", PlainTextResponse("busy", 503), (503, "busy")),
    ],
)
def test_errors_of_the_proxy_are_json(path: str, answer: Response | None, expected: tuple[int, Any]) -> None:
    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if answer is not None:
            await answer(scope, receive, send)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(JsonErrors(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return await client.get(path)

    assert repr(middlewares()) == "[Middleware(JsonErrors)]"
    response = asyncio.run(request())
    status, content = expected
    assert response.status_code == status
    assert (response.text if isinstance(content, str) else response.json()) == content
    assert response.headers.get("retry-after") == (None if answer is None else answer.headers.get("retry-after"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    if importlib.util.find_spec("ray") is None:
        (pytest.fail if os.environ.get("INGOT_REQUIRE_TOOLS") == "1" else pytest.skip)("ray is not installed")
    from tests.deploy.raylets import raylets

    with raylets(2) as found:
        yield found


def on_cluster(test: Any) -> Any:
    """Mark a test that takes a cluster: slow, and with warnings of Ray about Ray."""
    return pytest.mark.long(pytest.mark.filterwarnings("ignore")(test))


@on_cluster
def test_both_proxies_speak_the_protocol(cluster: Raylets, tmp_path: Path) -> None:
    from benchmarks.scale.ray import planned
    from tests.deploy.raylets import GRPC, HTTP

    store = Store(tmp_path)
    fill(store)
    cluster.run(planned(store, "times:prod", 1))
    for url in (HTTP, GRPC):
        with ingot.Client(url) as client:
            assert client.ready()
            assert client.metadata("times")["inputs"][0]["name"] == "x"
            assert np.array_equal(client.infer("times", {"x": X}, version="prod")["y"], X)
            with pytest.raises(NotFound, match="this server has: times"):
                client.infer("other", {"x": X})
            with pytest.raises(InvalidArgument, match=r"the model takes 4"):
                client.infer("times", {"x": np.zeros((1, 5), np.float32)})
            assert [answer["y"].tolist() for answer in client.stream("times", {"x": X})] == [X.tolist()]


@on_cluster
def test_no_request_fails_while_versions_and_replicas_roll(cluster: Raylets, tmp_path: Path) -> None:
    from benchmarks.scale.ray import roll

    store = Store(tmp_path)
    fill(store)
    counts, _ = roll(cluster, store, 0)
    assert {change: count["failed"] for change, count in counts.items()} == dict.fromkeys(
        ("alias", "fixed", "replaced"), 0
    ), counts


@on_cluster
def test_a_version_that_fails_its_golden_does_not_take_over(cluster: Raylets, tmp_path: Path) -> None:
    from benchmarks.scale.ray import planned
    from tests.deploy.raylets import HTTP

    store = Store(tmp_path)
    fill(store)
    store.push(times(3, golden=4), "times:3")
    cluster.run(planned(store, "times:2", 1))
    cluster.run(planned(store, "times:3", 1))
    with ingot.Client(HTTP) as client:
        assert np.array_equal(client.infer("times", {"x": X})["y"], 2 * X)
    other = planned(store, "times:3", 1, max_batch=2)  # replaces the replica, and the new one cannot start
    with pytest.raises(IngotError, match=r"times.* cannot be loaded"):
        cluster.run(other)


@on_cluster
def test_replicas_are_added_under_load(cluster: Raylets, tmp_path: Path) -> None:
    from benchmarks.scale.ray import scaling

    store = Store(tmp_path)
    fill(store)
    result, met = scaling(cluster, store, 0)
    assert met, result


@on_cluster
def test_a_killed_node_loses_what_was_in_flight(cluster: Raylets, tmp_path: Path) -> None:
    from benchmarks.scale.ray import node

    store = Store(tmp_path)
    fill(store)
    result, met = node(cluster, store, 0)
    assert met, result
    assert result["failed"] > 0, result  # the replica's
    assert any("the replica ended before it answered" in error for error in result["errors"]), result


@on_cluster
def test_serve_deploys_the_file(cluster: Raylets, run_ingot: RunIngot, stored: Store) -> None:
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from tests.deploy.raylets import ADDRESSES, HTTP, replicas

    ports = [f"--{name.replace('_', '-')}={port}" for name, port in ADDRESSES.items()]
    ran = []
    for version, source in ((1, "times:prod"), (2, "times:2")):
        config = written(run_ingot, source, "--cpu", "1", "--replicas", "1..2", "--route-prefix", "/model", *ports)
        serve.start("HeadOnly", http_options=config["http_options"], grpc_options=config["grpc_options"])
        serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=True)
        with ingot.Client(f"{HTTP}/model") as client:
            assert np.array_equal(client.infer("times", {"x": X})["y"], version * X)
        ran.append([replica["pid"] for replica in replicas("times")])
    assert ran[0] == ran[1]  # another version needs no restart


@on_cluster
def test_an_address_without_a_cluster_is_named(
    cluster: Raylets, run_ingot: RunIngot, stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    result = run_ingot("deploy", "ray", "times:2", "--run", "--address", "127.0.0.1:1")
    assert result.returncode == 1
    assert "error: no Ray cluster runs at 127.0.0.1:1 " in result.stderr


@on_cluster
def test_the_command_runs_several_models(cluster: Raylets, run_ingot: RunIngot, stored: Store) -> None:
    from tests.deploy.raylets import ADDRESSES, GRPC, HTTP

    ports = [f"--{name.replace('_', '-')}={port}" for name, port in ADDRESSES.items()]
    given = ["one=times:1", "two=times:2", "--name", "times", "--run", "--cpu", "1", "--replicas", "1", *ports]
    assert f"ready: {HTTP}" in succeeded(run_ingot("deploy", "ray", *given))
    for url in (HTTP, GRPC):
        with ingot.Client(url) as client:
            for factor, name in ((1, "one"), (2, "two")):
                assert np.array_equal(client.infer(name, {"x": X})["y"], factor * X)


@on_cluster
def test_deployments_form_a_pipeline(cluster: Raylets, tmp_path: Path) -> None:
    from ray import serve

    from ingot.deploy.ray import bind
    from tests.deploy.raylets import ADDRESSES

    store = Store(tmp_path)
    fill(store)

    class Pipeline:
        def __init__(self, first: Any, second: Any):
            self._models = first, second

        async def __call__(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            for name, model in zip(("double", "times"), self._models, strict=True):
                x = (await model.infer.remote(name, {"x": x}))["y"]
            return x

    parts = [bind(source, cpu=1, store=store.root, **ADDRESSES) for source in ("double=times:2", "times:1")]
    pipeline = serve.deployment(Pipeline, ray_actor_options={"num_cpus": 0}).bind(*parts)
    for name in serve.status().applications:
        serve.delete(name)
    handle = serve.run(pipeline, name="pipeline", route_prefix=None)
    assert np.array_equal(handle.remote(X).result(timeout_s=60), 2 * X)
