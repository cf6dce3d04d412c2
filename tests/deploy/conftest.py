from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ingot.model_store import Archive, Reference
from ingot.model_store.registry import Registry
from tests.support import RunIngot, succeeded

# The oldest release with preStop.sleep on by default is 1.30.
RELEASES = ("1.30", kubernetes_validate.latest_version())
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
    assert len({each["kind"] for each in objects}) == len(objects)
    for each in objects:
        if "monitoring.coreos.com" in each["apiVersion"] or "kserve.io" in each["apiVersion"]:
            continue
        for release in RELEASES:
            kubernetes_validate.validate(dict(each), release, strict=True)


@pytest.fixture
def deploy(run_ingot: RunIngot) -> Deploy:
    return Deploy(run_ingot)
