"""`ingot deploy kserve`: objects that KServe's SDK knows, an initializer that pulls, and a server that answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.processes import free_ports
from tests.deploy.conftest import IMAGE, Deploy, run_container
from tests.support import ROOT, RunIngot, refused, succeeded

SCHEMA = json.loads(Path(__file__).with_name("kserve.schema.json").read_text())
MODEL_IMAGE = "registry.local/digits-model@sha256:" + "0" * 64


def known(objects: dict[str, Any]) -> None:
    """Validate objects against KServe's types, and Kubernetes' within them; unknown fields are errors."""
    import kubernetes_validate.utils  # late, as in conftest
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    release = kubernetes_validate.latest_version()
    folder = f"kubernetes-json-schema/v{release}-local-strict"
    definitions = kubernetes_validate.utils.schema_contents(f"{folder}/_definitions.json", release)
    resource = Resource.from_contents(definitions, default_specification=DRAFT202012)
    registry = Registry().with_resource("kubernetes", resource)
    for kind, content in objects.items():
        if kind == "NetworkPolicy":  # Kubernetes' own, which is checked already
            continue
        Draft202012Validator({"$defs": SCHEMA["$defs"], "allOf": [SCHEMA["kinds"][kind]]}, registry=registry).validate(
            content
        )


@pytest.mark.matrix
def test_an_unknown_field_is_found(deploy: Deploy, pushed: str) -> None:
    objects = deploy("kserve", pushed)
    known(objects)
    objects["ServingRuntime"]["spec"]["containers"][0]["probe"] = {}
    with pytest.raises(Exception, match="'probe' was unexpected"):
        known(objects)


@pytest.mark.parametrize(
    ("arguments", "uri"),
    [
        (["--storage", "modelcar", "--model-image", MODEL_IMAGE], f"oci://{MODEL_IMAGE}"),
        (["--storage", "native", "--model-image", MODEL_IMAGE], f"oci+native://{MODEL_IMAGE}"),
    ],
    ids=["modelcar", "native"],
)
def test_images_hold_the_archive(deploy: Deploy, pushed: str, arguments: list[str], uri: str) -> None:
    objects = deploy("kserve", f"{pushed}#fp32", *arguments, "--pull-secret", "pull")
    known(objects)
    assert list(objects) == ["NetworkPolicy", "ServingRuntime", "InferenceService"]
    selected = objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert selected == {"serving.kserve.io/inferenceservice": objects["InferenceService"]["metadata"]["name"]}
    assert [rule["ports"][0]["port"] for rule in objects["NetworkPolicy"]["spec"]["ingress"]] == ["http", "http"]
    assert "sizeLimit" in objects["ServingRuntime"]["spec"]["volumes"][0]["emptyDir"]
    predictor = objects["InferenceService"]["spec"]["predictor"]
    assert predictor["model"]["storageUri"] == uri
    assert predictor["model"]["runtime"] == objects["ServingRuntime"]["metadata"]["name"]
    assert predictor["imagePullSecrets"] == [{"name": "pull"}]
    [container] = objects["ServingRuntime"]["spec"]["containers"]
    assert container["args"][1] == "{{.Name}}=/mnt/models/model.ingot#fp32"


@pytest.mark.matrix
def test_an_image_is_named_where_it_is_used(run_ingot: RunIngot, pushed: str) -> None:
    for arguments in (["--storage", "native"], ["--model-image", MODEL_IMAGE]):
        assert "--model-image" in refused(run_ingot("deploy", "kserve", pushed, "--image", IMAGE, *arguments))


def test_the_initializer_pulls_the_archive_that_is_served(
    deploy: Deploy, run_ingot: RunIngot, pushed: str, tmp_path: Path
) -> None:
    """Its command with the arguments that KServe appends."""
    objects = deploy("kserve", pushed)
    known(objects)
    spec = objects["ClusterStorageContainer"]["spec"]
    uri = objects["InferenceService"]["spec"]["predictor"]["model"]["storageUri"]
    assert any(uri.startswith(each["prefix"]) for each in spec["supportedUriFormats"])
    program = tmp_path / "bin" / "ingot"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ingot "$@"\n')
    program.chmod(0o755)
    models = tmp_path / "models"
    models.mkdir()
    environment = {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "INGOT_HOME": str(tmp_path / "store"),
    }
    command = [*spec["container"]["command"], uri, str(models)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True)
    [container] = objects["ServingRuntime"]["spec"]["containers"]
    name, _, path = container["args"][1].partition("=")
    assert name == "{{.Name}}"
    there = models / Path(path).relative_to("/mnt/models")
    shown = json.loads(succeeded(run_ingot("inspect", there, "--json")))
    assert uri.endswith(shown["digest"])


@pytest.mark.matrix
def test_the_runtimes_command_passes_the_probes_and_ends_within_the_grace_period(
    deploy: Deploy, pushed: str, digits_archive: Path, tmp_path: Path
) -> None:
    """Its command with the name that KServe puts into it, and the archive where an image or the initializer has it."""
    http_port, grpc_port = free_ports(2)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    objects = deploy("kserve", pushed, *ports, "--ready-delay", "1s")
    [container] = objects["ServingRuntime"]["spec"]["containers"]
    container["args"] = [each.replace("{{.Name}}", "digits") for each in container["args"]]
    folders = {"/mnt/models": tmp_path / "models", "/tmp": tmp_path / "scratch"}
    folders["/mnt/models"].mkdir()
    shutil.copy(digits_archive, folders["/mnt/models"] / "model.ingot")
    grace = objects["InferenceService"]["spec"]["predictor"]["terminationGracePeriodSeconds"]
    with run_container(container, folders, grace) as url:
        assert httpx.get(f"{url}/v2/models/digits/ready", trust_env=False).status_code == 200
