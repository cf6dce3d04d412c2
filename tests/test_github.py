"""What GitHub runs and asks for: workflows call targets that exist, on every Python that the package names."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from tests.support import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def test_every_job_has_a_limit_of_time_and_runs_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for job in jobs().values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            called |= set(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    assert {"lint", "test", "test-matrix", "site", "dist"} <= called <= targets


def test_each_python_that_the_package_names_is_tested() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [item.rpartition(" ")[2] for item in classifiers if re.search(r":: 3\.\d+$", item)]
    assert jobs()["test"]["strategy"]["matrix"]["python"] == named


def test_a_report_of_a_fault_needs_versions_a_reproduction_and_the_archive() -> None:
    fields = yaml.safe_load((FORMS / "bug.yml").read_text())["body"]
    needed = {field["id"] for field in fields if field.get("validations", {}).get("required")}
    assert needed == {"happened", "reproduction", "inspect", "versions"}


def test_pages_that_the_forms_name_exist() -> None:
    for form in FORMS.glob("*.yml"):
        for page in re.findall(r"docs/[\w/-]+\.md", form.read_text()):
            assert (ROOT / page).is_file(), f"{form.name} names {page}"
