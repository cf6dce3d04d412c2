from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ingot.model_store import Archive, Reference
from ingot.model_store.registry import Registry
from tests.support import ROOT, RunIngot, succeeded

# The oldest release with preStop.sleep on by default is 1.30.
OLDEST = "1.30"
IMAGE = "registry.local/ingot:cpu"


@pytest.fixture(scope="session")
def pushed(registry: str, digits_archive: Path) -> str:
    """A reference to the digits in a registry, by an alias; the version is 1."""
    first = Reference.parse(f"{registry}/team/digits:1")
    assert first.registry is not None
    place = Registry(first.registry)
    place.push(Archive.open(digits_archive), first)
    place.promote(first, "prod")
    return f"{registry}/team/digits:prod"


class Deploy:
    """Runs ``ingot deploy TARGET``, and returns the objects by kind after checking those of Kubernetes itself."""

    def __init__(self, run_ingot: RunIngot) -> None:
        self.run = run_ingot

    def __call__(self, target: str, *args: str, image: str = IMAGE) -> dict[str, Any]:
        text = succeeded(self.run("deploy", target, *args, "--image", image))
        objects = list(yaml.safe_load_all(text))
        check(objects)
        return {each["kind"]: each for each in objects}


def check(objects: list[Mapping[str, Any]]) -> None:
    """Validate objects against the OpenAPI schemas of Kubernetes, where unknown fields are errors."""
    import kubernetes_validate  # 5 s of CPU, which only the workers with these tests should spend

    assert len({each["kind"] for each in objects}) == len(objects)
    for each in objects:
        if "monitoring.coreos.com" in each["apiVersion"] or "kserve.io" in each["apiVersion"]:
            continue
        for release in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(dict(each), release, strict=True)


@pytest.fixture
def deploy(run_ingot: RunIngot) -> Deploy:
    return Deploy(run_ingot)


@contextmanager
def run_container(container: Mapping[str, Any], folders: Mapping[str, Path], grace: float) -> Iterator[str]:
    """Run a container's command in the pod digits-0 as a kubelet does: its arguments, variables, probes and signals.

    Args:
        container: of a manifest whose ports are free on this machine.
        folders: what takes the place of its mounts; they are made.
        grace: seconds in which it must end after SIGTERM.

    Yields:
        Its URL, once it is started, ready and alive.
    """

    def here(text: str) -> str:
        return re.sub("|".join(folders), lambda found: str(folders[found[0]]), text)

    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    variables = {each["name"]: here(each.get("value", "digits-0")) for each in container["env"]}
    variables |= {"INGOT_HOST": "127.0.0.1", "TMPDIR": str(folders["/tmp"]), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ingot", *map(here, container["args"])]
    url = f"http://127.0.0.1:{container['ports'][0]['containerPort']}"
    environment = {"PATH": os.environ["PATH"], **variables}
    with subprocess.Popen(command, env=environment, cwd=folders["/tmp"]) as process:
        try:
            assert _reached(True, url, container["startupProbe"])
            assert _answers(url, container["readinessProbe"])
            assert _answers(url, container["livenessProbe"])
            yield url
            process.send_signal(signal.SIGTERM)
            assert _reached(False, url, container["readinessProbe"])
            assert _answers(
                url, {**container["readinessProbe"], "httpGet": {"path": "/v2/models/digits", "port": "http"}}
            )
            assert process.wait(grace) == 0
        finally:
            process.kill()


def _reached(wanted: bool, url: str, probe: Mapping[str, Any]) -> bool:
    for _ in range(3000):
        if _answers(url, probe) is wanted:
            return True
        time.sleep(0.02)
    return False


def _answers(url: str, probe: Mapping[str, Any]) -> bool:
    get = probe["httpGet"]
    assert get["port"] == "http"
    try:
        response = httpx.get(url + get["path"], timeout=probe["timeoutSeconds"], trust_env=False)
    except httpx.TransportError:
        return False
    return 200 <= response.status_code < 400
