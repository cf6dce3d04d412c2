"""`ingot deploy helm`: a chart that Helm itself lints and renders to the objects of `ingot deploy k8s`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import IMAGE, Deploy, check
from tests.support import RunIngot, succeeded


class Helm:
    """Helm's own engine, by a package that holds it."""

    def __init__(self, folder: Path):
        try:
            import helm_python
        except ImportError:
            if os.environ.get("INGOT_REQUIRE_TOOLS") == "1":
                pytest.fail("helm-python-sdk is not installed")
            pytest.skip("helm-python-sdk is not installed")
        self._helm: Any = helm_python
        self.folder = folder

    def lint(self) -> list[str]:
        """Return the messages of faults; that the chart has no icon is not one."""
        found = self._helm.lint(self.folder)
        return [each["error"] for each in found["messages"] if "icon is recommended" not in each["error"]]

    def template(self, name: str, **values: Any) -> dict[str, Any]:
        """Return the objects of a release by kind, as ``helm template`` renders them."""
        with self._helm.Chart.load(self.folder) as chart:
            texts = chart.render(values, name=name, namespace="production")
        objects = [each for path, text in texts.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text)]
        return {each["kind"]: each for each in objects if each}


@pytest.fixture
def helm(run_ingot: RunIngot, pushed: str, tmp_path: Path) -> Helm:
    folder = tmp_path / "chart"
    succeeded(run_ingot("deploy", "helm", pushed, "--image", IMAGE, "--slo", "50ms", "-o", folder))
    return Helm(folder)


def test_a_chart_has_the_computed_values(run_ingot: RunIngot, pushed: str, tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    succeeded(run_ingot("deploy", "helm", pushed, "--image", IMAGE, "--slo", "50ms", "--replicas", "3", "-o", chart))
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert values["image"] == IMAGE
    assert values["models"][0].startswith(f"digits={pushed.removesuffix('prod')}1@sha256:")
    assert values["env"]["INGOT_SLO"] == "50ms"
    assert (values["replicas"], values["autoscaling"]["enabled"]) == (3, False)
    assert yaml.safe_load((chart / "Chart.yaml").read_text())["name"] == "digits"


@pytest.mark.long
def test_helm_renders_what_deploy_k8s_prints(deploy: Deploy, pushed: str, helm: Helm) -> None:
    assert helm.lint() == []
    expected, rendered = deploy("k8s", pushed, "--slo", "50ms"), helm.template("digits")
    check(list(rendered.values()))
    [container] = rendered["Deployment"]["spec"]["template"]["spec"]["containers"]
    [own] = expected["Deployment"]["spec"]["template"]["spec"]["containers"]
    for each in (container, own):
        each["env"].sort(key=lambda variable: str(variable["name"]))
    # What a chart has for its users to fill in.
    template = rendered["Deployment"]["spec"]["template"]
    assert template["metadata"].pop("annotations") == {}
    assert [template["spec"].pop(name) for name in ("nodeSelector", "tolerations", "affinity")] == [{}, [], {}]
    assert rendered["Service"]["metadata"].pop("annotations") == {}
    assert rendered["Service"]["spec"].pop("type") == "ClusterIP"
    assert rendered == expected


@pytest.mark.long
def test_values_change_the_objects(helm: Helm) -> None:
    rendered = helm.template(
        "blue",
        image="other:1",
        replicas=5,
        autoscaling={"enabled": False},
        serviceMonitor={"enabled": True, "labels": {"release": "prometheus"}},
        networkPolicy={"enabled": False},
        service={"type": "LoadBalancer"},
        env={"INGOT_MAX_BATCH": 64},
        extraArgs=["--cache", "64MB"],
        nodeSelector={"pool": "models"},
    )
    check(list(rendered.values()))
    assert {*rendered} & {"HorizontalPodAutoscaler", "NetworkPolicy"} == set()
    spec = rendered["Deployment"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert (rendered["Deployment"]["metadata"]["name"], spec["replicas"], container["image"]) == ("blue", 5, "other:1")
    assert container["args"][-2:] == ["--cache", "64MB"]
    assert {"name": "INGOT_MAX_BATCH", "value": "64"} in container["env"]
    assert {"name": "INGOT_SLO", "value": "50ms"} in container["env"]
    assert spec["template"]["spec"]["nodeSelector"] == {"pool": "models"}
    assert rendered["Service"]["spec"]["type"] == "LoadBalancer"
    assert rendered["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert rendered["ServiceMonitor"]["metadata"]["labels"]["release"] == "prometheus"
