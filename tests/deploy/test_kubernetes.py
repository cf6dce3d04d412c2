"""`ingot deploy k8s`: valid objects with values that follow from the model and the settings, and a server that fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.processes import free_ports
from ingot.config import ServerConfig
from ingot.deploy.plan import Plan, Served, object_name
from ingot.errors import InvalidArgument
from ingot.model_store import Reference
from tests.deploy.conftest import IMAGE, Deploy, run_container
from tests.runtime import variants
from tests.runtime.variants import Made
from tests.support import RunIngot, refused, succeeded

KINDS = [
    *("NetworkPolicy", "Service", "Deployment", "PodDisruptionBudget"),
    *("HorizontalPodAutoscaler", "ServiceMonitor"),
]


def container(objects: dict[str, Any]) -> dict[str, Any]:
    [found] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def variables(objects: dict[str, Any]) -> dict[str, str]:
    """Those of a pod called digits-0."""
    given = {each["name"]: each.get("value", "digits-0") for each in container(objects)["env"]}
    assert given["INGOT_REPLICA"] == "digits-0"
    return given


@pytest.mark.matrix
def test_the_objects_are_valid_and_belong_together(deploy: Deploy, pushed: str) -> None:
    objects = deploy("k8s", pushed)
    assert list(objects) == KINDS
    pod = objects["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "ServiceMonitor"):
        assert objects[kind]["spec"]["selector"]["matchLabels"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert objects["ServiceMonitor"]["metadata"]["labels"] == objects["Service"]["metadata"]["labels"]
    assert "replicas" not in objects["Deployment"]["spec"]  # otherwise each apply would undo the autoscaler's work
    # The metric of pods needs an adapter, that of the processor none.
    assert [each["type"] for each in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]] == ["Pods", "Resource"]
    labelled = deploy("k8s", pushed, "--monitor-label", "release=prometheus")["ServiceMonitor"]["metadata"]["labels"]
    assert labelled == {**labels, "release": "prometheus"}
    names = {each["name"] for each in container(objects)["ports"]}
    assert {each["targetPort"] for each in objects["Service"]["spec"]["ports"]} == names
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["port"] in names


@pytest.mark.matrix
def test_the_pod_satisfies_the_restricted_standard(deploy: Deploy, pushed: str) -> None:
    objects = deploy("k8s", pushed)
    pod, own = objects["Deployment"]["spec"]["template"]["spec"], container(objects)["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"], own["runAsNonRoot"]) == (False, True, True)
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    assert {*pod} & {"hostNetwork", "hostPID", "hostIPC"} == set()
    mounts = {each["name"]: each["mountPath"] for each in container(objects)["volumeMounts"]}
    assert {each["name"] for each in pod["volumes"]} == set(mounts)
    assert all("sizeLimit" in each["emptyDir"] for each in pod["volumes"])


@pytest.mark.matrix
def test_the_archive_is_named_by_its_version_and_digest(deploy: Deploy, pushed: str) -> None:
    [command, source] = container(deploy("k8s", f"{pushed}#fp32"))["args"]
    place = pushed.removesuffix(":prod")
    assert command == "serve"
    assert re.fullmatch(rf"digits={re.escape(place)}:1@sha256:[0-9a-f]{{64}}#fp32", source)
    ports = {
        each["port"] for rule in deploy("k8s", pushed)["NetworkPolicy"]["spec"]["egress"] for each in rule["ports"]
    }
    assert ports == {53, int(pushed.split(":")[2].split("/")[0])}


@pytest.mark.matrix
def test_settings_become_variables_and_decide_on_the_rest(deploy: Deploy, pushed: str) -> None:
    default = deploy("k8s", pushed)
    changed = deploy("k8s", f"MyNet={pushed}", "--ready-delay", "20s", "--drain-timeout", "60s", "--http-port", "9000",
                     "--instances", "2", "--threads", "3", "--slo", "50ms", "--load-timeout", "10s")  # fmt: skip
    pods = [each["Deployment"]["spec"]["template"]["spec"] for each in (default, changed)]
    # 15 s in which a leaving pod gets requests, ready-delay included; 30 or 60 s to drain; 20 s to end.
    assert container(default)["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert "lifecycle" not in container(changed)
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [15 + 30 + 20, 20 + 60 + 20]
    found = variables(changed)
    assert (found["INGOT_READY_DELAY"], found["INGOT_SLO"], found["INGOT_INSTANCES"]) == ("20s", "50ms", "2")
    assert container(changed)["ports"][0]["containerPort"] == int(found["INGOT_HTTP_PORT"]) == 9000
    assert container(changed)["resources"]["limits"]["cpu"] == "6"
    assert changed["Service"]["metadata"]["name"] == "mynet"
    assert changed["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["selector"] == {
        "matchLabels": {"model": "MyNet"}
    }
    startup = [container(each)["startupProbe"] for each in (default, changed)]
    assert [each["periodSeconds"] * each["failureThreshold"] for each in startup] == [302, 12]


@pytest.mark.matrix
def test_settings_mean_the_same_in_a_container(deploy: Deploy, pushed: str) -> None:
    options = ("--otlp", "http://$(INGOT_HOME)$$:4318", "--replica", "blue")
    given = container(deploy("k8s", pushed, *options))["env"]
    values = {each["name"]: each.get("value") for each in given}
    assert values["INGOT_OTLP"] == "http://$$(INGOT_HOME)$$$$:4318"
    assert values["INGOT_REPLICA"] == "blue"
    assert len(values) == len(given)


@pytest.mark.matrix
def test_certificates_keys_and_credentials_come_from_secrets(deploy: Deploy, pushed: str) -> None:
    objects = deploy("k8s", pushed, "--secret", "access", "--pull-secret", "pull", "--tls-cert", "/access/tls.crt",
                     "--tls-key", "/access/tls.key", "--auth", "/access/keys.toml", "--replicas", "3")  # fmt: skip
    found = variables(objects)
    assert "INGOT_INSECURE" not in found
    assert found["INGOT_AUTH"] == "/access/keys.toml"
    probes = [container(objects)[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {each["scheme"] for each in probes} == {"HTTPS"}
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["scheme"] == "https"
    mounts = {each["name"]: each["mountPath"] for each in container(objects)["volumeMounts"]}
    assert found["DOCKER_CONFIG"] == mounts["credentials"]
    assert "HorizontalPodAutoscaler" not in objects
    assert objects["Deployment"]["spec"]["replicas"] == 3


@pytest.mark.matrix
def test_files_are_the_text_and_comments_explain_the_values(run_ingot: RunIngot, pushed: str, tmp_path: Path) -> None:
    printed = run_ingot("deploy", "k8s", pushed, "--image", IMAGE)
    assert f"name it by its digest: {IMAGE}@sha256:..." in printed.stderr
    pinned = run_ingot("deploy", "k8s", pushed, "--image", f"{IMAGE}@sha256:{'0' * 64}")
    assert "digest" not in succeeded(pinned) + pinned.stderr
    text = printed.stdout
    assert "\n      # 5 s preStop, 10 s ready-delay, 30 s drain-timeout, and some to end\n" in text
    assert "null" not in text
    folder = tmp_path / "manifests"
    for _ in range(2):
        written = run_ingot("deploy", "k8s", pushed, "--image", IMAGE, "--output", folder)
        assert written.stdout == ""
        assert f"to {folder}" in written.stderr
        assert sorted(each.read_text() for each in folder.iterdir()) == sorted(text.split("---\n"))


@pytest.mark.matrix
def test_pods_of_a_node_can_share_a_store_that_is_filled_before(
    deploy: Deploy, run_ingot: RunIngot, pushed: str, tmp_path: Path
) -> None:
    objects = deploy("k8s", f"{pushed}#fp32", "--node-store", "/var/lib/ingot", "--pull-secret", "pull")
    pods = {kind: objects[kind]["spec"]["template"] for kind in ("Deployment", "DaemonSet")}
    stores = [each for pod in pods.values() for each in pod["spec"]["volumes"] if each["name"] == "store"]
    assert stores == [{"name": "store", "hostPath": {"path": "/var/lib/ingot", "type": "Directory"}}] * 2
    selected = objects["Service"]["spec"]["selector"].items()
    assert [selected <= pod["metadata"]["labels"].items() for pod in pods.values()] == [True, False]
    # The server finds what the command has pulled, under whatever name.
    [pull] = pods["DaemonSet"]["spec"]["initContainers"]
    assert container(objects)["args"][1].partition("=")[2] == f"{pull['args'][1]}#fp32"
    succeeded(run_ingot(*pull["args"]))
    digest = container(objects)["args"][1].partition("@")[2].partition("#")[0]
    assert digest in succeeded(run_ingot("store", "list"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["PUSHED", "--node-store", "here"], "absolute path"),
        (["digits:1"], "--registry"),
        (["./digits.ingot"], "ingot copy ./digits.ingot oci://HOST/NAME:TAG"),
        (["PUSHED", "PUSHED"], "two models are called 'digits'"),
        (["PUSHED", "--replicas", "8..2"], "at most the most"),
        (["PUSHED", "--replicas", "many"], "write 4 or 2..8"),
        (["PUSHED", "--name", "My_Net"], "--name"),
        (["PUSHED", "--http-port", "80"], "--http-port must be at least 1024"),
        (["PUSHED", "--auth", "keys.toml"], "/access/keys.toml"),
        (["PUSHED", "--auth", "/access/keys.toml"], "--secret"),
        (["PUSHED", "--slo", "fast"], "--slo"),
        (["a{{b}}=PUSHED"], "is not a model reference"),
        (["PUSHED", "--secret", "{{ .Values.image }}"], "--secret '{{ .Values.image }}' is not a name of Kubernetes"),
        (["PUSHED", "--pull-secret", "a: b"], "--pull-secret"),
        (["PUSHED", "--monitoring", "Monitoring"], "--monitoring"),
        (["PUSHED", "--monitor-label", "release"], "write NAME=VALUE"),
        (["PUSHED", "--monitor-label", "release=a b"], "the value must be at most 63 letters"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_what_would_not_run_is_refused(
    run_ingot: RunIngot, pushed: str, digits_archive: Path, arguments: list[str], says: str
) -> None:
    run_ingot("copy", digits_archive, "digits:1")
    wanted = [each.replace("PUSHED", pushed) for each in arguments]
    assert says in refused(run_ingot("deploy", "k8s", *wanted, "--image", IMAGE))


@pytest.mark.matrix
def test_an_archive_of_the_store_is_named_in_the_registry(
    deploy: Deploy, run_ingot: RunIngot, digits_archive: Path
) -> None:
    run_ingot("copy", digits_archive, "digits:1")
    [_, source] = container(deploy("k8s", "digits:1", "--registry", "oci://registry.local/team"))["args"]
    assert source.startswith("digits=oci://registry.local/team/digits:1@sha256:")


@pytest.mark.parametrize(
    ("form", "isolated", "settings", "mebibytes"),
    [
        ("onnx", False, {}, 256 + 10),
        ("onnx", True, {"instances": 2}, 256 + 2 * (10 + 64)),
        ("onnx", True, {"isolate": "none"}, 256 + 10),
        ("onnx", False, {"isolate": "all"}, 256 + 10 + 64),
        ("pt2", True, {"allow_code": True, "instances": 2}, 256 + 2 * (10 + 512)),
    ],
)
def test_memory_includes_engine_processes(form: str, isolated: bool, settings: dict[str, Any], mebibytes: int) -> None:
    model = Served("net", Reference("net"), 10 << 20, 1, {}, formats=frozenset({form}), isolated=isolated)
    config = ServerConfig(**settings)
    plan = Plan(name="net", models=(model,), image=IMAGE, settings=config, environment={}, has_torch=True)
    assert plan.memory_request == mebibytes << 20


@pytest.mark.matrix
def test_an_archive_that_pods_cannot_serve_is_refused(
    deploy: Deploy, run_ingot: RunIngot, registry: str, tmp_path: Path
) -> None:
    variants.archive([Made("pt2", format="pt2", graph=b"code")], "net").save(tmp_path / "net.ingot")
    succeeded(run_ingot("copy", tmp_path / "net.ingot", source := f"{registry}/team/net:1"))
    command = ("deploy", "k8s", source, "--image", IMAGE)
    assert "pods refuse; give --allow-code, or export a variant of format onnx" in refused(run_ingot(*command))
    assert "give --image-has-torch" in refused(run_ingot(*command, "--allow-code"))
    objects = deploy("k8s", source, "--allow-code", "--image-has-torch")
    assert container(objects)["resources"]["requests"]["memory"] == "769Mi"
    # A variant that can run is enough.
    both = [Made("pt2", format="pt2", graph=b"code"), Made("fp32")]
    variants.archive(both, "both").save(tmp_path / "both.ingot")
    succeeded(run_ingot("copy", tmp_path / "both.ingot", source := f"{registry}/team/both:1"))
    assert container(deploy("k8s", source))["resources"]
    assert "has only variants" in refused(run_ingot("deploy", "k8s", f"{source}#pt2", "--image", IMAGE))


LATENCY = {1: 0.001, 8: 0.002, 32: 0.004, 64: 0.010}


@pytest.mark.parametrize(
    ("latency", "settings", "busy"),
    [
        (LATENCY, {}, 2 * 32),  # 8,000 samples/s in batches of 32, the most
        (LATENCY, {"instances": 2}, 2 * 2 * 32),
        (LATENCY, {"max_batch": 8}, 2 * 8),
        (LATENCY, {"slo": 0.1}, 400),  # 50 ms at 8,000 samples/s
        (LATENCY, {"slo": 0.004}, 8),  # only batches of at most 2 ms leave half of the time: 4,000 samples/s
        ({32: 1e-5}, {"slo": 0.1}, 500),  # no server reads 3.2 million requests per second
        (LATENCY, {"slo": 0.1, "max_queue": 100}, 100),
        ({}, {"max_batch": 16}, 2 * 16),
    ],
)
def test_replicas_are_added_before_requests_are_late(
    latency: dict[int, float], settings: dict[str, Any], busy: int
) -> None:
    model = Served("digits", Reference("digits"), 1, 1, latency)
    assert model.busy_at(ServerConfig(**settings)) == busy


def test_names_of_objects() -> None:
    assert object_name("team/My_Net.v2") == "my-net-v2"
    assert object_name("x" * 80) == "x" * 53
    with pytest.raises(InvalidArgument, match="--name"):
        Plan(name="2nd", models=(), image="", settings=ServerConfig(), environment={})


@pytest.mark.matrix
def test_the_containers_command_passes_the_probes_and_ends_within_the_grace_period(
    deploy: Deploy, pushed: str, tmp_path: Path
) -> None:
    http_port, grpc_port = free_ports(2)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    objects = deploy("k8s", pushed, *ports, "--ready-delay", "1s")
    grace = objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    folders = {each["mountPath"]: tmp_path / each["name"] for each in container(objects)["volumeMounts"]}
    with run_container(container(objects), folders, grace) as url:
        metrics = httpx.get(url + objects["ServiceMonitor"]["spec"]["endpoints"][0]["path"], trust_env=False).text
        metric = objects["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]
        assert f'{metric["name"]}{{model="{metric["selector"]["matchLabels"]["model"]}",version="1"}} 0.0' in metrics
        assert 'replica="digits-0"' in metrics
